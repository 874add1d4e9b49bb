"""HTTP server: routes, access rules and error responses.

Every error is `{"error": ..., "hint": ..., "kind": ...}`; `kind` is the class in `errors.py` that the CLI raises again.
Answers to authorised callers contain our version. A caller of another protocol is refused, except on the frozen routes
of `protocol/versions.py`.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from enum import Enum

from aiohttp import hdrs, web

from spotfleet import errors
from spotfleet.dispatcher.checkpoints.archive_files import ArchiveFiles
from spotfleet.dispatcher.checkpoints.store import NoRoom, Outdated
from spotfleet.dispatcher.core import NotFound
from spotfleet.dispatcher.disk import space
from spotfleet.dispatcher.disk.files import TooLarge
from spotfleet.dispatcher.dispatcher import Dispatcher
from spotfleet.dispatcher.http import archive, bundles, fleet, jobs
from spotfleet.dispatcher.http.agents import agent_socket
from spotfleet.dispatcher.http.auth import bearer
from spotfleet.dispatcher.http.host_work import HOST_WORK, HostWork
from spotfleet.dispatcher.http.requests import ADMIT, CORE, FLEET, JOBS, RAY, RECEIVE, bearer_of, caller_of
from spotfleet.protocol import versions
from spotfleet.protocol.tokens import is_metrics_token

log = logging.getLogger(__name__)
JSON_BYTES = 4 << 20  # largest body of a route that does not stream

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OtherVersion(errors.NeedsPerson):
    """Refusal of a caller of another protocol: the two sides would misread each other."""


class AdminTokenRemote(errors.NeedsPerson):
    """Use of the admin token from another machine, where it is valid only on the dispatcher's own."""


class CallerKind(Enum):
    """Callers that a route accepts."""

    ANYBODY = "anybody"
    CLI = "cli"
    AGENT = "agent"
    BOTH = "both"
    METRICS = "metrics"  # the CLI, or the holder of the metrics token
    SOCKET = "socket"  # an agent, including a refused one, which receives the reason


@dataclass(frozen=True)
class Route:
    """Method, path, accepted callers and handler."""

    method: str
    path: str
    who: CallerKind
    handler: Handler


async def healthz(_request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


ROUTES = (
    Route("GET", "/healthz", CallerKind.ANYBODY, healthz),
    Route("GET", "/v1/agent", CallerKind.SOCKET, agent_socket),
    Route("GET", "/v1/status", CallerKind.CLI, fleet.status),
    Route("GET", "/v1/events", CallerKind.CLI, fleet.events),
    Route("GET", "/v1/ray", CallerKind.CLI, fleet.ray_status),
    Route("POST", "/v1/ray/drivers", CallerKind.CLI, fleet.start_driver),
    Route("GET", "/v1/ray/drivers/{driver}/logs", CallerKind.CLI, fleet.driver_logs),
    Route("POST", "/v1/ray/drivers/{driver}/stop", CallerKind.CLI, fleet.stop_driver),
    Route("GET", "/v1/live", CallerKind.CLI, fleet.live),
    Route("GET", "/metrics", CallerKind.METRICS, fleet.get_metrics),
    Route("PUT", "/v1/nodes", CallerKind.CLI, fleet.put_nodes),
    Route("PUT", "/v1/policy", CallerKind.CLI, fleet.put_policy),
    Route("PUT", "/v1/notify", CallerKind.CLI, fleet.put_notify),
    Route("POST", "/v1/hosts/{host}/drain", CallerKind.CLI, fleet.drain),
    Route("POST", "/v1/hosts/{host}/interrupt", CallerKind.CLI, fleet.interrupt),
    Route("POST", "/v1/hosts/{host}/revoke", CallerKind.CLI, fleet.post_revoke),
    Route("POST", "/v1/hosts/{host}/failed", CallerKind.AGENT, fleet.post_failed),
    Route("POST", "/v1/gangs/{host}", CallerKind.ANYBODY, fleet.member_secrets),
    Route("POST", "/v1/down", CallerKind.CLI, fleet.down),
    Route("GET", "/v1/archive", CallerKind.CLI, archive.get_tar),
    Route("GET", "/v1/archive/manifest", CallerKind.CLI, archive.get_manifest),
    Route("GET", "/v1/archive/files/{key:(?s:.+)}", CallerKind.CLI, archive.get_file),
    Route("POST", "/v1/archive/ranges", CallerKind.CLI, archive.post_ranges),
    Route("GET", "/v1/bundles/{sha256}", CallerKind.BOTH, bundles.get_bundle),
    Route("PUT", "/v1/bundles/{sha256}", CallerKind.BOTH, bundles.put_bundle),
    Route("POST", "/v1/bundles/missing", CallerKind.BOTH, bundles.missing),
    Route("POST", "/v1/jobs", CallerKind.CLI, jobs.submit),
    Route("GET", "/v1/jobs", CallerKind.CLI, jobs.jobs),
    Route("GET", "/v1/ended", CallerKind.CLI, jobs.ended),
    Route("POST", "/v1/prune", CallerKind.CLI, jobs.prune),
    Route("GET", "/v1/jobs/{job}", CallerKind.CLI, jobs.job),
    Route("POST", "/v1/jobs/{job}/cancel", CallerKind.CLI, jobs.cancel),
    Route("GET", "/v1/jobs/{job}/launch", CallerKind.AGENT, jobs.launch),
    Route("GET", "/v1/jobs/{job}/workers", CallerKind.CLI, jobs.log_workers),
    Route("GET", "/v1/jobs/{job}/logs", CallerKind.CLI, jobs.get_logs),
    Route("GET", "/v1/jobs/{job}/logs/start", CallerKind.CLI, jobs.log_start),
    Route("POST", "/v1/jobs/{job}/logs/{worker:.+}", CallerKind.AGENT, jobs.post_log),
    Route("PUT", "/v1/jobs/{job}/checkpoints/{version}", CallerKind.AGENT, jobs.put_checkpoint),
    Route("GET", "/v1/jobs/{job}/checkpoints/{version}", CallerKind.BOTH, jobs.get_checkpoint),
    Route("GET", "/v1/jobs/{job}/checkpoints/{version}/{name}", CallerKind.BOTH, jobs.get_checkpoint),
    Route("POST", "/v1/jobs/{job}/folder/{worker:.+}", CallerKind.AGENT, jobs.post_folder),
    Route("GET", "/v1/jobs/{job}/outputs", CallerKind.CLI, jobs.get_outputs),
    Route("POST", "/v1/jobs/{job}/outputs/{worker:.+}", CallerKind.AGENT, jobs.post_output),
    Route("POST", "/v1/jobs/{job}/fetched", CallerKind.CLI, jobs.post_fetched),
)


def make_app(dispatcher: Dispatcher, admit: Callable[[object], None]) -> web.Application:
    """Return the application. `admit` receives the protocol of each connection that has sent a valid token."""
    app = web.Application(client_max_size=JSON_BYTES, middlewares=[return_errors])
    app[CORE], app[JOBS], app[FLEET] = dispatcher.core, dispatcher.desk, dispatcher.fleet_desk
    app[RAY] = dispatcher.ray
    app[RECEIVE], app[ADMIT] = dispatcher.receive, admit
    app[archive.LOOKING] = threading.Lock()
    app[archive.FILES] = ArchiveFiles(dispatcher.core.home, dispatcher.core.journal.ledger)
    app[HOST_WORK] = HostWork()

    async def close_work(app: web.Application) -> None:
        app[HOST_WORK].close()

    app.on_cleanup.append(close_work)
    app.on_response_prepare.extend((add_version, add_date))
    for route in ROUTES:
        app.router.add_route(route.method, route.path, guarded(route))
        if route.method == "GET" and route.path == "/v1/bundles/{sha256}":
            app.router.add_route("HEAD", route.path, guarded(route))
    return app


def guarded(route: Route) -> Handler:
    """Wrap the route's handler in the checks of the caller's token and version."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if caller_of(request) is not None:
            request.app[ADMIT](request.protocol)
        if route.who is not CallerKind.ANYBODY:
            refuse_strangers(request, route.who)
            refuse_other_versions(request, route)
        return await route.handler(request)

    return handle


def refuse_strangers(request: web.Request, who: CallerKind) -> None:
    caller = bearer_of(request) if who is CallerKind.SOCKET else caller_of(request)
    if who is CallerKind.SOCKET:
        if caller is None or caller.is_admin:
            raise web.HTTPUnauthorized(text="this route is for agents: it needs the host's own token")
        return
    if who is CallerKind.METRICS:
        given, who = bearer(request.headers.get("Authorization", "")), CallerKind.CLI
        if is_metrics_token(given, request.app[CORE].boot.fleet_secret):
            return
    if caller is None:
        raise web.HTTPUnauthorized(text="the token is missing or belongs to no one here")
    if who is not CallerKind.BOTH and caller.is_admin != (who is CallerKind.CLI):
        raise web.HTTPForbidden(text="this route is not for the holder of this token")
    if caller.is_admin and request.app[CORE].boot.admin_from_here and not is_from_here(request):
        raise AdminTokenRemote("the admin token is taken from the dispatcher's own machine only",
                        hint="spotfleet goes there through SSH: is this fleet's folder the one that `up` made?")


def is_from_here(request: web.Request) -> bool:
    """Return whether the caller is on this machine, for instance through its sshd."""
    if request.transport is None:
        return False
    peer, own = (request.transport.get_extra_info(name) for name in ("peername", "sockname"))
    return bool(peer and own) and (peer[0] == own[0] or is_loopback(peer[0]))


def is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def refuse_other_versions(request: web.Request, route: Route) -> None:
    remote = versions.parse_version(request.headers.get(versions.HEADER, ""))
    found = versions.compare(remote, versions.own_version()) if remote else None
    if found and (route.method, route.path) not in versions.FROZEN:
        raise OtherVersion(found.why, hint=found.hint)


async def add_version(request: web.Request, response: web.StreamResponse) -> None:
    if versions.HEADER in request.headers and caller_of(request) is not None:
        response.headers[versions.HEADER] = str(versions.own_version())


async def add_date(request: web.Request, response: web.StreamResponse) -> None:
    """Date the answer by the trusted time: clients count the bill of a living fleet up to it."""
    response.headers[hdrs.DATE] = formatdate(request.app[CORE].unix(), usegmt=True)


@web.middleware
async def return_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400 or isinstance(error, web.HTTPServiceUnavailable):
            raise  # an empty 503 means to every caller: try again
        return _error_response(error.status, error.text or error.reason, "", "SpotfleetError")
    except errors.SpotfleetError as error:
        return _error_response(_status(error), str(error), error.hint, _kind(error))
    except ValueError as error:
        return _error_response(400, str(error), "", "UsageError")
    except web.RequestPayloadError as error:
        return _error_response(400, f"the body cannot be read: {error}", "", "UsageError")
    except ConnectionError:
        raise  # the caller has disconnected
    except Exception as error:
        if space.is_full(error):
            return _error_response(507, space.full_message(request.app[CORE].home), space.HINT, "DiskFull")
        log.exception("%s %s", request.method, request.path)
        return _error_response(500, f"the dispatcher failed: {type(error).__name__}: {error}",
                     "its log lies in its home as dispatcher.log", "SpotfleetError")


def _status(error: errors.SpotfleetError) -> int:
    table = {OtherVersion: 426, AdminTokenRemote: 403, errors.DiskFull: 507, NotFound: 404, Outdated: 409,
             TooLarge: 413,
             NoRoom: 507, errors.NoCapacity: 409, errors.NeedsPerson: 409, errors.UsageError: 400}
    return next((status for kind, status in table.items() if isinstance(error, kind)), 500)


def _kind(error: errors.SpotfleetError) -> str:
    """Return the name of the nearest class in the error tree: the caller knows it too."""
    return next(k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k)


def _error_response(status: int, message: str, hint: str, kind: str) -> web.Response:
    response = web.json_response({"error": message, "hint": hint, "kind": kind}, status=status)
    if status == web.HTTPUnauthorized.status_code:
        response.force_close()  # a stranger keeps no place
    return response
