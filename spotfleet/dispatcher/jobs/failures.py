"""Classification of worker exits: the cause, the job's failure history, and whether the job fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotfleet.dispatcher.jobs import restart
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.restart import Cause, History, JobFailure
from spotfleet.dispatcher.jobs.workers import JobWorker, JobWorkers, end_of
from spotfleet.fleet.domain.events import SetupFailed


@dataclass(frozen=True)
class ExitOutcome:
    """Result of classifying a job's new worker exits."""

    history: History
    done: tuple[str, ...] = ()  # workers whose scripts ran to their ends
    events: tuple[SetupFailed, ...] = ()
    failed: JobFailure | None = None  # set if the job fails


def classify_exits(job: str, workers: JobWorkers, history: History, group: Callable[[], frozenset[str]],
          context: JobContext) -> ExitOutcome:
    """Classify all exits that are not classified yet. `group` returns the workers whose simultaneous exits would be the
    script's fault."""
    for worker in workers.live():
        if worker.pid > 0 and not worker.begun:
            worker.begun, history = True, restart.set_up(history)
    done: list[str] = []
    events: list[SetupFailed] = []
    for worker in workers.unclassified():
        worker.classified, worker.ended_at = True, context.now
        if worker.done:
            done.append(worker.name)
        elif worker.cause is Cause.SETUP and _is_interrupted(worker, context):
            worker.cause, worker.error = Cause.LOST, ""  # a failure on an interrupted host is not the setup's fault
        known = len(history.setups)
        history, failed = restart.ended(history, end_of(worker, context.now), group())
        if len(history.setups) > known:
            events.append(SetupFailed(context.unix, job, worker.host, worker.report.setup_tries, worker.error))
        if failed is not None:
            return ExitOutcome(history, tuple(done), tuple(events), failed)
    return ExitOutcome(history, tuple(done), tuple(events))


def _is_interrupted(worker: JobWorker, context: JobContext) -> bool:
    leaving = context.leaving(worker.host)
    return leaving is not None and leaving.why == "notice"
