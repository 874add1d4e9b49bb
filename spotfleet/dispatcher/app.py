"""The HTTP server: which route does what for whom, and how errors are told.

Every error is `{"error": ..., "hint": ..., "kind": ...}`; `kind` is the class in `errors.py` that the CLI raises again.
Who may call is told our version, and is refused if theirs is another, but for the frozen routes of `versions.py`.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from aiohttp import web

from spotfleet import errors, versions
from spotfleet.dispatcher import api_bundles, api_fleet, api_jobs, disk
from spotfleet.dispatcher.agents import agent_socket
from spotfleet.dispatcher.checkpoints import NoRoom, Outdated
from spotfleet.dispatcher.files import TooLarge
from spotfleet.dispatcher.keys import DISPATCHER, NotFound, bearer_of, caller_of
from spotfleet.dispatcher.state import Dispatcher

log = logging.getLogger(__name__)
JSON_BYTES = 4 << 20  # largest body of a route that does not stream

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OtherVersion(errors.NeedsPerson):
    """The caller and we would misread each other."""


class Elsewhere(errors.NeedsPerson):
    """The admin token counts on the dispatcher's own machine only."""


class Who(Enum):
    ANYBODY = "anybody"
    CLI = "cli"
    AGENT = "agent"
    BOTH = "both"
    SOCKET = "socket"  # an agent, also one that is to be told why it is refused


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    who: Who
    handler: Handler


async def healthz(_request: web.Request) -> web.Response:
    return web.json_response({"ok": True})


ROUTES = (
    Route("GET", "/healthz", Who.ANYBODY, healthz),
    Route("GET", "/v1/agent", Who.SOCKET, agent_socket),
    Route("GET", "/v1/status", Who.CLI, api_fleet.status),
    Route("GET", "/v1/events", Who.CLI, api_fleet.events),
    Route("PUT", "/v1/nodes", Who.CLI, api_fleet.put_nodes),
    Route("PUT", "/v1/policy", Who.CLI, api_fleet.put_policy),
    Route("POST", "/v1/hosts/{host}/drain", Who.CLI, api_fleet.drain),
    Route("POST", "/v1/hosts/{host}/interrupt", Who.CLI, api_fleet.interrupt),
    Route("POST", "/v1/hosts/{host}/revoke", Who.CLI, api_fleet.post_revoke),
    Route("POST", "/v1/down", Who.CLI, api_fleet.down),
    Route("GET", "/v1/archive", Who.CLI, api_fleet.get_archive),
    Route("GET", "/v1/bundles/{sha256}", Who.BOTH, api_bundles.get_bundle),
    Route("PUT", "/v1/bundles/{sha256}", Who.BOTH, api_bundles.put_bundle),
    Route("POST", "/v1/bundles/missing", Who.BOTH, api_bundles.missing),
    Route("POST", "/v1/jobs", Who.CLI, api_jobs.submit),
    Route("GET", "/v1/jobs", Who.CLI, api_jobs.jobs),
    Route("GET", "/v1/jobs/{job}", Who.CLI, api_jobs.job),
    Route("POST", "/v1/jobs/{job}/cancel", Who.CLI, api_jobs.cancel),
    Route("GET", "/v1/jobs/{job}/launch", Who.AGENT, api_jobs.launch),
    Route("GET", "/v1/jobs/{job}/workers", Who.CLI, api_jobs.log_workers),
    Route("GET", "/v1/jobs/{job}/logs", Who.CLI, api_jobs.get_logs),
    Route("POST", "/v1/jobs/{job}/logs/{worker:.+}", Who.AGENT, api_jobs.post_log),
    Route("PUT", "/v1/jobs/{job}/checkpoints/{version}", Who.AGENT, api_jobs.put_checkpoint),
    Route("GET", "/v1/jobs/{job}/checkpoints/{version}", Who.BOTH, api_jobs.get_checkpoint),
    Route("GET", "/v1/jobs/{job}/outputs", Who.CLI, api_jobs.get_outputs),
    Route("POST", "/v1/jobs/{job}/outputs/{worker:.+}", Who.AGENT, api_jobs.post_output),
)


def make_app(dispatcher: Dispatcher) -> web.Application:
    app = web.Application(client_max_size=JSON_BYTES, middlewares=[tell_errors])
    app[DISPATCHER] = dispatcher
    app.on_response_prepare.append(say_version)
    for route in ROUTES:
        app.router.add_route(route.method, route.path, guarded(route))
        if route.method == "GET" and route.path == "/v1/bundles/{sha256}":
            app.router.add_route("HEAD", route.path, guarded(route))
    return app


def guarded(route: Route) -> Handler:
    """The handler behind its check of who calls."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if route.who is not Who.ANYBODY:
            refuse_strangers(request, route.who)
            refuse_other_versions(request, route)
        return await route.handler(request)

    return handle


def refuse_strangers(request: web.Request, who: Who) -> None:
    caller = bearer_of(request) if who is Who.SOCKET else caller_of(request)
    if who is Who.SOCKET:
        if caller is None or caller.is_admin:
            raise web.HTTPUnauthorized(text="this route is for agents: it needs the host's own token")
        return
    if caller is None:
        raise web.HTTPUnauthorized(text="the token is missing or belongs to no one here")
    if who is not Who.BOTH and caller.is_admin != (who is Who.CLI):
        raise web.HTTPForbidden(text="this route is not for the holder of this token")
    if caller.is_admin and request.app[DISPATCHER].boot.admin_from_here and not is_from_here(request):
        raise Elsewhere("the admin token is taken from the dispatcher's own machine only",
                        hint="spotfleet goes there through SSH: is this fleet's folder the one that `up` made?")


def is_from_here(request: web.Request) -> bool:
    """Does the caller sit on this machine, as those do who came through its sshd?"""
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
    theirs = versions.spoken(request.headers.get(versions.HEADER, ""))
    found = versions.differ(theirs, versions.ours()) if theirs else None
    if found and (route.method, route.path) not in versions.FROZEN:
        raise OtherVersion(found.why, hint=found.hint)


async def say_version(request: web.Request, response: web.StreamResponse) -> None:
    if versions.HEADER in request.headers and caller_of(request) is not None:
        response.headers[versions.HEADER] = str(versions.ours())


@web.middleware
async def tell_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400 or isinstance(error, web.HTTPServiceUnavailable):
            raise  # without a word, which means to every caller: ask again
        return _told(error.status, error.text or error.reason, "", "SpotfleetError")
    except errors.SpotfleetError as error:
        return _told(_status(error), str(error), error.hint, _kind(error))
    except ValueError as error:
        return _told(400, str(error), "", "UsageError")
    except web.RequestPayloadError as error:
        return _told(400, f"the body cannot be read: {error}", "", "UsageError")
    except ConnectionError:
        raise  # the caller has gone; nobody to tell
    except Exception as error:
        if disk.is_full(error):
            return _told(507, disk.full(request.app[DISPATCHER].home), disk.HINT, "DiskFull")
        log.exception("%s %s", request.method, request.path)
        return _told(500, f"the dispatcher failed: {type(error).__name__}: {error}",
                     "its log lies in its home as dispatcher.log", "SpotfleetError")


def _status(error: errors.SpotfleetError) -> int:
    table = {OtherVersion: 426, Elsewhere: 403, errors.DiskFull: 507, NotFound: 404, Outdated: 409, TooLarge: 413,
             NoRoom: 507, errors.NoCapacity: 409, errors.NeedsPerson: 409, errors.UsageError: 400}
    return next((status for kind, status in table.items() if isinstance(error, kind)), 500)


def _kind(error: errors.SpotfleetError) -> str:
    """The nearest class of the error tree that the caller knows too."""
    return next(k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k)


def _told(status: int, message: str, hint: str, kind: str) -> web.Response:
    return web.json_response({"error": message, "hint": hint, "kind": kind}, status=status)
