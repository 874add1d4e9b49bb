"""Routes about bundles: the blobs of working directories, each named by its sha256."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from spotfleet.bundle.manifest import LIMIT_BLOB_BYTES
from spotfleet.dispatcher.core import NotFound
from spotfleet.dispatcher.disk import wheel
from spotfleet.dispatcher.disk.files import receive
from spotfleet.dispatcher.http.host_work import HOST_WORK
from spotfleet.dispatcher.http.requests import CORE, JOBS, body, chunks, host_of
from spotfleet.errors import UsageError

T = TypeVar("T")
SHA256 = re.compile(r"[0-9a-f]{64}")


async def get_bundle(request: web.Request) -> web.StreamResponse:
    """Send a blob; a host gets only bundles of the jobs that it works for, and the code that it runs."""
    path, host = _blob(request), host_of(request)
    is_code = path.name == wheel.digest(request.app[CORE].home)
    if host and not is_code and not _serves(request, host, [path.name]):
        raise web.HTTPForbidden(text=f"{host} works for no job of bundle {path.name}")
    if not await _off_loop(request, lambda: request.app[JOBS].bundles.is_sound(path.name)):
        raise NotFound(f"no bundle {path.name}", hint="upload it first")
    return web.FileResponse(path)


async def put_bundle(request: web.Request) -> web.Response:
    path, host = _blob(request), host_of(request)
    if host and not _serves(request, host, [path.name]):
        raise web.HTTPForbidden(text=f"{host} works for no job with bundle {path.name}")
    await receive(chunks(request), path, LIMIT_BLOB_BYTES, path.name)
    return web.json_response({})


async def missing(request: web.Request) -> web.Response:
    """Return the `digests` that are missing here; a host may query only blobs of its jobs."""
    digests = (await body(request)).get("digests")
    if not isinstance(digests, list) or not all(isinstance(d, str) and SHA256.fullmatch(d) for d in digests):
        raise UsageError("digests: expected a list of sha256 in hex")
    host = host_of(request)
    if host and not _serves(request, host, digests):
        raise web.HTTPForbidden(text=f"{host} works for no job of all these bundles")
    found = await _off_loop(request, lambda: request.app[JOBS].bundles.missing(digests))
    return web.json_response({"missing": found})


async def _off_loop(request: web.Request, work: Callable[[], T]) -> T:
    """Call `work` in a thread, for a host in one of the hosts'."""
    if not (host := host_of(request)):
        return await asyncio.to_thread(work)
    with request.app[HOST_WORK].admitted(host):
        return await request.app[HOST_WORK].run(request, lambda _stopped: work())


def _serves(request: web.Request, host: str, digests: list[str]) -> bool:
    """Return whether all digests are blobs of jobs that `host` works for."""
    bundles = {b for job in request.app[CORE].jobs.values() if job.has_worker_on(host) for b in job.bundles}
    store = request.app[JOBS].bundles
    return all(any(store.belongs(digest, bundle) for bundle in bundles) for digest in digests)


def _blob(request: web.Request) -> Path:
    digest = request.match_info["sha256"]
    if not SHA256.fullmatch(digest):
        raise UsageError(f"bundle: {digest!r} is no sha256 in hex")
    return request.app[JOBS].bundles.path(digest)
