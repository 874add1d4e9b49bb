"""What the ends of a job's workers mean for it, and the beginnings of others: who is blamed, and what is remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotfleet.dispatcher import restart
from spotfleet.dispatcher.restart import Cause, Failed, History
from spotfleet.dispatcher.surroundings import Surroundings
from spotfleet.dispatcher.workers import Crew, Worker, end_of
from spotfleet.fleet.events import SetupFailed


@dataclass(frozen=True)
class Verdict:
    history: History
    done: tuple[str, ...] = ()  # workers whose scripts have run to their ends
    events: tuple[SetupFailed, ...] = ()
    failed: Failed | None = None  # the job fails of it


def judge(job: str, crew: Crew, history: History, group: Callable[[], frozenset[str]],
          around: Surroundings) -> Verdict:
    """Take in all that nobody has judged yet. `group`: whose ends at once would be the script's doing."""
    for worker in crew.live():
        if worker.pid > 0 and not worker.begun:
            worker.begun, history = True, restart.set_up(history)
    done: list[str] = []
    events: list[SetupFailed] = []
    for worker in crew.untold():
        worker.told, worker.ended_at = True, around.now
        if worker.done:
            done.append(worker.name)
        elif worker.cause is Cause.SETUP and _goes(worker, around):
            worker.cause, worker.error = Cause.LOST, ""  # a host that is taken fails at whatever it does
        known = len(history.setups)
        history, failed = restart.ended(history, end_of(worker, around.now), group())
        if len(history.setups) > known:
            events.append(SetupFailed(around.unix, job, worker.host, worker.report.setup_tries, worker.error))
        if failed is not None:
            return Verdict(history, tuple(done), tuple(events), failed)
    return Verdict(history, tuple(done), tuple(events))


def _goes(worker: Worker, around: Surroundings) -> bool:
    leaving = around.leaving(worker.host)
    return leaving is not None and leaving.why == "notice"
