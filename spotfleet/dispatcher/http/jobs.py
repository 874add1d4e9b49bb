"""Routes about jobs: submission, state, logs, checkpoints, outputs."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from secrets import token_hex

from aiohttp import web

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.core import NotFound
from spotfleet.dispatcher.disk.files import WrongDigest
from spotfleet.dispatcher.http.host_work import HOST_WORK
from spotfleet.dispatcher.http.requests import (
    CORE,
    FLEET,
    JOBS,
    LONGEST_WAIT_S,
    RAY,
    body,
    chunks,
    host_of,
    number,
    streamed,
    whole,
    whole_body,
)
from spotfleet.dispatcher.jobs import validation
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.reports import LOG_NAME, WORKER_NAME
from spotfleet.errors import UsageError
from spotfleet.model import RAY_KIND, JobSpec
from spotfleet.protocol.checkpoint_files import MOST_PIECES, is_file_name
from spotfleet.protocol.messages import JOB_KEY, Checkpoint, WorkerLaunch, unpack_pieces

MOST_JOBS = 10_000  # that have not ended
NAMED = 20  # jobs that an error names
MOST_PRUNED = 1000  # jobs in one request


def _job(request: web.Request) -> ManagedJob:
    name, jobs = request.match_info["job"], request.app[CORE].jobs
    if not request.app[CORE].settled and (name not in jobs or host_of(request)):
        raise web.HTTPServiceUnavailable(text="")  # the caller retries: until settled, the job's workers are unknown
    if (found := request.app[JOBS].find(name)) is None:
        newest = list(jobs)[-NAMED:]
        hint = f"the newest jobs of this fleet: {', '.join(newest)}" if newest else "this fleet has no job yet"
        raise NotFound(f"no job {name!r}", hint=hint)
    return found


def _own_worker(request: web.Request) -> str:
    """Return the worker in the path; refuse one that is not on the calling host, or whose job the host never had."""
    return _own(request, WORKER_NAME, "HOST/SLOT/INCARNATION")


def _own(request: web.Request, names: re.Pattern[str], shape: str) -> str:
    worker, host, found = request.match_info["worker"], host_of(request), _job(request)
    if not names.fullmatch(worker):
        raise UsageError(f"worker: {worker[:200]!r} is not {shape}")
    if re.split("[/#]", worker)[0] != host or not found.was_given_to(host):
        raise web.HTTPForbidden(text=f"{worker} is not a worker of {host} in {found.id}")
    return worker


async def submit(request: web.Request) -> web.Response:
    data = await body(request)
    if "spec" not in data:
        raise UsageError("spec: missing", hint="send {spec, secrets, wait}")
    spec = from_json(JobSpec, data["spec"])
    secrets = from_json(dict[str, str], data.get("secrets") or {})
    validation.check(spec, secrets)
    if sum(not job.state.ended for job in request.app[CORE].jobs.values()) >= MOST_JOBS:
        raise UsageError(f"this fleet has {MOST_JOBS} jobs that have not ended",
                         hint="wait until some have ended, or cancel them")
    secrets[JOB_KEY] = token_hex(32)
    wait = data.get("wait", True)
    if not isinstance(wait, bool):
        raise UsageError(f"wait: expected true or false, got {wait!r}")
    return web.json_response({"job": await request.app[JOBS].submit(spec, secrets, wait=wait)})


async def jobs(request: web.Request) -> web.Response:
    return web.json_response({"jobs": to_json(request.app[FLEET].status().jobs)})


async def job(request: web.Request) -> web.Response:
    return web.json_response(to_json(request.app[FLEET].job_status(_job(request))))


async def cancel(request: web.Request) -> web.Response:
    request.app[JOBS].cancel(_job(request))
    return web.json_response({})


async def launch(request: web.Request) -> web.Response:
    """Send the job's launch data. It holds secrets, so only a host with a worker of the job gets it."""
    found, host = _job(request), host_of(request)
    if not found.has_worker_on(host):
        raise web.HTTPForbidden(text=f"{host} holds no worker of {found.id}")
    spec = found.spec
    if spec.kind == RAY_KIND:
        if (envs := request.app[RAY].envs(found, host)) is None:
            raise web.HTTPServiceUnavailable(text="")  # the agent retries: the head has not reported yet
        spec = replace(spec, envs={**spec.envs, **envs})
    return web.json_response(to_json(WorkerLaunch(found.id, spec, found.secrets,
                                            request.app[CORE].unix() - found.record.submitted_at)))


async def log_workers(request: web.Request) -> web.Response:
    return web.json_response({"workers": list(_job(request).logs.workers())})


def _log_source(request: web.Request) -> int | str:
    worker = request.query.get("worker", "")
    if worker and not LOG_NAME.fullmatch(worker):
        raise UsageError(f"worker: {worker[:200]!r} is not HOST/SLOT/INCARNATION or HOST#setup")
    return worker or whole(request, "rank")


async def log_start(request: web.Request) -> web.Response:
    """Send the offset at which the last `tail` lines, or those of the last `since` seconds, begin."""
    found, source = _job(request), _log_source(request)
    lines = whole(request, "tail") if "tail" in request.query else None
    return web.json_response({"offset": found.logs.start(source, lines=lines, since_s=number(request, "since"))})


async def get_logs(request: web.Request) -> web.Response:
    found, source = _job(request), _log_source(request)
    offset, deadline = whole(request, "offset"), time.monotonic() + min(number(request, "wait"), LONGEST_WAIT_S)
    while True:
        # read before the log, so that a chunk in between is not missed
        complete = found.logs_complete(request.app[CORE].unix())
        piece = found.logs.read(source, offset)
        left_s = deadline - time.monotonic()
        if piece.data or complete or left_s <= 0:
            break
        await found.log_signal.wait(left_s)
    headers = {"X-Offset": str(piece.next_offset)}
    if complete and not found.logs.read(source, piece.next_offset).data:
        headers["X-End"] = "1"
    return web.Response(body=piece.data, headers=headers, content_type="application/octet-stream")


async def post_log(request: web.Request) -> web.Response:
    data = await whole_body(request)
    found, worker = _job(request), _own(request, LOG_NAME, "HOST/SLOT/INCARNATION or HOST#setup")
    before = found.logs.size(worker)
    size = found.logs.append(worker, found.log_rank(worker), whole(request, "offset"), data)
    if size > before:
        request.app[CORE].unsent.note_arrival(host_of(request), time.monotonic())
    found.log_signal.notify()
    return web.json_response({"size": size})


async def put_checkpoint(request: web.Request) -> web.Response:
    found = _job(request)
    part, parts, name = whole(request, "part"), int(number(request, "parts", 1)), request.query.get("name", "")
    if not 1 <= parts <= MOST_PIECES:
        raise UsageError(f"parts: expected a whole number from 1 to {MOST_PIECES}, got {parts}")
    if part >= parts:
        raise UsageError(f"part: expected a whole number below parts={parts}, got {part}")
    if not is_file_name(name) and (name or parts > 1):
        raise UsageError(f"name: {name[:80]!r} is no file of a checkpoint",
                         hint="replace the host if its agent is of an earlier release")
    offered = Checkpoint(_version(request), request.query.get("digest", ""), 0, whole(request, "generation"),
                         part=part, parts=parts, grant=request.query.get("grant", ""), name=name)
    if not re.fullmatch(r"[0-9a-f]{64}", offered.digest):
        raise UsageError(f"digest: {offered.digest!r} is no sha256 in hex")
    host = host_of(request)
    if not found.takes_checkpoints_of(host):
        raise web.HTTPConflict(text=f"{host} holds no worker of {found.id} any more")
    unsent = request.app[CORE].unsent
    if request.query.get("at") == "target":
        if not found.checkpoints.probe or not offered.name:
            raise web.HTTPPreconditionFailed(text="the dispatcher has no such target mounted: send the file")
        if not await found.checkpoints.has_come_to_target(offered, found.record.fence):
            raise web.HTTPPreconditionFailed(text="the checkpoint target does not answer: send the file")
        unsent.note_checkpoint(host, time.monotonic(), right=True)
        return web.json_response(to_json(offered))
    try:
        kept = await found.checkpoints.put(offered, lambda: found.record.fence, _noted_chunks(request))
    except WrongDigest:
        unsent.note_checkpoint(host, time.monotonic(), right=False)
        raise
    unsent.note_checkpoint(host, time.monotonic(), right=True)
    if kept is not None:  # only the last file makes the checkpoint whole
        request.app[JOBS].checkpoint_kept(found, kept)
    return web.json_response(to_json(kept or offered))


async def _noted_chunks(request: web.Request) -> AsyncIterator[bytes]:
    async for chunk in chunks(request):
        request.app[CORE].unsent.note_piece(host_of(request), time.monotonic())
        yield chunk


async def get_checkpoint(request: web.Request) -> web.StreamResponse:
    found, version = _job(request), _version(request)
    path = found.checkpoints.find(version)
    if path is None and host_of(request):
        found.checkpoints.doubt(version)
    if path is None:
        raise NotFound(f"{found.id} keeps no checkpoint of version {version}")
    host = host_of(request)
    if host and not found.has_worker_on(host):
        raise web.HTTPForbidden(text=f"{host} holds no worker of {found.id}")
    name = request.match_info.get("name", "")
    if (name and not is_file_name(name)) or not (path / name).is_file():
        raise NotFound(f"checkpoint {version} of {found.id} has no file {name[:80]!r}")
    return web.FileResponse(path / name)


async def post_folder(request: web.Request) -> web.Response:
    """Take the manifest of the checkpoint folder on rank 0's host; answer which of its pieces are missing. Without a
    missing piece it is the job's newest."""
    work, host, desk = request.app[HOST_WORK], host_of(request), request.app[JOBS]
    with work.admitted(host):
        data = await whole_body(request)
        found, worker, generation = _job(request), _own_worker(request), whole(request, "generation")
        if not found.leads(worker, generation):
            raise web.HTTPConflict(text=f"{worker} is not rank 0 of the newest round of {found.id}")
        digest = hashlib.sha256(data).hexdigest()
        desk.offer_folder(found, digest)
        request.app[CORE].unsent.note_arrival(host_of(request), time.monotonic())
        missing = await work.run(request, lambda _stopped: desk.bundles.offer(digest, data))
        if not missing and found.leads(worker, generation):
            desk.save_folder(found, digest)
    return web.json_response({"missing": missing})


async def post_output(request: web.Request) -> web.Response:
    work, core, host = request.app[HOST_WORK], request.app[CORE], host_of(request)
    with work.admitted(host):
        data = await whole_body(request)
        found, worker = _job(request), _own_worker(request)
        _refuse_unknown(request, found, worker)
        with request.app[JOBS].retention.using(found.id):
            async with found.outputs.lock(worker):
                before = found.outputs.moved(worker)
                try:
                    held = await work.run(
                        request, lambda stopped: found.outputs.apply(worker, unpack_pieces(data), stopped))
                finally:
                    if found.outputs.moved(worker) != before:
                        core.unsent.note_arrival(host, time.monotonic())
        return web.json_response({"held": held})


def _refuse_unknown(request: web.Request, found: ManagedJob, worker: str) -> None:
    """Refuse output of a worker that never existed: limits hold for each worker, so names may not be invented.

    This process does not know workers that ended under an earlier one; their agent reports them while it has results.
    """
    if found.knows_worker(worker):
        return
    host = worker.partition("/")[0]
    connection = request.app[CORE].connections.get(host)
    if connection is None or not connection.connected:
        raise web.HTTPServiceUnavailable(text="")  # the agent retries; its report comes first
    report = connection.report
    named = {w.report.worker for w in report.workers if w.report.job == found.id}
    named |= {u.worker for u in report.unsent or () if u.job == found.id}
    if worker not in named or not found.accept_reported(worker):
        raise web.HTTPForbidden(text=f"{found.id} has had no worker {worker}")


async def get_outputs(request: web.Request) -> web.StreamResponse:
    """Stream the outputs of a job collected so far as .tar.gz; without its end marker it is incomplete."""
    found, began = _job(request), time.time()
    with request.app[JOBS].retention.using(found.id):
        answer = await streamed(request, lambda send: archive.send_outputs(found.folder, send))
        found.outputs_fetched(began)
    return answer


async def post_fetched(request: web.Request) -> web.Response:
    """Record that a caller has all outputs that the manifest of the time `at` had."""
    found, at = _job(request), (await body(request)).get("at")
    if not isinstance(at, (int, float)) or isinstance(at, bool) or not at >= 0:
        raise UsageError(f"at: expected the time of a manifest, got {str(at)[:40]}")
    found.outputs_fetched(min(float(at), time.time()))
    return web.json_response({})


async def ended(request: web.Request) -> web.Response:
    """List the ended jobs besides the newest `keep`, oldest first, in pages that begin after the job `after`."""
    keep, after = int(number(request, "keep", 1)), request.query.get("after", "")
    rows, more = await request.app[JOBS].retention.list_ended(keep, after)
    return web.json_response({"jobs": to_json(rows), "more": more})


async def prune(request: web.Request) -> web.Response:
    """Remove the files of ended jobs; running ones, and the newest ended one, stay."""
    names = from_json(tuple[str, ...], (await body(request)).get("jobs", []))
    if len(names) > MOST_PRUNED:
        raise UsageError(f"jobs: {len(names)} are more than {MOST_PRUNED} in one request")
    return web.json_response({"pruned": await request.app[JOBS].retention.prune(names)})


def _version(request: web.Request) -> int:
    text = request.match_info["version"]
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise UsageError(f"version: {text[:40]!r} is no whole number below 10**15")
    return int(text)
