"""What the request handlers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from spotfleet.codec import parse
from spotfleet.dispatcher.auth import Caller, bearer, identify
from spotfleet.dispatcher.trust import is_believed
from spotfleet.errors import SpotfleetError, UsageError

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher

DISPATCHER: web.AppKey[Dispatcher] = web.AppKey("dispatcher")
LONGEST_WAIT_S = 60.0
STALL_S = 60.0  # a reader who takes nothing for so long is given up
BODY_S = 30.0  # for a body that is read whole


class NotFound(SpotfleetError):
    """Nothing of that name here."""


def caller_of(request: web.Request) -> Caller | None:
    """Whose token the request bears, if it still counts."""
    caller = bearer_of(request)
    if caller is None or caller.is_admin:
        return caller
    return caller if is_believed(request.app[DISPATCHER], caller.host) else None


def bearer_of(request: web.Request) -> Caller | None:
    """Whose genuine token the request bears, also one that has been revoked or whose host has ended."""
    boot = request.app[DISPATCHER].boot
    return identify(bearer(request.headers.get("Authorization", "")), boot.admin_token, boot.fleet_secret)


def host_of(request: web.Request) -> str:
    """The host that calls; empty for the admin. Asked again after a body has come: it may be refused by then."""
    caller = caller_of(request)
    if caller is None:
        raise web.HTTPUnauthorized(text="the token has been revoked, or its host has ended")
    return caller.host


async def whole_body(request: web.Request) -> bytes:
    """The body, which must be here within BODY_S."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None


async def chunks(request: web.Request) -> AsyncIterator[bytes]:
    """The body as it comes, as long as its sender is believed."""
    async for chunk in request.content.iter_any():
        host_of(request)
        yield chunk
    host_of(request)


async def streamed(request: web.Request, make: Callable[[Callable[[bytes], None]], None]) -> web.StreamResponse:
    """What `make` hands on piece by piece, in a thread. What fails meanwhile breaks the connection."""
    response, loop = web.StreamResponse(), asyncio.get_running_loop()
    response.enable_chunked_encoding()

    def send(piece: bytes) -> None:
        asyncio.run_coroutine_threadsafe(response.write(piece), loop).result(STALL_S)

    await response.prepare(request)
    try:
        await asyncio.to_thread(make, send)
        await response.write_eof()
    except BaseException:
        if request.transport is not None:
            request.transport.abort()  # type: ignore[attr-defined]
        raise
    return response


async def body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; UsageError for anything else."""
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
    """A query value; UsageError names it when it is no number or below 0."""
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
