"""Classification of worker exits: the cause, the job's failure history, and whether the job fails.

Status 0 alone is not a script's end: `sys.exit(0)` inside `elastic.run` and a handler of SIGTERM that exits have it,
too. `blame_early` makes such an end the user's fault once other workers show that the script had more to do:

    a worker has called hvd.init()                  its own hvd.init() has to have returned
    a worker is in elastic.run, or has made steps   its own elastic.run has to have returned

While no worker has called hvd.init(), a script may end anywhere. A command may always end before its own hvd.init().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spotfleet.dispatcher.jobs import restart
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.restart import Cause, History, JobFailure
from spotfleet.dispatcher.jobs.workers import JobWorker, JobWorkers, end_of
from spotfleet.fleet.domain.events import SetupFailed
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import Stage

TOLD = 3  # clauses of one line


@dataclass(frozen=True)
class ExitOutcome:
    """Result of classifying a job's new worker exits."""

    history: History
    events: tuple[SetupFailed, ...] = ()
    failed: JobFailure | None = None  # set if the job fails


def classify_exits(job: str, workers: JobWorkers, history: History, group: Callable[[], frozenset[str]],
          context: JobContext, judged: Callable[[JobWorker], bool] = lambda worker: False) -> ExitOutcome:
    """Classify all exits that are not classified yet. `group` returns the workers whose simultaneous exits would be the
    script's fault; ends for which `judged` returns True are another's to judge (`rounds.py`)."""
    for worker in workers.live():
        if worker.pid > 0 and not worker.begun:
            worker.begun, history = True, restart.set_up(history)
    events: list[SetupFailed] = []
    for worker in workers.unclassified():
        worker.classified, worker.ended_at = True, context.now
        if worker.cause is Cause.SETUP and _is_interrupted(worker, context):
            worker.cause, worker.error = Cause.LOST, ""  # a failure on an interrupted host is not the setup's fault
        if judged(worker):
            continue
        known = len(history.setups)
        history, failed = restart.ended(history, end_of(worker, context.now), group())
        if len(history.setups) > known:
            events.append(SetupFailed(context.unix, job, worker.host, worker.report.setup_tries, worker.error))
        if failed is not None:
            return ExitOutcome(history, tuple(events), failed)
    return ExitOutcome(history, tuple(events))


def blame_early(workers: JobWorkers, spec: JobSpec, generation: int, version: int,
                context: JobContext) -> list[JobWorker]:
    """Classify ends with status 0 that came too early as the user's fault; return these workers. `generation` and
    `version` are the job's."""
    present = [w for w in workers.all.values() if not w.past]
    trains = version > 0 or any(w.entered for w in present)
    begun = trains or generation > 0 or any(w.report.stage is not Stage.STARTING for w in present)
    found = []
    for worker in present:
        missing = _missing(worker, spec, trains, begun and (generation == 0 or worker.report.stage is Stage.STARTING))
        if not (worker.done and missing):
            continue
        worker.cause, worker.error, worker.classified = Cause.LOST, "", False
        if worker.wanted and not _is_interrupted(worker, context):
            worker.cause, worker.error = Cause.USER, f"the script left with status 0 before {missing} had returned"
            found.append(worker)
    return found


def _missing(worker: JobWorker, spec: JobSpec, trains: bool, blocks: bool) -> str:
    """Return the call that has not returned in the worker's script and has to; "" if there is none."""
    if worker.returned or (not spec.argv and worker.report.stage is Stage.STARTING):
        return ""
    return "elastic.run" if trains else "hvd.init()" if blocks else ""


def _is_interrupted(worker: JobWorker, context: JobContext) -> bool:
    leaving = context.leaving(worker.host)
    return leaving is not None and leaving.why == "notice"


# ---- after training: failures on ranks other than 0 do not fail the job, so it reports them


def after_training(finished: Sequence[str], workers: dict[str, JobWorker]) -> tuple[str, ...]:
    """Return a clause for each failed script; `finished` are the workers that trained last, by rank. A lost host is no
    failure."""
    ended = [(rank, workers[name]) for rank, name in enumerate(finished) if rank > 0 and name in workers]
    return tuple(_failure(rank, w) for rank, w in ended if w.cause not in (None, Cause.DONE, Cause.LOST))


def _failure(rank: int, worker: JobWorker) -> str:
    if worker.cause is Cause.SIGNAL:
        return f"rank {rank} was {worker.error} after training"
    return f"the script failed on rank {rank} after training: {worker.error.strip().rpartition(chr(10))[2]}"


def cut_off(finished: Sequence[str], rest: Iterable[JobWorker], after_s: float) -> tuple[str, ...]:
    """Return a clause for each script of `rest`, which is ended before its end."""
    return tuple(f"rank {finished.index(w.name)} was ended: its script still ran {after_s:.0f} s after rank 0's"
                 for w in rest)


def clauses(found: Iterable[str]) -> str:
    """Join the first clauses, and count the others."""
    found = tuple(found)
    more = (f"and {len(found) - TOLD} more",) if len(found) > TOLD else ()
    return "; ".join((*found[:TOLD], *more))
