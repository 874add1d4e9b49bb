"""Status of one job. Pure."""

from __future__ import annotations

import re

from spotfleet.dispatcher.jobs import failures
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.protocol.messages import JobStatus, WorkerStatus

VERSION = re.compile(r"\d{1,3}(\.\d{1,3}){1,3}")  # a host reports it: no other text is shown


def _remark(job: ManagedJob) -> str:
    return "" if job.state.ended else job.divergence.remark


def job_status(job: ManagedJob, now: float) -> JobStatus:
    """Build the job's status; `now` is Unix time."""
    record, group, newest = job.record, job.membership, job.checkpoints.newest
    ranks = {name: rank for rank, name in enumerate(group.members)}
    workers = tuple(WorkerStatus(w.name, w.host, ranks.get(w.name, -1), w.report.stage.value, w.report.version,
                                 w.report.nccl if VERSION.fullmatch(w.report.nccl) else "")
                    for w in job.workers.live())
    waits = job.checkpoints.offer().wait if group.needs_restore else ""
    told = "" if job.state.ended else failures.clauses(record.tail)
    full = "its workers get no orders before the dispatcher's disk has room" if job.unsaved else ""
    why = "; ".join(filter(None, (record.why, full, told, waits, _remark(job), job.sizing.why, job.last_copy.why,
                                  job.checkpoints.problem,
                                  job.checkpoints.slow, job.checkpoints.remark, job.logs.remark)))
    ended, spec = job.state.ended, job.spec
    return JobStatus(
        job.id, spec.name, job.state.value, why, group.generation, 0 if ended else len(ranks), record.version,
        job.progress.step_s, job.progress.repeated, spec.min_workers, spec.max_workers,
        newest.version if newest else 0, record.error, () if ended else workers,
        record.age_s(now), "" if ended else job.progress.step_why,
        job.outputs.bytes, job.outputs.age_s(now), recomputed=job.progress.recomputed,
        outside=record.outside, hint=record.hint if ended else job.outside.hint, tail=failures.clauses(record.tail),
        kind=spec.kind_of, restarts=record.restarts, exit_status=record.exit_status,
        folder_age_s=max(0.0, now - record.saved_at) if record.saved_at else None,
        priority=spec.priority, hosts=0 if ended else len(job.workers.hosts()), group=spec.group)
