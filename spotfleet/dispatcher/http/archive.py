"""Routes of the archive: the manifest, the content of keys by ranges, and all of it as .tar.gz."""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aiohttp import web

from spotfleet.dispatcher.checkpoints import archive, archive_files
from spotfleet.dispatcher.checkpoints.archive import Content
from spotfleet.dispatcher.checkpoints.archive_files import ArchiveFiles, TargetGlance
from spotfleet.dispatcher.core import Core, NotFound
from spotfleet.dispatcher.disk.records import Seen, seen_at
from spotfleet.dispatcher.http.requests import CORE, FLEET, JOBS, STALL_S, body, streamed, whole_or_aborted
from spotfleet.errors import UsageError
from spotfleet.protocol.archive import packs
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.folder import FolderStore, fleet_store
from spotfleet.storage.mirror import Piece

MOST_RANGES = 1000  # in one request
PACKED_BYTES = 32 << 20  # largest answer that is deflated, in memory
FILES: web.AppKey[ArchiveFiles] = web.AppKey("archive")
LOOKING: web.AppKey[threading.Lock] = web.AppKey("looking")  # held while one manifest looks at the checkpoint target


class SharedGlance(TargetGlance):
    """Looks of one manifest at the checkpoint target. While a look of another one hangs, none begins: each would keep a
    thread for as long as the target hangs."""

    def __init__(self, store: FolderStore, looking: threading.Lock) -> None:
        super().__init__(store)
        self._looking = looking

    def place_of(self, job: str, checkpoint: Checkpoint) -> str:
        if self._hangs or not self._looking.acquire(timeout=archive_files.TARGET_S):
            self._hangs = True
            return ""
        self._looking.release()
        return super().place_of(job, checkpoint)

    def _look(self, job: str, checkpoint: Checkpoint, found: list[str]) -> None:
        with self._looking:
            super()._look(job, checkpoint, found)


@asynccontextmanager
async def _reading(request: web.Request) -> AsyncIterator[None]:
    """Keep our machine, and the files of all jobs where they are, while a request reads them; for the `outputs` of one
    job only its files."""
    retention, job = request.app[JOBS].retention, request.query.get("outputs", "")
    async with AsyncExitStack() as stack:
        if job:
            stack.enter_context(retention.using(job))
        else:
            stack.enter_context(request.app[FLEET].shutdown.reading())
            await stack.enter_async_context(retention.archiving())
        yield


async def get_tar(request: web.Request) -> web.StreamResponse:
    """Stream the archive while it is built. A failure aborts the connection: without an end marker it is partial."""
    core = request.app[CORE]
    async with _reading(request):
        return await streamed(request, lambda send: archive.send_tar(core.home, core.journal.ledger, send))


async def get_manifest(request: web.Request) -> web.StreamResponse:
    """Stream the manifest: of the whole archive, or with `outputs` of one job's outputs. With `check` each checkpoint
    is read, also one that has been verified before. With `bring` copies at the target do not count."""
    core, job = request.app[CORE], request.query.get("outputs", "")
    if job and request.app[JOBS].find(job) is None:
        raise NotFound(f"no job {job!r}")
    verified = {} if request.query.get("check") else _verified(core)
    target = "" if request.query.get("bring") else core.boot.spec.checkpoint.folder
    glance = SharedGlance(fleet_store(target, core.boot.fleet, core.boot.ca), request.app[LOOKING]) if target else None
    files, now = request.app[FILES], time.time()
    async with _reading(request):
        return await streamed(request, lambda send: files.send_manifest(send, verified, glance, now, job))


def _verified(core: Core) -> dict[Any, Seen]:
    """Return the checkpoint files that are known to be whole, as they were when they were compared."""
    paths = [job.checkpoints.path(c) for job in core.jobs.values() for c in job.checkpoints.kept
             if not c.url and job.checkpoints.is_good(c)]
    return {path: seen for path in paths if (seen := seen_at(path)) is not None}


async def get_file(request: web.Request) -> web.StreamResponse:
    """Send the content of one key, or one range of it."""
    key, files = request.match_info["key"], request.app[FILES]
    async with _reading(request):
        contents, size = await _found(files, [Piece(key, 0, 0)])
        asked = request.http_range
        start, end = asked.start or 0, size if asked.stop is None else min(asked.stop, size)
        start = max(0, size + start) if start < 0 else start
        if asked.start is None and asked.stop is None:
            return await _send(request, contents, [Piece(key, 0, size)], web.StreamResponse(status=200))
        if start >= end:
            raise web.HTTPRequestRangeNotSatisfiable(text=f"{key[:200]!r} has {size} bytes")
        response = web.StreamResponse(status=206, headers={"Content-Range": f"bytes {start}-{end - 1}/{size}"})
        return await _send(request, contents, [Piece(key, start, end)], response)


async def post_ranges(request: web.Request) -> web.StreamResponse:
    """Send several ranges, `[[key, start, end], ...]`, one after the other."""
    pieces = [_piece(item) for item in _list((await body(request)).get("ranges"))]
    async with _reading(request):
        contents, _ = await _found(request.app[FILES], pieces)
        return await _send(request, contents, pieces, web.StreamResponse(status=200))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_RANGES:
        raise UsageError(f"ranges: expected a list of 1 to {MOST_RANGES} ranges")
    return value


def _piece(item: Any) -> Piece:
    match item:
        case [str(key), int(start), int(end)] if 0 <= start <= end:
            return Piece(key, start, end)
    raise UsageError(f"ranges: {str(item)[:200]} is not [key, start, end]")


async def _found(files: ArchiveFiles, pieces: Sequence[Piece]) -> tuple[list[Content], int]:
    """Return the contents that the pieces are of, and the size of the last one. NotFound where one is not there, or
    ends before its piece does."""
    def look() -> tuple[list[Content], int]:
        found, size = files.contents([piece.key for piece in pieces]), 0
        for content, piece in zip(found, pieces, strict=True):
            if piece.end > (size := content.size()):
                raise FileNotFoundError(f"{piece.key[:200]!r} has {size} bytes")
        return found, size

    try:
        return await asyncio.to_thread(look)
    except FileNotFoundError as error:
        raise NotFound(str(error), hint="ask for the manifest again") from None


async def _send(request: web.Request, contents: Sequence[Content], pieces: Sequence[Piece],
                response: web.StreamResponse) -> web.StreamResponse:
    """Send the pieces: deflated for a receiver that accepts it, if all of them shrink."""
    total = sum(piece.end - piece.start for piece in pieces)
    blocks = archive_files.blocks(contents, pieces)
    response.content_type = "application/octet-stream"
    if "deflate" in request.headers.get("Accept-Encoding", "") and total <= PACKED_BYTES and all(
            packs(piece.key) for piece in pieces):
        data = await asyncio.to_thread(lambda: zlib.compress(b"".join(blocks), 1))
        response.headers["Content-Encoding"] = "deflate"
        blocks, total = iter([data]), len(data)
    response.content_length = total
    await response.prepare(request)
    with whole_or_aborted(request):
        while block := await asyncio.to_thread(next, blocks, b""):
            async with asyncio.timeout(STALL_S):
                await response.write(block)
        await response.write_eof()
    return response
