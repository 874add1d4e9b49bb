"""The door of the cloud: every request is understood, logged, allowed or refused, and answered by us or by moto."""

from __future__ import annotations

import io
import json
import re
import socket
import traceback
import uuid
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl
from wsgiref.handlers import format_date_time

from tests.support.fakes import service_models
from tests.support.fakes.aws import ordering
from tests.support.fakes.aws.errors import AwsError, Lost, answer
from tests.support.fakes.aws.operations import OPERATIONS, Context
from tests.support.fakes.kit.requests import Call, RequestScript

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud

CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")
ANSWERS: dict[tuple[str, str, str, str], tuple[tuple[int, dict[str, str], bytes], list[str]]] = {}
MOST_ANSWERS = 300
QUERY_SERVICES = ("ec2", "iam", "sts")
GLOBAL = {"iam", "sts", "s3", "pricing"}
LONG_POLLS = {"sqs:ReceiveMessage"}  # others are answered while these wait
SKEW_ALLOWED_S = 300.0
READS, CHANGES = (100, 20.0), (50, 5.0)  # tokens in a bucket, and those that come back in a second
BUCKETS = {"ec2:RunInstances": (5, 2.0)}  # EC2 Developer Guide, "Request throttling"
MODELS = {"servicequotas": "service-quotas"}
REFUSED = {
    "ec2": "UnauthorizedOperation",
    "query": "AccessDenied",
    "rest-xml": "AccessDenied",
    "json": "AccessDeniedException",
}
STRANGER = {
    "ec2": "AuthFailure",
    "query": "InvalidClientTokenId",
    "rest-xml": "InvalidAccessKeyId",
    "json": "UnrecognizedClientException",
}
EXPIRED = {
    "ec2": "RequestExpired",
    "query": "ExpiredToken",
    "rest-xml": "ExpiredToken",
    "json": "ExpiredTokenException",
}


class Gate(RequestScript):
    """A WSGI application."""

    def __init__(self, cloud: AwsCloud, moto: Callable[..., Iterable[bytes]]) -> None:
        super().__init__(AwsError)
        self.cloud, self.moto = cloud, moto

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length) if length else b""
        if not length and environ.get("HTTP_TRANSFER_ENCODING") == "chunked":
            body = environ["wsgi.input"].read()
        environ["wsgi.input"] = io.BytesIO(body)
        try:
            status, headers, answered = self._serve(environ, body)
        except Lost:
            _hang_up(environ)
            return []
        headers = {k: v for k, v in headers.items() if k.lower() not in ("date", "content-length", "connection")}
        headers["Date"] = format_date_time(self.cloud.server_time())
        headers["Content-Length"] = str(len(answered))
        start_response(f"{status} {'OK' if status < 300 else 'Refused'}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [answered]

    def _serve(self, environ: dict[str, Any], body: bytes) -> tuple[int, dict[str, str], bytes]:
        cloud = self.cloud
        found = CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
        key, region, service = found.groups() if found else ("", "us-east-1", "s3")
        protocol, name, params = _understand(environ, service, body)
        request_id = str(uuid.uuid4())
        call = Call(
            cloud.now(),
            service,
            f"{service}:{name}",
            "" if service in GLOBAL else region,
            cloud.principal_of(key),
            params,
            dry_run=_true(params.get("DryRun")),
        )
        self.calls.append(call)
        try:
            cloud.tick()
            if cloud.before:
                cloud.before(call)
            fault = self.before(call.action)
            if cloud.throttles:
                self._spend(call)
            status, headers, answered = self._act(environ, call, key, region, protocol)
            if not call.code and protocol != "rest-xml":
                cloud.findings += service_models.refused(service, name, params)
                cloud.findings += service_models.unknown(service, name, answered) if protocol != "json" else []
            self.after(fault)
            if cloud.after:
                cloud.after(call)
        except Lost:
            call.code = "lost"
            raise
        except AwsError as error:
            status, headers, answered = answer(error, protocol, request_id)
            call.code = error.code
            if call.code == "DryRunOperation":
                cloud.findings += service_models.refused(service, name, params)
        except Exception as error:  # noqa: BLE001 - a bug of the fake, told to whoever asked
            cloud.bugs.append(traceback.format_exc())
            bug = AwsError("InternalError", f"bug of the fake: {error!r}; see cloud.bugs")
            status, headers, answered = answer(bug, protocol, request_id)
            call.code = bug.code
        call.status = status
        return status, headers, answered

    def _spend(self, call: Call) -> None:
        """A token of this action's bucket in its region: EC2 limits each by itself, for the whole account."""
        usual = READS if call.action.startswith(("ec2:Describe", "ec2:Get")) else CHANGES
        size, refill_s = BUCKETS.get(call.action, usual)
        paid = self.spend((call.region, call.action), size, refill_s, self.cloud.now())
        if call.service == "ec2" and not paid:
            raise AwsError("RequestLimitExceeded", "Request limit exceeded.")

    def _act(
        self, environ: dict[str, Any], call: Call, key: str, region: str, protocol: str
    ) -> tuple[int, dict[str, str], bytes]:
        cloud = self.cloud
        self._authenticate(environ, call, key, protocol)
        if call.service == "ec2" and region not in cloud.regions:
            raise AwsError("AuthFailure", "AWS was not able to validate the provided access credentials")
        if call.service == "ec2":
            cloud.backend(region)  # furnished
        with cloud.lock:
            cloud.rights_asked(call)
            if call.dry_run:
                if call.action == "ec2:RunInstances":  # each resource of the launch, with its own tags
                    ctx = Context(cloud, cloud.regions[region], call.principal, cloud.now())
                    ordering.order(ctx, *ordering.merged(ctx, call.params))
                raise AwsError("DryRunOperation", "Request would have succeeded, but DryRun flag is set.")
            known = OPERATIONS.get(call.action)
            if known is not None and not (call.service == "ssm" and not cloud.answers(call)):
                state = cloud.regions.get(region) or next(iter(cloud.regions.values()))
                result = known(Context(cloud, state, call.principal, cloud.now()), call.params)
                cloud.noted(call)
                answered, refused = _answer(call.service, call.action.partition(":")[2], protocol, result)
                cloud.findings += refused
                return answered
            if call.action not in LONG_POLLS:
                return self._by_moto(environ, call, protocol)
        return self._by_moto(environ, call, protocol)

    def _by_moto(self, environ: dict[str, Any], call: Call, protocol: str) -> tuple[int, dict[str, str], bytes]:
        status, headers, answered = self._ask_moto(environ)
        call.code = _code_in(answered, protocol) if status >= 300 else ""
        if call.code:
            if protocol == "ec2":
                from tests.support.fakes.aws.errors import STATUS

                status = STATUS.get(call.code, status)
        else:
            self.cloud.noted(call)
        return status, headers, answered

    def _authenticate(self, environ: dict[str, Any], call: Call, key: str, protocol: str) -> None:
        cloud = self.cloud
        if not call.principal:
            raise AwsError(STRANGER[protocol], "AWS was not able to validate the provided access credentials")
        skew = abs(cloud.skew_s)
        if skew > SKEW_ALLOWED_S:
            code = {"ec2": "RequestExpired", "rest-xml": "RequestTimeTooSkewed"}.get(protocol, "SignatureDoesNotMatch")
            raise AwsError(code, "Signature expired: the request's time is too far from the server's time")
        if cloud.has_expired(key):
            raise AwsError(
                EXPIRED[protocol],
                "Request has expired."
                if protocol == "ec2"
                else "The security token included in the request is expired",
            )

    def _ask_moto(self, environ: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        held: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], exc: Any = None) -> None:
            held[:] = [status, headers]

        body = b"".join(self.moto(environ, start))
        return int(held[0].split()[0]), dict(held[1]), body


def _hang_up(environ: dict[str, Any]) -> None:
    connection = environ.get("werkzeug.socket")
    if connection is not None:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def _true(value: Any) -> bool:
    return str(value).lower() == "true"


@cache
def _model(service: str) -> Any:
    from moto.core.utils import get_service_model

    return get_service_model(MODELS.get(service, service))


@cache
def _operation(service: str, name: str) -> Any:
    return _model(service).operation_model(name)


def _understand(environ: dict[str, Any], service: str, body: bytes) -> tuple[str, str, dict[str, Any]]:
    """Protocol, operation and parameters."""
    target = environ.get("HTTP_X_AMZ_TARGET")
    if target:
        return "json", target.rpartition(".")[2], json.loads(body or b"{}")
    if service in QUERY_SERVICES or environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        from moto.core.parse import PROTOCOL_PARSERS
        from werkzeug.datastructures import MultiDict

        pairs = MultiDict(parse_qsl(body.decode(), keep_blank_values=True))
        name, protocol = pairs.get("Action", ""), "ec2" if service == "ec2" else "query"
        try:
            parser = PROTOCOL_PARSERS[protocol](_operation(service, name))
            params = parser.parse(
                {"method": "POST", "values": pairs, "headers": {}, "body": body, "url_path": "/", "url_params": {}}
            )
        except Exception:  # noqa: BLE001 - what cannot be read in detail is logged as it came
            params = dict(pairs)
        return protocol, name, dict(params)
    return (
        "rest-xml",
        _s3_operation(environ),
        {"path": environ.get("PATH_INFO", ""), "query": environ.get("QUERY_STRING", "")},
    )


def _s3_operation(environ: dict[str, Any]) -> str:
    method, parts = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "").strip("/").split("/", 1)
    has_key = len(parts) > 1 and parts[1]
    if not parts[0]:
        return "ListAllMyBuckets"
    if has_key:
        return {
            "GET": "GetObject",
            "HEAD": "GetObject",
            "PUT": "PutObject",
            "POST": "PutObject",
            "DELETE": "DeleteObject",
        }.get(method, method)
    if method == "POST" and "delete" in environ.get("QUERY_STRING", ""):
        return "DeleteObject"
    if environ.get("QUERY_STRING", "").startswith("encryption"):
        return {"GET": "GetEncryptionConfiguration"}.get(method, "PutEncryptionConfiguration")
    for word, kind in (("versioning", "BucketVersioning"), ("lifecycle", "LifecycleConfiguration")):
        if environ.get("QUERY_STRING", "").startswith(word):
            return {"GET": f"Get{kind}"}.get(method, f"Put{kind}")
    return {"GET": "ListBucket", "HEAD": "ListBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}.get(
        method, method
    )


def _answer(service: str, name: str, protocol: str, result: dict[str, Any]) -> tuple[tuple[int, dict[str, str], bytes],
                                                                                  list[str]]:
    """The answer as it is sent, and what the model refuses in it. Clients poll: most answers are those of before."""
    key = (service, name, protocol, repr(result))
    if key not in ANSWERS:
        if len(ANSWERS) >= MOST_ANSWERS:
            ANSWERS.clear()
        ANSWERS[key] = _serialized(service, name, protocol, result), service_models.unknown_members(
            service, name, result)
    (status, headers, body), refused = ANSWERS[key]
    return (status, dict(headers), body), refused


def _serialized(service: str, name: str, protocol: str, result: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    if protocol == "json":
        return 200, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps(result).encode()
    from moto.core.serialize import get_serializer_class

    model = _operation(service, name)
    made = get_serializer_class(service, protocol)(operation_model=model).serialize(_clean(result))
    body = made["body"]
    return made["status_code"], dict(made["headers"]), body.encode() if isinstance(body, str) else body


def _clean(value: Any) -> Any:
    """Without what is not said."""
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return value


def _code_in(body: bytes, protocol: str) -> str:
    if protocol == "json":
        try:
            return str(json.loads(body).get("__type", "")).rpartition("#")[2]
        except ValueError:
            return "InternalError"
    found = re.search(rb"<Code>([^<]+)</Code>", body)
    return found.group(1).decode() if found else "InternalError"
