"""Workers of one job: their names, their agents' last reports, and their ends.

A slot holds one process at a time. A worker that should end is removed from its agent's orders. It keeps its slot until
the agent reports no such process, another incarnation of the agent does not know it, or the cloud lists its host as
gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spotfleet.dispatcher.jobs.restart import Cause, End, Slot, cause_of
from spotfleet.membership.desk import WorkerRecord
from spotfleet.protocol.messages import AgentReport, Exit, Stage, WorkerReport, WorkerState


@dataclass
class JobWorker(WorkerRecord):
    """State of one worker."""

    exit: Exit | None = None
    cause: Cause | None = None  # set once it has ended
    error: str = ""
    rank: int = -1  # the last rank it held
    begun: bool = False  # its process is known to have started
    classified: bool = False  # its end has been classified
    ended_at: float = 0.0  # monotonic: when its end was classified
    past: bool = False  # belongs to a run that the job has abandoned
    pid: int = 0
    gone: bool = False  # its process has ended; `exit` follows once its log is here
    gone_at: float | None = None  # monotonic: when a step first saw `gone`
    recorded: bool = False  # the record of an earlier dispatcher has it as one whose `elastic.run` had returned

    @property
    def place(self) -> Slot:
        return (self.host, self.slot)

    @property
    def ended(self) -> bool:
        return self.cause is not None

    @property
    def entered(self) -> bool:
        """Whether its script has entered `elastic.run`."""
        return self.report.stage in (Stage.READY, Stage.FINISHED) or self.report.version > 0

    @property
    def done(self) -> bool:
        return self.cause is Cause.DONE

    @property
    def returned(self) -> bool:
        """Whether `elastic.run` has returned in its script."""
        return self.recorded or self.report.stage is Stage.FINISHED


class JobWorkers:
    """Workers of a job that may still matter, by name."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.all: dict[str, JobWorker] = {}
        self.named: set[str] = set()  # all that ever were in `all`
        self._on: dict[str, list[JobWorker]] = {}  # the same, by host

    def add(self, name: str, local_rank: int) -> JobWorker:
        host, slot, _ = name.split("/")
        worker = JobWorker(name, host, int(slot), local_rank, WorkerReport(name, self.job))
        if name in self.all:
            self._on[host].remove(self.all[name])
        self.all[name] = worker
        self.named.add(name)
        self._on.setdefault(host, []).append(worker)
        return worker

    def live(self) -> list[JobWorker]:
        """Return the workers that are not known to have ended."""
        return [w for w in self.all.values() if not w.ended]

    def at(self, place: Slot) -> JobWorker | None:
        """Return the worker that holds this slot."""
        return next((w for w in self.on(place[0]) if w.slot == place[1] and not w.ended), None)

    def on(self, host: str) -> list[JobWorker]:
        return self._on.get(host, [])

    def receive(self, report: AgentReport) -> None:
        """Process an agent's report about this job's workers."""
        states = {w.report.worker: w for w in report.workers if w.report.job == self.job}
        for worker in self.on(report.host):
            worker.silent = False
            state = states.get(worker.name)
            if state is not None:
                _take(worker, state)
            elif not worker.ended and (worker.seen or not worker.wanted):
                worker.cause = Cause.LOST  # it disappeared: its agent has ended or restarted

    def mark_silent(self, host: str, last_report_at: float | None = None) -> None:
        """Record that the host's agent disconnected; its last report came at `last_report_at`."""
        for worker in self.on(host):
            worker.silent, worker.last_report_at = True, last_report_at

    def lose(self, host: str) -> None:
        """Record that the host and its workers are lost."""
        for worker in self.on(host):
            if not worker.ended:
                worker.cause = Cause.LOST

    def unclassified(self) -> list[JobWorker]:
        """Return ended workers that are not classified yet, in the order of ranks."""
        return sorted((w for w in self.all.values() if w.ended and not w.classified), key=lambda w: (w.rank, w.name))

    def forget(self, keep: Callable[[JobWorker], bool]) -> None:
        """Drop ended workers except those that `keep` accepts."""
        kept = {n: w for n, w in self.all.items() if not w.ended or keep(w)}
        for worker in (w for n, w in self.all.items() if n not in kept):
            self._on[worker.host].remove(worker)
            if not self._on[worker.host]:
                del self._on[worker.host]
        self.all = kept

    def hosts(self) -> set[str]:
        return {w.host for w in self.live()}

    def version(self) -> int:
        return max((w.report.version for w in self.all.values()), default=0)


def _take(worker: JobWorker, state: WorkerState) -> None:
    if worker.ended:
        return
    worker.seen, worker.report, worker.stopped, worker.quiet_s = True, state.report, state.stopped, state.quiet_s
    worker.gone, worker.pid = worker.gone or (worker.pid > 0 and state.pid == 0), state.pid
    if state.exit is not None:
        worker.exit = state.exit
        worker.cause, worker.error = cause_of(state.exit, state.report)
        if not (worker.wanted or worker.done):
            worker.cause, worker.error = Cause.LOST, ""  # it was ordered to end: no fault


def end_of(worker: JobWorker, now: float) -> End:
    """Return the worker's end for the restart policy. The slot of an evicted worker restarts with a growing delay."""
    assert worker.cause is not None
    cause = Cause.PEER if worker.evicted and not worker.done else worker.cause
    report = worker.report
    return End(worker.name, worker.place, cause, now, worker.rank, worker.error, report.resumed > 0,
               report.setup_tries, report.setup_sure)


def started(workers: Iterable[JobWorker]) -> frozenset[str]:
    """Return the names of workers whose process exists or existed."""
    return frozenset(w.name for w in workers if w.seen)
