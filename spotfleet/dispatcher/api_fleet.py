"""Routes about the fleet: status, events, size, hosts, and its end."""

from __future__ import annotations

import time

from aiohttp import web

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher import archive, trust
from spotfleet.dispatcher.keys import DISPATCHER, LONGEST_WAIT_S, body, number, streamed, whole
from spotfleet.errors import UsageError
from spotfleet.fleet.events import event_to_json
from spotfleet.model import SPOT_POLICIES, Nodes, PolicySpec

EVENTS_AT_ONCE = 1000
MOST_HOSTS = 10_000
LONGEST_NOTICE_S = 86_400.0
WHY_CHARS = 500
LARGEST = 1e15  # micro-dollars, or anything else that a policy counts


async def status(request: web.Request) -> web.Response:
    return web.json_response(to_json(request.app[DISPATCHER].status()))


async def events(request: web.Request) -> web.Response:
    """Events after `after`; waits up to `wait` seconds for the first one."""
    dispatcher = request.app[DISPATCHER]
    after, deadline = whole(request, "after"), time.monotonic() + min(number(request, "wait"), LONGEST_WAIT_S)
    while not (found := await dispatcher.journal.page(after, EVENTS_AT_ONCE)) and time.monotonic() < deadline:
        await dispatcher.journal.bell.wait(deadline - time.monotonic())
    return web.json_response({"events": [{"seq": seq, **event_to_json(e)} for seq, e in found]})


async def put_nodes(request: web.Request) -> web.Response:
    nodes = from_json(Nodes, await body(request))
    if not 0 <= nodes.min <= nodes.target <= nodes.max:
        raise UsageError(f"nodes: {nodes.min}, {nodes.target}, {nodes.max} are not min <= target <= max")
    if nodes.max > MOST_HOSTS:
        raise UsageError(f"nodes.max: {nodes.max} is more than {MOST_HOSTS}")
    await request.app[DISPATCHER].set_nodes(nodes)
    return web.json_response({})


async def put_policy(request: web.Request) -> web.Response:
    policy = from_json(PolicySpec, await body(request))
    numbers = (policy.on_demand_base, policy.deadline_s, policy.work_s, policy.work_steps, policy.max_micros,
               policy.max_micros_h)
    if policy.spot_policy not in SPOT_POLICIES or not all(0 <= n < LARGEST for n in numbers):
        raise UsageError("policy: a spot_policy, and numbers of at least 0 are expected")
    await request.app[DISPATCHER].steward.set_policy(policy)
    return web.json_response({})


async def drain(request: web.Request) -> web.Response:
    request.app[DISPATCHER].drain(request.match_info["host"])
    return web.json_response({})


async def interrupt(request: web.Request) -> web.Response:
    """Chaos: ask the cloud to take the host, after a notice of `notice_s` or at once for null."""
    notice_s = (await body(request)).get("notice_s")
    is_number = isinstance(notice_s, (int, float)) and not isinstance(notice_s, bool)
    if not (notice_s is None or (is_number and 0 <= notice_s <= LONGEST_NOTICE_S)):
        raise UsageError(f"notice_s: expected seconds, at most a day, or null, got {str(notice_s)[:40]}")
    await request.app[DISPATCHER].interrupt(request.match_info["host"], notice_s)
    return web.json_response({})


async def post_revoke(request: web.Request) -> web.Response:
    why = (await body(request)).get("why", "")
    if not isinstance(why, str) or len(why) > WHY_CHARS:
        raise UsageError(f"why: expected at most {WHY_CHARS} characters")
    await trust.revoke(request.app[DISPATCHER], request.match_info["host"], why or "asked by `spotfleet revoke`")
    return web.json_response({})


async def down(request: web.Request) -> web.Response:
    request.app[DISPATCHER].go_down("asked by `spotfleet down`", by_ourselves=False)
    return web.json_response({})


async def get_archive(request: web.Request) -> web.StreamResponse:
    """Made while it is sent. Only its proper end says that it is whole: what fails meanwhile breaks the connection."""
    dispatcher = request.app[DISPATCHER]
    with dispatcher.endgame.reading():
        return await streamed(request, lambda send: archive.send_tar(dispatcher.home, dispatcher.journal.ledger, send))
