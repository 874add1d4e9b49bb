"""What the request handlers share."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from aiohttp import web

from spotfleet.dispatcher.auth import Caller, bearer, identify
from spotfleet.errors import SpotfleetError, UsageError

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher

DISPATCHER: web.AppKey[Dispatcher] = web.AppKey("dispatcher")
LONGEST_WAIT_S = 60.0
WORKER_NAME = re.compile(r"[\w.-]+/\d+/[\w.-]+")


class NotFound(SpotfleetError):
    """Nothing of that name here."""


def caller_of(request: web.Request) -> Caller | None:
    """Whose token the request bears."""
    dispatcher = request.app[DISPATCHER]
    token = bearer(request.headers.get("Authorization", ""))
    return identify(token, dispatcher.boot.admin_token, dispatcher.boot.fleet_secret, dispatcher.host_names())


def host_of(request: web.Request) -> str:
    """The host that calls; empty for the admin."""
    caller = caller_of(request)
    assert caller is not None, "routes are guarded"
    return caller.host


async def body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; UsageError for anything else."""
    try:
        value = json.loads(await request.read() or b"{}")
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
