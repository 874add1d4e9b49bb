"""Routes about jobs: submission, state, logs, checkpoints, outputs."""

from __future__ import annotations

import asyncio
import re
import time

from aiohttp import web

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher import archive
from spotfleet.dispatcher.files import receive
from spotfleet.dispatcher.jobs import Job
from spotfleet.dispatcher.keys import DISPATCHER, LONGEST_WAIT_S, WORKER_NAME, NotFound, body, host_of, number, whole
from spotfleet.errors import UsageError
from spotfleet.messages import Checkpoint, Launch
from spotfleet.model import JobSpec

OUTPUT_BYTES = 64 << 30


def _job(request: web.Request) -> Job:
    name, jobs = request.match_info["job"], request.app[DISPATCHER].jobs
    if name not in jobs:
        raise NotFound(f"no job {name!r}", hint=f"jobs of this fleet: {', '.join(jobs) or 'none yet'}")
    return jobs[name]


def _own_worker(request: web.Request) -> str:
    """The worker in the path, if it is one of the calling host's."""
    worker, host = request.match_info["worker"], host_of(request)
    if not WORKER_NAME.fullmatch(worker):
        raise UsageError(f"worker: {worker!r} is not HOST/SLOT/INCARNATION")
    if worker.split("/")[0] != host:
        raise web.HTTPForbidden(text=f"{worker} is not a worker of {host}")
    return worker


async def submit(request: web.Request) -> web.Response:
    said = await body(request)
    if "spec" not in said:
        raise UsageError("spec: missing", hint="send {spec, secrets, wait}")
    spec = from_json(JobSpec, said["spec"])
    secrets = from_json(dict[str, str], said.get("secrets") or {})
    wait = said.get("wait", True)
    if not isinstance(wait, bool):
        raise UsageError(f"wait: expected true or false, got {wait!r}")
    return web.json_response({"job": await request.app[DISPATCHER].submit(spec, secrets, wait=wait)})


async def jobs(request: web.Request) -> web.Response:
    return web.json_response({"jobs": to_json(request.app[DISPATCHER].status().jobs)})


async def job(request: web.Request) -> web.Response:
    return web.json_response(to_json(request.app[DISPATCHER].job_status(_job(request))))


async def cancel(request: web.Request) -> web.Response:
    request.app[DISPATCHER].cancel(_job(request))
    return web.json_response({})


async def launch(request: web.Request) -> web.Response:
    """Secrets leave here for a host that has been given a worker of the job, and for no other."""
    found, host = _job(request), host_of(request)
    if not found.has_worker_on(host):
        raise web.HTTPForbidden(text=f"{host} holds no worker of {found.id}")
    return web.json_response(to_json(Launch(found.id, found.spec, found.secrets)))


async def log_workers(request: web.Request) -> web.Response:
    return web.json_response({"workers": list(_job(request).logs.workers())})


async def get_logs(request: web.Request) -> web.Response:
    found = _job(request)
    worker = request.query.get("worker", "")
    if worker and not WORKER_NAME.fullmatch(worker):
        raise UsageError(f"worker: {worker!r} is not HOST/SLOT/INCARNATION")
    source = worker or whole(request, "rank")
    offset, deadline = whole(request, "offset"), time.monotonic() + min(number(request, "wait"), LONGEST_WAIT_S)
    while True:
        complete = found.logs_complete(time.time())  # asked before the read, so that nothing can come between
        piece = found.logs.read(source, offset)
        left_s = deadline - time.monotonic()
        if piece.data or complete or left_s <= 0:
            break
        await found.log_bell.wait(left_s)
    headers = {"X-Offset": str(piece.next_offset)}
    if complete and not found.logs.read(source, piece.next_offset).data:
        headers["X-End"] = "1"
    return web.Response(body=piece.data, headers=headers, content_type="application/octet-stream")


async def post_log(request: web.Request) -> web.Response:
    found, worker = _job(request), _own_worker(request)
    size = found.logs.append(worker, found.log_rank(worker), whole(request, "offset"), await request.read())
    found.log_bell.ring()
    return web.json_response({"size": size})


async def put_checkpoint(request: web.Request) -> web.Response:
    found = _job(request)
    offered = Checkpoint(_version(request), request.query.get("digest", ""), 0, whole(request, "generation"))
    if not re.fullmatch(r"[0-9a-f]{64}", offered.digest):
        raise UsageError(f"digest: {offered.digest!r} is no sha256 in hex")
    host = host_of(request)
    if not found.has_worker_on(host):
        raise web.HTTPConflict(text=f"{host} holds no worker of {found.id} any more")
    kept = await found.checkpoints.put(offered, lambda: found.fence, request.content.iter_any())
    request.app[DISPATCHER].checkpoint_kept(found, kept)
    return web.json_response(to_json(kept))


async def get_checkpoint(request: web.Request) -> web.StreamResponse:
    found, version = _job(request), _version(request)
    path = found.checkpoints.find(version)
    if path is None:
        raise NotFound(f"{found.id} keeps no checkpoint of version {version}")
    host = host_of(request)
    if host and not found.has_worker_on(host):
        raise web.HTTPForbidden(text=f"{host} holds no worker of {found.id}")
    return web.FileResponse(path)


async def put_output(request: web.Request) -> web.Response:
    found, worker = _job(request), _own_worker(request)
    folder = found.folder / "outputs" / worker.replace("/", "@")
    upload = folder.with_name(f".{folder.name}.tar.gz")
    await receive(request.content.iter_any(), upload, OUTPUT_BYTES)
    await asyncio.to_thread(archive.keep_output, upload, folder)
    return web.json_response({})


def _version(request: web.Request) -> int:
    text = request.match_info["version"]
    if not text.isdigit():
        raise UsageError(f"version: {text!r} is no whole number")
    return int(text)
