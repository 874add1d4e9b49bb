"""What comes over the wire where the fake answers as a good AWS does: odd pages, odd bodies, silence."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Need
from spotfleet.providers.aws import prices, session
from spotfleet.providers.aws.section.spec import AwsSpec
from spotfleet.providers.aws.session import Account, Settings

XMLNS = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'


class Scripted(ThreadingHTTPServer):
    """Answers each request with what `script` says of its parameters: (status, body)."""

    daemon_threads = True

    def __init__(self, script: Callable[[str, dict[str, str]], tuple[int, str]]) -> None:
        self.script, self.seen = script, []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._answer({k: v[0] for k, v in parse_qs(body).items()})

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._answer({})

    def _answer(self, parameters: dict[str, str]) -> None:
        self.server.seen.append((self.command, self.path, parameters))
        status, body = self.server.script(f"{self.command} {self.path}", parameters)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch) -> Iterator[Callable[..., Scripted]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    servers = []

    def make(script) -> Scripted:
        server = Scripted(script)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return server

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def account(url: str, side: str = "laptop") -> Account:
    return Account(Settings(AwsSpec(regions=("us-east-1",)), endpoint_url=url, side=side))


def history(items: list[tuple[str, str]], token: str) -> str:
    lines = "".join(f"<item><instanceType>g5.xlarge</instanceType><productDescription>Linux/UNIX</productDescription>"
                    f"<spotPrice>{usd}</spotPrice><timestamp>{at}</timestamp>"
                    f"<availabilityZone>us-east-1a</availabilityZone></item>" for at, usd in items)
    return (f"<DescribeSpotPriceHistoryResponse {XMLNS}><spotPriceHistorySet>{lines}</spotPriceHistorySet>"
            f"<nextToken>{token}</nextToken></DescribeSpotPriceHistoryResponse>")


def test_pages_without_anything_in_them_do_not_end_a_history(scripted):
    """EC2 answers so: an empty page with a token is followed by one with prices."""
    pages = {"": history([("2026-01-02T00:00:00.000Z", "0.5")], "t1"), "t1": history([], "t2"),
             "t2": history([("2026-01-01T00:00:00.000Z", "0.4")], "")}
    server = scripted(lambda what, p: (200, pages[p.get("NextToken", "")]))
    found = prices.prices(account(server.url), ["aws/us-east-1a/g5.xlarge/spot"], 1767225600.0)
    assert [p.micros_h for p in found] == [400_000, 500_000]
    assert len(server.seen) == 3


def error(code: str, message: str) -> str:
    return (f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
            "<RequestID>r</RequestID></Response>")


DENIED = "You are not authorized to perform this operation. Encoded authorization failure message: c2VjcmV0"
DECODED = {"allowed": False, "context": {"principal": {"arn": "arn:aws:iam::1:user/me"}, "action": "ec2:RunInstances",
                                         "resource": "arn:aws:ec2:us-east-1:1:volume/*"}}


def decoding(allowed: bool) -> Callable[[str, dict[str, str]], tuple[int, str]]:
    def script(what: str, parameters: dict[str, str]) -> tuple[int, str]:
        if parameters["Action"] != "DecodeAuthorizationMessage":
            return 403, error("UnauthorizedOperation", DENIED)
        assert parameters["EncodedMessage"] == "c2VjcmV0"
        if not allowed:
            return 403, ("<ErrorResponse><Error><Code>AccessDenied</Code><Message>no</Message></Error></ErrorResponse>")
        return 200, ("<DecodeAuthorizationMessageResponse><DecodeAuthorizationMessageResult><DecodedMessage>"
                     + json.dumps(DECODED).replace('"', "&quot;") + "</DecodedMessage>"
                     "</DecodeAuthorizationMessageResult></DecodeAuthorizationMessageResponse>")

    return script


def test_a_denial_whose_reason_is_encoded_is_decoded_where_that_is_allowed(scripted):
    with pytest.raises(NeedsPerson) as told:
        account(scripted(decoding(True)).url).launching("us-east-1").run_instances(MinCount=1, MaxCount=1)
    assert str(told.value) == ("aws us-east-1: denied: ec2:RunInstances on arn:aws:ec2:us-east-1:1:volume/* for "
                               "arn:aws:iam::1:user/me (UnauthorizedOperation)")


def test_a_denial_that_stays_encoded_names_the_call_and_shows_no_cipher(scripted):
    with pytest.raises(NeedsPerson) as told:
        account(scripted(decoding(False)).url).launching("us-east-1").run_instances(MinCount=1, MaxCount=1)
    assert str(told.value) == ("aws us-east-1: denied: ec2:RunInstances: You are not authorized to perform this "
                               "operation (UnauthorizedOperation)")


def test_somebody_between_us_and_aws_who_answers_with_a_web_page_is_a_passing_trouble(scripted, hurried):
    page = "<!doctype html><html><title>Bad gateway</title></html>"
    with pytest.raises(SpotfleetError, match="AWS does not answer: what came is no answer of AWS's") as told:
        account(scripted(lambda what, p: (502, page)).url).client("ec2").describe_regions()
    assert type(told.value) is SpotfleetError
    assert "<" not in str(told.value)


def test_an_answer_that_is_none_is_a_passing_trouble(scripted, hurried):
    with pytest.raises(SpotfleetError, match="AWS does not answer: what came is no answer"):
        account(scripted(lambda what, p: (200, "welcome to our hotel")).url).client("ec2").describe_regions()


def test_an_aws_that_says_nothing_is_given_up_in_time(scripted, monkeypatch):
    monkeypatch.setattr(session, "READ_S", 0.2)
    monkeypatch.setattr(session, "ATTEMPTS", 1)
    done = threading.Event()

    def silent(what: str, parameters: dict[str, str]) -> tuple[int, str]:
        done.wait(20.0)
        return 200, ""

    server = scripted(silent)
    with pytest.raises(SpotfleetError, match="AWS does not answer"):
        account(server.url).client("ec2").describe_regions()
    done.set()


def test_a_machine_that_has_just_booted_waits_for_its_credentials(scripted, monkeypatch):
    """The metadata server answers 404 until the profile has reached it."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    early = iter(range(3))
    keys = json.dumps({"Code": "Success", "AccessKeyId": "a", "SecretAccessKey": "b", "Token": "c",
                       "LastUpdated": "2026-01-01T00:00:00Z", "Expiration": "2099-01-01T00:00:00Z"})

    def script(what: str, parameters: dict[str, str]) -> tuple[int, str]:
        if what.endswith("/api/token"):
            return 200, "token"
        if what.endswith("/security-credentials/"):
            return (404, "") if next(early, None) is not None else (200, "role")
        if what.endswith("/security-credentials/role"):
            return 200, keys
        return 200, f"<DescribeRegionsResponse {XMLNS}><regionInfo/></DescribeRegionsResponse>"

    server = scripted(script)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
    account(server.url, side="dispatcher").client("ec2").describe_regions()


def test_no_need_for_accelerators_reads_more_than_the_families_that_have_them(scripted):
    server = scripted(lambda what, p: (200, f"<DescribeInstanceTypesResponse {XMLNS}><instanceTypeSet/>"
                                            "</DescribeInstanceTypesResponse>"))
    from spotfleet.providers.aws import types

    assert types.fitting(account(server.url), "us-east-1", Need(accelerator="A10G")) == {}
    ((_, _, asked),) = server.seen
    assert (asked["Filter.1.Value.1"], asked["Filter.1.Value.2"]) == ("g*", "p*")
