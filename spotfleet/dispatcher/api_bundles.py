"""Routes about bundles: the blobs that working directories are made of, each by its sha256."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from aiohttp import web

from spotfleet.bundle.manifest import LIMIT_BLOB_BYTES
from spotfleet.dispatcher import code
from spotfleet.dispatcher.files import receive
from spotfleet.dispatcher.keys import DISPATCHER, NotFound, body, chunks, host_of
from spotfleet.errors import UsageError

SHA256 = re.compile(r"[0-9a-f]{64}")


async def get_bundle(request: web.Request) -> web.StreamResponse:
    """A host gets the bundles of the jobs that it works for, and the code that it is to run."""
    path, host = _blob(request), host_of(request)
    is_code = path.name == code.digest(request.app[DISPATCHER].home)
    if host and not is_code and not _serves(request, host, [path.name]):
        raise web.HTTPForbidden(text=f"{host} works for no job of bundle {path.name}")
    if not path.exists():
        raise NotFound(f"no bundle {path.name}", hint="upload it first")
    return web.FileResponse(path)


async def put_bundle(request: web.Request) -> web.Response:
    path, host = _blob(request), host_of(request)
    if host and not _serves(request, host, [path.name]):
        raise web.HTTPForbidden(text=f"{host} works for no job with bundle {path.name}")
    await receive(chunks(request), path, LIMIT_BLOB_BYTES, path.name)
    return web.json_response({})


async def missing(request: web.Request) -> web.Response:
    """Which of `digests` are not here; a host may ask for those of its jobs."""
    digests = (await body(request)).get("digests")
    if not isinstance(digests, list) or not all(isinstance(d, str) and SHA256.fullmatch(d) for d in digests):
        raise UsageError("digests: expected a list of sha256 in hex")
    host = host_of(request)
    if host and not _serves(request, host, digests):
        raise web.HTTPForbidden(text=f"{host} works for no job of all these bundles")
    found = await asyncio.to_thread(request.app[DISPATCHER].bundles.missing, digests)
    return web.json_response({"missing": found})


def _serves(request: web.Request, host: str, digests: list[str]) -> bool:
    """Are these all blobs of jobs that `host` works for?"""
    dispatcher = request.app[DISPATCHER]
    bundles = {job.spec.bundle for job in dispatcher.jobs.values() if job.has_worker_on(host)}
    return all(any(dispatcher.bundles.belongs(digest, bundle) for bundle in bundles) for digest in digests)


def _blob(request: web.Request) -> Path:
    digest = request.match_info["sha256"]
    if not SHA256.fullmatch(digest):
        raise UsageError(f"bundle: {digest!r} is no sha256 in hex")
    return request.app[DISPATCHER].bundles.path(digest)
