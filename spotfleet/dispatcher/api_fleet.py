"""Routes about the fleet: status, events, size, hosts, its end, and bundles."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from aiohttp import web

from spotfleet.bundle import LIMIT_BYTES
from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher import archive
from spotfleet.dispatcher.files import receive
from spotfleet.dispatcher.keys import DISPATCHER, LONGEST_WAIT_S, NotFound, body, number, whole
from spotfleet.errors import UsageError
from spotfleet.fleet.events import event_to_json
from spotfleet.model import Nodes

EVENTS_AT_ONCE = 1000
STALL_S = 60.0  # whoever fetches the archive and takes nothing for so long is given up


async def status(request: web.Request) -> web.Response:
    return web.json_response(to_json(request.app[DISPATCHER].status()))


async def events(request: web.Request) -> web.Response:
    """Events after `after`; waits up to `wait` seconds for the first one."""
    dispatcher = request.app[DISPATCHER]
    after, deadline = whole(request, "after"), time.monotonic() + min(number(request, "wait"), LONGEST_WAIT_S)
    while not (found := dispatcher.journal.after(after)) and time.monotonic() < deadline:
        await dispatcher.journal.bell.wait(deadline - time.monotonic())
    return web.json_response({"events": [{"seq": seq, **event_to_json(e)} for seq, e in found[:EVENTS_AT_ONCE]]})


async def put_nodes(request: web.Request) -> web.Response:
    nodes = from_json(Nodes, await body(request))
    if not 0 <= nodes.min <= nodes.target <= nodes.max:
        raise UsageError(f"nodes: {nodes.min}, {nodes.target}, {nodes.max} are not min <= target <= max")
    await request.app[DISPATCHER].set_nodes(nodes)
    return web.json_response({})


async def drain(request: web.Request) -> web.Response:
    request.app[DISPATCHER].drain(request.match_info["host"])
    return web.json_response({})


async def interrupt(request: web.Request) -> web.Response:
    """Chaos: ask the cloud to take the host, after a notice of `notice_s` or at once for null."""
    notice_s = (await body(request)).get("notice_s")
    if not (notice_s is None or (isinstance(notice_s, (int, float)) and notice_s >= 0)):
        raise UsageError(f"notice_s: expected seconds or null, got {notice_s!r}")
    await request.app[DISPATCHER].interrupt(request.match_info["host"], notice_s)
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
    path = _bundle(request)
    if not path.exists():
        raise NotFound(f"no bundle {path.name}", hint="upload it first")
    return web.FileResponse(path)


async def put_bundle(request: web.Request) -> web.Response:
    path = _bundle(request)
    await receive(request.content.iter_any(), path, LIMIT_BYTES, path.name)
    return web.json_response({})


def _bundle(request: web.Request) -> Path:
    digest = request.match_info["sha256"]
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UsageError(f"bundle: {digest!r} is no sha256 in hex")
    return request.app[DISPATCHER].home / "bundles" / digest
