"""Shared functions of the request handlers: callers, bodies, query values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from spotfleet.codec import parse
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.fleet_desk import FleetDesk
from spotfleet.dispatcher.hosts import AgentConnection
from spotfleet.dispatcher.http.auth import Caller, bearer, identify
from spotfleet.dispatcher.http.revocation import is_trusted
from spotfleet.dispatcher.jobs.desk import JobDesk
from spotfleet.dispatcher.ray.cluster import RayCluster
from spotfleet.errors import UsageError
from spotfleet.protocol.messages import AgentReport

CORE: web.AppKey[Core] = web.AppKey("core")
JOBS: web.AppKey[JobDesk] = web.AppKey("jobs")
FLEET: web.AppKey[FleetDesk] = web.AppKey("fleet")
RAY: web.AppKey[RayCluster] = web.AppKey("ray")
ADMIT: web.AppKey[Callable[[object], None]] = web.AppKey("admit")  # receives the protocols of members
RECEIVE: web.AppKey[Callable[[AgentConnection, AgentReport], None]] = web.AppKey("receive")
LONGEST_WAIT_S = 60.0
STALL_S = 60.0  # a reader that takes nothing for this time is disconnected
BODY_S = 30.0  # time limit for a body that is read whole


def caller_of(request: web.Request) -> Caller | None:
    """Return the owner of the request's token; None unless the token is genuine and still valid."""
    caller = bearer_of(request)
    if caller is None or caller.is_admin:
        return caller
    return caller if is_trusted(request.app[CORE], caller.host) else None


def bearer_of(request: web.Request) -> Caller | None:
    """Return the owner of the request's genuine token, even if it is revoked or its host has ended."""
    boot = request.app[CORE].boot
    return identify(bearer(request.headers.get("Authorization", "")), boot.admin_token, boot.fleet_secret)


def host_of(request: web.Request) -> str:
    """Return the calling host; empty for the admin. Called again after a body has arrived: the host may be refused by
    then."""
    caller = caller_of(request)
    if caller is None:
        raise web.HTTPUnauthorized(text="the token has been revoked, or its host has ended")
    return caller.host


async def whole_body(request: web.Request) -> bytes:
    """Read the body, which must arrive within BODY_S."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None


async def chunks(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, while its sender's token is valid."""
    async for chunk in request.content.iter_any():
        host_of(request)
        yield chunk
    host_of(request)


async def streamed(request: web.Request, make: Callable[[Callable[[bytes], None]], None]) -> web.StreamResponse:
    """Stream the pieces that `make` produces in a thread. A failure meanwhile aborts the connection."""
    response, loop = web.StreamResponse(), asyncio.get_running_loop()
    response.enable_chunked_encoding()

    def send(piece: bytes) -> None:
        asyncio.run_coroutine_threadsafe(response.write(piece), loop).result(STALL_S)

    await response.prepare(request)
    with whole_or_aborted(request):
        await asyncio.to_thread(make, send)
        await response.write_eof()
    return response


@contextmanager
def whole_or_aborted(request: web.Request) -> Iterator[None]:
    """Abort the connection where an answer fails after its head was sent, so that it does not look whole."""
    try:
        yield
    except BaseException:
        if request.transport is not None:
            request.transport.abort()  # type: ignore[attr-defined]
        raise


async def body(request: web.Request) -> dict[str, Any]:
    """Parse the JSON object of a request; UsageError for anything else."""
    data = await whole_body(request)
    if data and request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text=f"the body is {request.content_type}, expected application/json")
    try:
        value = parse(data or b"{}")
    except ValueError as error:
        raise UsageError(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("the body: expected an object")
    return value


def number(request: web.Request, name: str, default: float = 0.0) -> float:
    """Parse a query value; UsageError names it when it is not a number of at least 0."""
    text = request.query.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e18:
        raise UsageError(f"{name}: expected a number from 0 on, got {text!r}")
    return value


def whole(request: web.Request, name: str) -> int:
    return int(number(request, name))
