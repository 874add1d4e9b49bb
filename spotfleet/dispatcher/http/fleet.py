"""Routes about the fleet: status, events, all that the page shows, metrics, size, hosts, and shutdown."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from typing import Any

from aiohttp import web

from spotfleet.bootstrap import gang
from spotfleet.codec import from_json, to_json, to_text
from spotfleet.config.notifications import is_url
from spotfleet.dispatcher.http import revocation
from spotfleet.dispatcher.http.auth import bearer, host_token
from spotfleet.dispatcher.http.requests import (
    ADMIT,
    CORE,
    FLEET,
    JOBS,
    LONGEST_WAIT_S,
    RAY,
    body,
    host_of,
    number,
    whole,
)
from spotfleet.dispatcher.jobs.validation import BUNDLE
from spotfleet.dispatcher.live import metrics
from spotfleet.dispatcher.live.history import HistoryKeeper
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import HostFailed, event_to_json
from spotfleet.fleet.domain.state import after_failure
from spotfleet.model import NOTIFY_ON, SPOT_POLICIES, Nodes, NotifySpec, PolicySpec
from spotfleet.protocol.ray_cluster import DriverStart
from spotfleet.ssh.keys import derived_host_key

EVENTS_AT_ONCE = 1000
MOST_HOSTS = 10_000
LONGEST_NOTICE_S = 86_400.0
WHY_CHARS = 500
GANG_BYTES = 1 << 16  # the largest request of a machine that has no token yet
COMMAND_CHARS = 65_536
LOG_POLL_S = 0.2  # period of looking for output of a submitted script
LARGEST = 1e15  # for every number of a policy, such as micro-dollars


async def status(request: web.Request) -> web.Response:
    return web.json_response(to_json(request.app[FLEET].status()))


async def ray_status(request: web.Request) -> web.Response:
    return web.json_response(to_json(request.app[RAY].status()))


def _ray_job(request: web.Request) -> str:
    """Return the job of the fleet's Ray cluster. Raises UsageError for a fleet without one."""
    found = request.app[RAY].status()
    if not found.job:
        raise UsageError("no Ray cluster runs on this fleet", hint="start it with `spotfleet ray start`")
    return found.job


async def start_driver(request: web.Request) -> web.Response:
    """Start a script beside the head of the Ray cluster."""
    data, job = await body(request), _ray_job(request)
    bundle, given = data.get("bundle", ""), from_json(DriverStart, data.get("start") or {})
    if not isinstance(bundle, str) or (bundle and not BUNDLE.fullmatch(bundle)):
        raise UsageError("bundle: expected a sha256 in hex")
    if not given.command or len(given.command) > COMMAND_CHARS or "\0" in given.command:
        raise UsageError(f"command: expected 1 to {COMMAND_CHARS} characters")
    name = await request.app[RAY].drivers.start(job, request.app[JOBS].bundles, bundle, given)
    request.app[RAY].soon()
    return web.json_response({"driver": name})


async def driver_logs(request: web.Request) -> web.Response:
    """Send output of a submitted script from `offset` on; wait up to `wait` seconds for the first byte."""
    ray = request.app[RAY]
    folder, offset = ray.drivers.find(ray.last(), request.match_info["driver"]), whole(request, "offset")
    deadline = time.monotonic() + min(number(request, "wait"), LONGEST_WAIT_S)
    data, after, complete = ray.drivers.read(folder, offset)
    while after == offset and not complete and time.monotonic() < deadline:
        await asyncio.sleep(LOG_POLL_S)
        data, after, complete = ray.drivers.read(folder, offset)
    headers = {"X-Offset": str(after)} | ({"X-End": "1"} if complete else {})
    return web.Response(body=data, headers=headers, content_type="application/octet-stream")


async def stop_driver(request: web.Request) -> web.Response:
    ray, job = request.app[RAY], _ray_job(request)
    ray.drivers.stop(ray.drivers.find(job, request.match_info["driver"]))
    ray.soon()
    return web.json_response({})


async def events(request: web.Request) -> web.Response:
    """Send events after `after`; wait up to `wait` seconds for the first one."""
    journal = request.app[CORE].journal
    after, deadline = whole(request, "after"), time.monotonic() + min(number(request, "wait"), LONGEST_WAIT_S)
    while not (found := await journal.page(after, EVENTS_AT_ONCE)) and time.monotonic() < deadline:
        await journal.signal.wait(deadline - time.monotonic())
    return web.json_response({"events": [{"seq": seq, **event_to_json(e)} for seq, e in found]})


async def live(request: web.Request) -> web.Response:
    """Send status, events after `after` (without it the newest) and what came after `since` in the jobs' series."""
    core, history = request.app[CORE], request.app[FLEET].history
    after = whole(request, "after") if "after" in request.query else None
    if after is None or after > core.journal.last:  # the ledger that the caller knew is lost
        after = max(0, core.journal.last - EVENTS_AT_ONCE)
    since = number(request, "since")
    found = await core.journal.page(after, EVENTS_AT_ONCE)
    rest = json.dumps({"now": core.unix(), "events": [{"seq": seq, **event_to_json(e)} for seq, e in found],
                       "last": found[-1][0] if found else after, "series": _series(history, since)})
    text = f'{{"status":{to_text(request.app[FLEET].status())},{rest[1:]}'  # the fast encoder: it comes each second
    return web.Response(text=text, content_type="application/json")


def _series(history: HistoryKeeper, since: float) -> dict[str, Any]:
    """Return for each job with news {points: [[at, version, workers], ...], marks, forgotten}."""
    found = {}
    for job, kept in history.series.items():
        points, marks = kept.since(since)
        if points or marks:
            found[job] = {"points": [[round(p.at, 2), p.version, p.workers] for p in points],
                          "marks": to_json(marks), "forgotten": kept.forgotten}
    return found


async def get_metrics(request: web.Request) -> web.Response:
    request.app[ADMIT](request.protocol)
    history = request.app[FLEET].history
    counters = metrics.Counters(history.notices, history.taken, history.changes, history.paused_s)
    body = metrics.text(request.app[FLEET].status(), counters).encode()
    return web.Response(body=body, headers={"Content-Type": metrics.CONTENT_TYPE})


async def put_nodes(request: web.Request) -> web.Response:
    nodes = from_json(Nodes, await body(request))
    if not 0 <= nodes.min <= nodes.target <= nodes.max:
        raise UsageError(f"nodes: {nodes.min}, {nodes.target}, {nodes.max} are not min <= target <= max")
    if nodes.max > MOST_HOSTS:
        raise UsageError(f"nodes.max: {nodes.max} is more than {MOST_HOSTS}")
    if nodes.idle_s < 0:
        raise UsageError(f"nodes.idle_s: {nodes.idle_s} is below 0")
    await request.app[FLEET].set_nodes(nodes, request.query.get("group", ""))
    return web.json_response({})


async def put_policy(request: web.Request) -> web.Response:
    policy = from_json(PolicySpec, await body(request))
    numbers = (policy.on_demand_base, policy.deadline_s, policy.work_s, policy.work_steps, policy.max_micros,
               policy.max_micros_h)
    if policy.spot_policy not in SPOT_POLICIES or not all(0 <= n < LARGEST for n in numbers):
        raise UsageError("policy: a spot_policy, and numbers of at least 0 are expected")
    await request.app[FLEET].set_policy(policy)
    return web.json_response({})


async def put_notify(request: web.Request) -> web.Response:
    data = await body(request)
    wanted, url = from_json(NotifySpec, data.get("notify")), data.get("webhook", "")
    known = set(wanted.events) <= set(NOTIFY_ON) and len(wanted.command) <= COMMAND_CHARS
    if not (isinstance(url, str) and known and (not url or is_url(url))):
        raise UsageError(f"notify: events of {', '.join(NOTIFY_ON)}, a command and an address are expected")
    await request.app[FLEET].set_notify(wanted, url)
    return web.json_response({})


async def drain(request: web.Request) -> web.Response:
    await request.app[FLEET].drain(request.match_info["host"])
    return web.json_response({})


async def interrupt(request: web.Request) -> web.Response:
    """Ask the cloud to interrupt the host, for `chaos`: `notice_s` after a notice, or at once if that is null."""
    notice_s = (await body(request)).get("notice_s")
    is_number = isinstance(notice_s, (int, float)) and not isinstance(notice_s, bool)
    if not (notice_s is None or (is_number and 0 <= notice_s <= LONGEST_NOTICE_S)):
        raise UsageError(f"notice_s: expected seconds, at most a day, or null, got {str(notice_s)[:40]}")
    await request.app[FLEET].interrupt(request.match_info["host"], notice_s)
    return web.json_response({})


async def post_revoke(request: web.Request) -> web.Response:
    why = (await body(request)).get("why", "")
    if not isinstance(why, str) or len(why) > WHY_CHARS:
        raise UsageError(f"why: expected at most {WHY_CHARS} characters")
    await revocation.revoke(request.app[CORE], request.match_info["host"], why or "asked by `spotfleet revoke`")
    return web.json_response({})


async def post_failed(request: web.Request) -> web.Response:
    """Record why the caller's machine cannot become a host. A repeated report changes nothing."""
    core, host, data = request.app[CORE], request.match_info["host"], await body(request)
    why, broken = data.get("why"), data.get("broken", False)
    if not isinstance(why, str) or not why.strip() or not isinstance(broken, bool):
        raise UsageError("why: expected the reason; broken: true or false")
    if host_of(request) != host:
        raise web.HTTPForbidden(text=f"this token is not that of {host}")
    known = core.journal.state.host(host)
    if known is not None and not known.failed:
        why, now = " ".join(why.split())[:WHY_CHARS], core.unix()
        core.journal.note(HostFailed(now, host, why, broken, after_failure(core.journal.state, known, broken, now)))
        await core.journal.flush()
        core.tick_soon()
    return web.json_response({})


async def member_secrets(request: web.Request) -> web.Response:
    """Send token and host key of one of the hosts that were launched together, to the holder of their gang's token.

    Once the host has joined, nobody gets them any more.
    """
    core, host = request.app[CORE], request.match_info["host"]
    if (request.content_length or 0) > GANG_BYTES:
        raise web.HTTPRequestEntityTooLarge(GANG_BYTES, request.content_length or 0)
    hosts, secret = (await body(request)).get("hosts", []), core.boot.fleet_secret
    if not isinstance(hosts, list) or len(hosts) > MOST_HOSTS or not all(isinstance(h, str) for h in hosts):
        raise UsageError("hosts: expected a list of names")
    given = bearer(request.headers.get("Authorization", ""))
    if not hmac.compare_digest(given.encode(), gang.gang_token(secret, hosts).encode()) or host not in hosts:
        raise web.HTTPUnauthorized(text="the token is missing or belongs to no gang of this host")
    if not revocation.is_trusted(core, host) or host in core.connections:
        raise web.HTTPForbidden(text=f"{host} has joined, has ended, or is none of this fleet's hosts")
    return web.json_response({"token": host_token(secret, host),
                              "host_key": gang.raw_key(derived_host_key(secret, host))})


async def down(request: web.Request) -> web.Response:
    discard = (await body(request)).get("discard", False)
    if not isinstance(discard, bool):
        raise UsageError(f"discard: expected true or false, got {str(discard)[:40]}")
    request.app[FLEET].go_down(discard=discard)
    return web.json_response({})
