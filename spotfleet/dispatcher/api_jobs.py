"""Routes about jobs: submission, state, logs, checkpoints, outputs."""

from __future__ import annotations

import asyncio
import re
import time
from secrets import token_hex

from aiohttp import web

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher import archive, startable
from spotfleet.dispatcher.jobs import Job
from spotfleet.dispatcher.keys import (
    DISPATCHER,
    LONGEST_WAIT_S,
    NotFound,
    body,
    chunks,
    host_of,
    number,
    streamed,
    whole,
    whole_body,
)
from spotfleet.dispatcher.parts import MOST_PARTS
from spotfleet.dispatcher.reports import LOG_NAME, WORKER_NAME
from spotfleet.errors import UsageError
from spotfleet.messages import JOB_KEY, Checkpoint, Launch, unpack_pieces
from spotfleet.model import JobSpec

MOST_JOBS = 10_000  # in a fleet's life


def _job(request: web.Request) -> Job:
    name, jobs = request.match_info["job"], request.app[DISPATCHER].jobs
    if not request.app[DISPATCHER].settled and (name not in jobs or host_of(request)):
        raise web.HTTPServiceUnavailable(text="")  # asked again: it is still to be learnt who holds what of it
    if name not in jobs:
        raise NotFound(f"no job {name!r}", hint=f"jobs of this fleet: {', '.join(jobs) or 'none yet'}")
    return jobs[name]


def _own_worker(request: web.Request) -> str:
    """The worker in the path, if it is one of the calling host's in a job that has been given to this host."""
    return _own(request, WORKER_NAME, "HOST/SLOT/INCARNATION")


def _own(request: web.Request, names: re.Pattern[str], shape: str) -> str:
    worker, host, found = request.match_info["worker"], host_of(request), _job(request)
    if not names.fullmatch(worker):
        raise UsageError(f"worker: {worker[:200]!r} is not {shape}")
    if re.split("[/#]", worker)[0] != host or not found.was_given_to(host):
        raise web.HTTPForbidden(text=f"{worker} is not a worker of {host} in {found.id}")
    return worker


async def submit(request: web.Request) -> web.Response:
    said = await body(request)
    if "spec" not in said:
        raise UsageError("spec: missing", hint="send {spec, secrets, wait}")
    spec = from_json(JobSpec, said["spec"])
    secrets = from_json(dict[str, str], said.get("secrets") or {})
    startable.check(spec, secrets)
    if len(request.app[DISPATCHER].jobs) >= MOST_JOBS:
        raise UsageError(f"this fleet has had {MOST_JOBS} jobs", hint="`spotfleet down`, then `up`, begins anew")
    secrets[JOB_KEY] = token_hex(32)
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
    return web.json_response(to_json(Launch(found.id, found.spec, found.secrets,
                                            time.time() - found.record.submitted_at)))


async def log_workers(request: web.Request) -> web.Response:
    return web.json_response({"workers": list(_job(request).logs.workers())})


async def get_logs(request: web.Request) -> web.Response:
    found = _job(request)
    worker = request.query.get("worker", "")
    if worker and not LOG_NAME.fullmatch(worker):
        raise UsageError(f"worker: {worker[:200]!r} is not HOST/SLOT/INCARNATION or HOST#setup")
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
    data = await whole_body(request)
    found, worker = _job(request), _own(request, LOG_NAME, "HOST/SLOT/INCARNATION or HOST#setup")
    size = found.logs.append(worker, found.log_rank(worker), whole(request, "offset"), data)
    found.log_bell.ring()
    return web.json_response({"size": size})


async def put_checkpoint(request: web.Request) -> web.Response:
    found = _job(request)
    part, parts = whole(request, "part"), int(number(request, "parts", 1))
    if not 1 <= parts <= MOST_PARTS:
        raise UsageError(f"parts: expected a whole number from 1 to {MOST_PARTS}, got {parts}")
    if part >= parts:
        raise UsageError(f"part: expected a whole number below parts={parts}, got {part}")
    offered = Checkpoint(_version(request), request.query.get("digest", ""), 0, whole(request, "generation"),
                         part=part, parts=parts)
    if not re.fullmatch(r"[0-9a-f]{64}", offered.digest):
        raise UsageError(f"digest: {offered.digest!r} is no sha256 in hex")
    host = host_of(request)
    if not found.has_worker_on(host):
        raise web.HTTPConflict(text=f"{host} holds no worker of {found.id} any more")
    kept = await found.checkpoints.put(offered, lambda: found.record.fence, chunks(request))
    if kept.parts == 1:  # a part that is not the last is no news
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


async def post_output(request: web.Request) -> web.Response:
    data = await whole_body(request)
    found, worker = _job(request), _own_worker(request)
    pieces = unpack_pieces(data)
    async with found.outputs.alone(worker):
        return web.json_response({"held": await asyncio.to_thread(found.outputs.take, worker, pieces)})


async def get_outputs(request: web.Request) -> web.StreamResponse:
    """All that has been collected of a job by now, as .tar.gz; whole only with its proper end."""
    found = _job(request)
    return await streamed(request, lambda send: archive.send_outputs(found.folder, send))


def _version(request: web.Request) -> int:
    text = request.match_info["version"]
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise UsageError(f"version: {text[:40]!r} is no whole number below 10**15")
    return int(text)
