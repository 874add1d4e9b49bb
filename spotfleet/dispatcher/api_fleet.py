"""Routes about the fleet: status, events, size, hosts, its end, and bundles."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from aiohttp import web

from spotfleet.bundle import LIMIT_BYTES
from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher import archive, trust
from spotfleet.dispatcher.files import receive
from spotfleet.dispatcher.keys import DISPATCHER, LONGEST_WAIT_S, NotFound, body, chunks, host_of, number, whole
from spotfleet.errors import UsageError
from spotfleet.fleet.events import event_to_json
from spotfleet.model import Nodes

EVENTS_AT_ONCE = 1000
MOST_HOSTS = 10_000
LONGEST_NOTICE_S = 86_400.0
WHY_CHARS = 500
STALL_S = 60.0  # whoever fetches the archive and takes nothing for so long is given up


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
    dispatcher, loop = request.app[DISPATCHER], asyncio.get_running_loop()
    response = web.StreamResponse()
    response.enable_chunked_encoding()

    def send(piece: bytes) -> None:
        asyncio.run_coroutine_threadsafe(response.write(piece), loop).result(STALL_S)

    with dispatcher.endgame.reading():
        await response.prepare(request)
        try:
            await asyncio.to_thread(archive.send_tar, dispatcher.home, dispatcher.journal.ledger, send)
            await response.write_eof()
        except BaseException:
            if request.transport is not None:
                request.transport.abort()  # type: ignore[attr-defined]
            raise
    return response


async def get_bundle(request: web.Request) -> web.StreamResponse:
    """A host gets the bundles of the jobs that it works for."""
    path, host = _bundle(request), host_of(request)
    served = (j.spec.bundle for j in request.app[DISPATCHER].jobs.values() if j.has_worker_on(host))
    if host and path.name not in served:
        raise web.HTTPForbidden(text=f"{host} works for no job of bundle {path.name}")
    if not path.exists():
        raise NotFound(f"no bundle {path.name}", hint="upload it first")
    return web.FileResponse(path)


async def put_bundle(request: web.Request) -> web.Response:
    path, host, jobs = _bundle(request), host_of(request), request.app[DISPATCHER].jobs.values()
    if host and not any(j.spec.bundle == path.name and j.has_worker_on(host) for j in jobs):
        raise web.HTTPForbidden(text=f"{host} works for no job with bundle {path.name}")
    await receive(chunks(request), path, LIMIT_BYTES, path.name)
    return web.json_response({})


def _bundle(request: web.Request) -> Path:
    digest = request.match_info["sha256"]
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"bundle: {digest!r} is no sha256 in hex")
    return request.app[DISPATCHER].home / "bundles" / digest
