"""The workers of one job: their names, what their agents last said of them, and how they ended.

A slot holds one process at a time. A worker that should go is taken out of its agent's orders and keeps its slot until
the agent reports no such process, another incarnation of the agent does not know it, or the cloud lists its host as
gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spotfleet.dispatcher.restart import Cause, End, Slot, cause_of
from spotfleet.messages import AgentReport, Exit, WorkerReport, WorkerState

STALL_S = 30.0  # of a checkpoint on its way


@dataclass
class Worker:
    name: str
    host: str
    slot: int
    local_rank: int
    report: WorkerReport
    wanted: bool = True  # in its agent's orders
    seen: bool = False  # its agent has reported a process of this name
    silent: bool = False  # its agent is not connected
    heard_at: float | None = None  # monotonic: its last report, while it is not connected
    exit: Exit | None = None
    cause: Cause | None = None  # set once it has ended
    error: str = ""
    rank: int = -1  # the last one it held
    begun: bool = False  # it is known that its process has started
    told: bool = False  # its end has been judged
    ended_at: float = 0.0  # when it was judged; monotonic
    past: bool = False  # of a run that the job has given up
    evicted: bool = False  # Membership found it in the way of the others
    pid: int = 0
    gone: bool = False  # its process has ended; how is told once its log is here
    stopped: bool = False  # its process stands still
    quiet_s: float = 0.0  # since its version, or whether it waits, last changed, as its agent last said
    fetched: int = 0  # of the checkpoint that it is to restore
    fetched_at: float | None = None  # when more of it had come; monotonic

    @property
    def place(self) -> Slot:
        return (self.host, self.slot)

    @property
    def ended(self) -> bool:
        return self.cause is not None

    def unheard_s(self, now: float) -> float:
        return 0.0 if self.heard_at is None or not self.silent else now - self.heard_at

    def watch_fetch(self, now: float) -> bool:
        """To be called at each look: does the checkpoint that it is to restore still come? STALL_S without a byte, and
        it does not."""
        if self.report.fetched > self.fetched:
            self.fetched_at = now
        self.fetched = self.report.fetched
        return self.fetched_at is not None and now - self.fetched_at < STALL_S and self.report.generation == 0

    @property
    def done(self) -> bool:
        return self.cause is Cause.DONE


class Crew:
    """All workers of a job that may still matter, by name."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.all: dict[str, Worker] = {}
        self._on: dict[str, list[Worker]] = {}  # the same, by host

    def add(self, name: str, local_rank: int) -> Worker:
        host, slot, _ = name.split("/")
        worker = Worker(name, host, int(slot), local_rank, WorkerReport(name, self.job))
        if name in self.all:
            self._on[host].remove(self.all[name])
        self.all[name] = worker
        self._on.setdefault(host, []).append(worker)
        return worker

    def live(self) -> list[Worker]:
        """Those that have not ended as far as anybody knows."""
        return [w for w in self.all.values() if not w.ended]

    def at(self, place: Slot) -> Worker | None:
        """The worker that holds this slot."""
        return next((w for w in self.on(place[0]) if w.slot == place[1] and not w.ended), None)

    def on(self, host: str) -> list[Worker]:
        return self._on.get(host, [])

    def hear(self, report: AgentReport) -> None:
        """Take what an agent says of this job's workers."""
        mine = {w.report.worker: w for w in report.workers if w.report.job == self.job}
        for worker in self.on(report.host):
            worker.silent = False
            state = mine.get(worker.name)
            if state is not None:
                _take(worker, state)
            elif not worker.ended and (worker.seen or not worker.wanted):
                worker.cause = Cause.LOST  # it was there and is not any more: its agent has ended or restarted

    def silence(self, host: str, heard_at: float | None = None) -> None:
        """The host's agent is not connected any more; it reported last at `heard_at`."""
        for worker in self.on(host):
            worker.silent, worker.heard_at = True, heard_at

    def lose(self, host: str) -> None:
        """The cloud lists the host as gone."""
        for worker in self.on(host):
            if not worker.ended:
                worker.cause = Cause.LOST

    def untold(self) -> list[Worker]:
        """Ends that have not been judged yet, in the order of ranks."""
        return sorted((w for w in self.all.values() if w.ended and not w.told), key=lambda w: (w.rank, w.name))

    def forget(self, keep: Callable[[Worker], bool]) -> None:
        """Drop ended workers except those that still matter."""
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


def _take(worker: Worker, state: WorkerState) -> None:
    if worker.ended:
        return
    worker.seen, worker.report, worker.stopped, worker.quiet_s = True, state.report, state.stopped, state.quiet_s
    worker.gone, worker.pid = worker.gone or (worker.pid > 0 and state.pid == 0), state.pid
    if state.exit is not None:
        worker.exit = state.exit
        worker.cause, worker.error = cause_of(state.exit, state.report)
        if not (worker.wanted or worker.done):
            worker.cause, worker.error = Cause.LOST, ""  # it was told to go: nobody's fault


def end_of(worker: Worker, now: float) -> End:
    """Its end, for the restart policy. The slot of an evicted worker is tried again, but later each time."""
    assert worker.cause is not None
    cause = Cause.PEER if worker.evicted and not worker.done else worker.cause
    report = worker.report
    return End(worker.name, worker.place, cause, now, worker.rank, worker.error, report.resumed > 0,
               report.setup_tries, report.setup_sure)


def started(workers: Iterable[Worker]) -> frozenset[str]:
    """Names of those whose process exists or existed."""
    return frozenset(w.name for w in workers if w.seen)
