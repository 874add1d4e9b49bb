"""The notice source against the emulated metadata server, and against servers that misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from spotfleet import model
from spotfleet.errors import NoticeFormat
from spotfleet.interruptions import load
from spotfleet.interruptions.imds import ACTION_PATH, REBALANCE_PATH, ImdsSource
from spotfleet.model import CloudState, Offer, Role
from spotfleet.providers.local.market.book import ActiveNotice, HostOrder, LocalHost
from spotfleet.providers.local.metadata import MetadataServer

NOW = 1_800_000_000.0
OFFER = Offer("local", "local", "local-a", "gpu.small", model.Market.SPOT, 1, 970_000, 3_060_000)
QUIET = LocalHost(HostOrder("f-1", "f", Role.WORKER, OFFER.pool), "i-1", OFFER, CloudState.RUNNING, NOW)


def with_notice(action: str = "terminate", in_s: float = 120.0) -> LocalHost:
    return LocalHost(QUIET.order, "i-1", OFFER, CloudState.RUNNING, NOW, notice=ActiveNotice(action, NOW, NOW + in_s))


@pytest.fixture
def serve() -> Iterator:
    """Starts a metadata server for a host, or for the list of hosts whose last one is the present; gives its URL."""
    servers = []

    def start(present: list[LocalHost | None]) -> str:
        servers.append(MetadataServer("127.0.0.1", 0, lambda: present[-1]))
        return f"http://127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        server.close()


def ask(url: str, method: str, path: str, **headers: str) -> tuple[int, str]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_metadata_server_wants_a_token_with_a_lifetime(serve):
    url = serve([with_notice()])
    assert ask(url, "GET", ACTION_PATH)[0] == 401
    assert ask(url, "GET", ACTION_PATH, X_aws_ec2_metadata_token="made up")[0] == 401
    for ttl in ("", "0", "21601", "soon"):
        assert ask(url, "PUT", "/latest/api/token", X_aws_ec2_metadata_token_ttl_seconds=ttl)[0] == 400
    assert ask(url, "PUT", "/latest/api/token")[0] == 400
    status, token = ask(url, "PUT", "/latest/api/token", X_aws_ec2_metadata_token_ttl_seconds="60")
    assert status == 200
    assert ask(url, "GET", "/latest/meta-data/instance-id", X_aws_ec2_metadata_token=token) == (200, "i-1")
    status, body = ask(url, "GET", ACTION_PATH, X_aws_ec2_metadata_token=token)
    assert (status, body) == (200, '{"action": "terminate", "time": "2027-01-15T08:02:00.000Z"}')
    for path in (REBALANCE_PATH, "/latest/meta-data/no-such-thing"):
        assert ask(url, "GET", path, X_aws_ec2_metadata_token=token)[0] == 404


def test_a_token_ends_with_its_lifetime(serve):
    url = serve([QUIET])
    _, token = ask(url, "PUT", "/latest/api/token", X_aws_ec2_metadata_token_ttl_seconds="1")
    deadline = time.monotonic() + 30
    while ask(url, "GET", "/latest/meta-data/instance-id", X_aws_ec2_metadata_token=token)[0] != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("action", "told"), [("terminate", "terminate"), ("stop", "stop")])
def test_a_notice_says_what_happens_and_in_how_many_seconds(serve, action, told):
    source = load("local", serve([with_notice(action, 120.0)]))
    source._now = lambda: NOW + 20.5
    notice = source.poll()
    assert (notice.seconds_left, notice.action, notice.kind) == (99.5, told, "interruption")


def test_a_notice_whose_time_has_passed_leaves_no_time(serve):
    assert ImdsSource(serve([with_notice(in_s=5.0)]), now=lambda: NOW + 60).poll().seconds_left == 0.0


def test_a_withdrawn_notice_is_none_again(serve):
    present: list[LocalHost | None] = [with_notice()]
    source = ImdsSource(serve(present))
    assert source.poll() is not None
    present.append(QUIET)
    assert source.poll() is None


def test_a_recommendation_is_a_hint_and_an_interruption_goes_before_it(serve):
    hint = LocalHost(QUIET.order, "i-1", OFFER, CloudState.RUNNING, NOW, rebalance_at=NOW)
    both = LocalHost(QUIET.order, "i-1", OFFER, CloudState.RUNNING, NOW, rebalance_at=NOW, notice=with_notice().notice)
    present: list[LocalHost | None] = [hint]
    source = ImdsSource(serve(present))
    assert source.poll().kind == "rebalance"
    present.append(both)
    assert source.poll().kind == "interruption"


class Scripted:
    """A metadata server that says whatever a test wants, and counts what it was asked."""

    def __init__(self, answers: dict[str, tuple[int, str]], silent_s: float = 0.0) -> None:
        self.answers, self.silent_s = answers, silent_s
        self.asked: list[str] = []
        self.valid = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                outer.asked.append("token")
                outer.valid = f"token-{len(outer.asked)}"
                self.say(200, outer.valid)

            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.gate.wait(outer.silent_s)
                good = self.headers.get("X-aws-ec2-metadata-token") == outer.valid
                self.say(*(outer.answers.get(self.path, (404, "")) if good else (401, "")))

            def say(self, status: int, body: str) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body.encode())))
                    self.end_headers()
                    self.wfile.write(body.encode())
                except ConnectionError:
                    self.close_connection = True  # the caller's patience was over

            def log_message(self, format: str, *args: object) -> None:
                return

        self.gate = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def scripted() -> Iterator:
    servers = []

    def start(answers: dict[str, tuple[int, str]] | None = None, silent_s: float = 0.0) -> Scripted:
        servers.append(Scripted(answers or {}, silent_s))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_token_is_kept_between_polls_and_renewed_once_when_refused(scripted):
    server = scripted({ACTION_PATH: (200, '{"action": "stop", "time": "2027-01-15T08:02:00Z"}')})
    source = ImdsSource(server.url, now=lambda: NOW)
    assert source.poll() == source.poll() and server.asked.count("token") == 1
    server.valid = "the server was restarted"
    assert source.poll().seconds_left == 120.0 and server.asked.count("token") == 2


def test_a_token_that_is_always_refused_is_an_error_not_a_loop(scripted):
    server = scripted({ACTION_PATH: (401, "")})
    with pytest.raises(NoticeFormat, match="401"):
        ImdsSource(server.url).poll()
    assert server.asked.count("token") == 2


@pytest.mark.parametrize(("path", "answer", "complaint"), [
    (ACTION_PATH, (200, "<html>"), "JSON object"),
    (ACTION_PATH, (200, "[]"), "JSON object"),
    (ACTION_PATH, (200, '{"action": "dance", "time": "2027-01-15T08:02:00Z"}'), "action"),
    (ACTION_PATH, (200, '{"time": "2027-01-15T08:02:00Z"}'), "action"),
    (ACTION_PATH, (200, '{"action": "stop", "time": "soon"}'), "time"),
    (ACTION_PATH, (200, '{"action": "stop"}'), "time"),
    (ACTION_PATH, (500, ""), "500"),
    (REBALANCE_PATH, (200, '{"noticeTime": 5}'), "noticeTime"),
])
def test_an_answer_that_cannot_be_read_is_named(scripted, path, answer, complaint):
    with pytest.raises(NoticeFormat, match=complaint):
        ImdsSource(scripted({path: answer}).url).poll()


def test_hibernation_is_a_stop_for_us(scripted):
    server = scripted({ACTION_PATH: (200, '{"action": "hibernate", "time": "2027-01-15T08:02:00Z"}')})
    assert ImdsSource(server.url).poll().action == "stop"


def test_a_silent_server_costs_about_two_seconds(scripted):
    server = scripted(silent_s=30.0)
    started = time.monotonic()
    with pytest.raises(OSError):
        ImdsSource(server.url).poll()
    assert time.monotonic() - started < 25


def test_where_nobody_answers_it_is_an_os_error(scripted):
    server = scripted()
    server.close()
    with pytest.raises(OSError):
        ImdsSource(server.url).poll()
    server.server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.server.serve_forever, args=(0.02,), daemon=True).start()
