"""The door of the cloud: every request is found in the discovery documents, judged, logged and answered."""

from __future__ import annotations

import json
import traceback
import uuid
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.fakes.discovery import Method, Routes
from tests.support.fakes.gcp import rights
from tests.support.fakes.gcp.errors import GcpError, Lost, refusal
from tests.support.fakes.gcp.requests import HANDLERS, Request
from tests.support.fakes.kit.requests import Call, RequestScript

if TYPE_CHECKING:
    from tests.support.fakes.gcp.cloud import GcpCloud

DOCUMENTS = ("compute.v1", "cloudresourcemanager.v1", "serviceusage.v1", "iam.v1", "cloudbilling.v1")
ZERO = str(uuid.UUID(int=0))
CHANGES, READS = (100, 20.0), (1500, 25.0)  # tokens of a bucket, and those that come back in a second, per project
Answer = tuple[int, dict[str, str], bytes]


class Gate(RequestScript):
    def __init__(self, cloud: GcpCloud) -> None:
        super().__init__(refusal)
        self.cloud = cloud
        self.routes = Routes(*DOCUMENTS)

    def serve(self, verb: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Status, headers and body of the answer. Lost where the connection dies."""
        known = {k.lower(): v for k, v in headers.items()}
        at = urlsplit(target)
        if at.path == "/token":
            return self._token(body)
        path = unquote(at.path)
        call = Call(self.cloud.now(), "", f"{verb} {path}", "", "", {})
        self.calls.append(call)
        try:
            answer = self._act(call, verb, path, at.query, known, body)
            status = 200
        except Lost:
            call.code = "lost"
            raise
        except GcpError as error:
            status, answer, call.code = error.status, error.body(), error.code
        except Exception as error:  # noqa: BLE001 - a bug of the fake, told to the caller
            self.cloud.bugs.append(traceback.format_exc())
            bug = GcpError("internalError", f"bug of the fake: {error!r}; see cloud.bugs")
            status, answer, call.code = bug.status, bug.body(), bug.code
        call.status = status
        return _answer(status, answer, self.cloud.now())

    def _act(self, call: Call, verb: str, path: str, query: str, headers: dict[str, str], body: bytes) -> Any:
        cloud = self.cloud
        found = self.routes.find(verb, path)
        if found is None:
            raise GcpError("notFound", f"The requested URL {path} was not found on this server.", 404)
        method, named = found
        given = parse_qs(query, keep_blank_values=True)
        call.service, call.action = method.id.partition(".")[0], method.id
        call.region = named.get("region") or named.get("zone") or ""
        resource = _json(body)
        call.params = {**named, **{k: v[-1] for k, v in given.items()}, "body": resource}
        cloud.tick()
        if cloud.before:
            cloud.before(call)
        fault = self.before(call.action)
        call.principal, scopes = cloud.rights.caller(headers.get("authorization", ""))
        if cloud.throttles:
            self._spend(call, verb)
        if not rights.scopes_suffice(verb, path, scopes):
            raise GcpError("forbidden", "Request had insufficient authentication scopes.", 403, [
                {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "ACCESS_TOKEN_SCOPE_INSUFFICIENT"}])
        _conform(method, named, given, resource)
        answer = self._answered(call, Request(cloud, method, named, {k: v[-1] for k, v in given.items()}, resource,
                                              call.principal, cloud.now(), given))
        cloud.findings += method.document.answer_problems(method, answer)
        self.after(fault)
        if cloud.after:
            cloud.after(call)
        return answer

    def _answered(self, call: Call, request: Request) -> Any:
        cloud, method = self.cloud, request.method
        handler = HANDLERS.get(method.id)
        if handler is None:
            raise GcpError("notImplemented", f"this fake has no {method.id}")
        with cloud.lock:
            self._enabled(call)
            if call.service == "compute":
                self._permitted(request)
                request.known_place()
            again = request.query.get("requestId", "")
            if again and (known := self._repeated(request, again)) is not None:
                return known
            answer = handler(request)
            if again and isinstance(answer, dict):
                cloud.by_request_id[again] = (_what(request), answer)
        if handler.__dict__.get("waits"):  # outside of the lock
            return handler.waits(request)  # type: ignore[attr-defined]
        return answer

    def _permitted(self, request: Request) -> None:
        project = request.named.get("project", "")
        known = {self.cloud.project, *self.cloud.other_projects()}
        if project and project not in known:
            raise GcpError("notFound", f"The resource 'projects/{project}' was not found")
        if permission := rights.permission_of(request.method.id):
            request.need(permission, f"projects/{project}")

    def _enabled(self, call: Call) -> None:
        service = f"{call.service}.googleapis.com"
        if service not in self.cloud.services:
            raise GcpError("accessNotConfigured", f"{service} has not been used in project {self.cloud.project} before "
                           "or it is disabled. Enable it by visiting https://console.developers.google.com/apis/api/"
                           f"{service}/overview?project={self.cloud.project} then retry.", 403,
                           [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED",
                             "domain": "googleapis.com",
                             "metadata": {"service": service, "consumer": f"projects/{self.cloud.project}"}}])

    def _repeated(self, request: Request, request_id: str) -> dict[str, Any] | None:
        """The operation that the same request has caused before, as it is now."""
        try:
            good = str(uuid.UUID(request_id)) == request_id.lower() and request_id != ZERO
        except ValueError:
            good = False
        if not good:
            raise GcpError("invalid", f"Invalid value for field 'requestId': '{request_id}'. It must be a valid UUID "
                           "other than zero.")
        known = self.cloud.by_request_id.get(request_id)
        if known is None:
            return None
        what, answer = known
        if what != _what(request):
            raise GcpError("invalid", f"Invalid value for field 'requestId': '{request_id}'. It was used for another "
                           "request.")
        found = next((o for o in self.cloud.operations if o.name == answer["name"]), None)
        return found.shown(self.cloud.project) if found else answer

    def _spend(self, call: Call, verb: str) -> None:
        size, refill_s = READS if verb == "GET" else CHANGES
        if not self.spend((call.service, verb == "GET"), size, refill_s, self.cloud.now()):
            raise GcpError("rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'Queries per "
                           f"minute' of service '{call.service}.googleapis.com' for consumer "
                           f"'project_number:{self.cloud.NUMBER}'.", 403)

    def _token(self, body: bytes) -> Answer:
        """OAuth's token endpoint: for the assertion of a service account, signed by its key."""
        asked = {k: v[0] for k, v in parse_qs(body.decode()).items()}
        token = asked.get("assertion", "")
        try:
            principal, _ = self.cloud.rights.caller(f"Bearer {token}")
        except GcpError:
            return _answer(400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."},
                           self.cloud.now())
        return _answer(200, {"access_token": self.cloud.rights.token(principal), "expires_in": 3599,
                             "token_type": "Bearer"}, self.cloud.now())


def _what(request: Request) -> str:
    return json.dumps([request.method.id, request.named, request.body], sort_keys=True)


def _conform(method: Method, named: dict[str, str], query: dict[str, list[str]], body: Any) -> None:
    """Refuse what the document of the service does not allow."""
    document = method.document
    problems = [*document.path_problems(method, named), *document.query_problems(method, query),
                *document.body_problems(method, body)]
    if problems:
        reason = "required" if "required" in problems[0] else "invalid"
        raise GcpError(reason, "; ".join(problems[:5]))


def _json(body: bytes) -> Any:
    if not body:
        return None
    try:
        return json.loads(body)
    except ValueError:
        raise GcpError("badRequest", "Invalid JSON payload received. Parse Error") from None


def _answer(status: int, body: Any, now: float) -> Answer:
    headers = {"Content-Type": "application/json; charset=UTF-8", "Date": formatdate(now, usegmt=True)}
    return status, headers, json.dumps(body).encode()
