"""The caller's side of Membership: reports become views, and decisions become orders. Pure.

    reports --> WorkerRecord --> view_of --> observe --> changes: the caller writes them down
                     ^                          |
                     '-- evicted, release: `wanted` is cleared, and the caller ends the worker
    worker_orders --> orders: the caller sends them, to wanted workers only

Every caller (the dispatcher, the executor on Ray) runs this loop, and so do the random histories of the tests. The
caller adds its own knowledge: which processes have ended, which hosts leave, how many workers it starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spotfleet.membership.machine import Membership
from spotfleet.membership.views import Change, Evicted, Orders, Phase, WorkerView
from spotfleet.protocol.messages import Stage, WorkerOrders, WorkerReport

STALL_S = 30.0  # a checkpoint download without a new byte for this time has stalled


@dataclass
class WorkerRecord:
    """Facts about one worker, from its reports and its host."""

    name: str
    host: str
    slot: int
    local_rank: int
    report: WorkerReport
    wanted: bool = True  # it should exist, and gets orders
    seen: bool = False  # a process of this name has been reported
    silent: bool = False  # no connection to it, or to its agent
    last_report_at: float | None = None  # monotonic: its last report, while it is silent
    evicted: bool = False  # Membership excluded it because it blocked the others
    stopped: bool = False  # its process is stopped
    quiet_s: float = 0.0  # time since `version` or `waits` last changed, by its last report
    fetched: int = 0  # bytes of the checkpoint that it is to restore
    fetched_at: float | None = None  # monotonic: when `fetched` last grew
    exited: bool = False  # its end is confirmed

    @property
    def ended(self) -> bool:
        return self.exited

    def silent_for_s(self, now: float) -> float:
        return 0.0 if self.last_report_at is None or not self.silent else now - self.last_report_at

    def watch_fetch(self, now: float) -> bool:
        """Return whether the checkpoint that it is to restore is still arriving: some byte came in the last STALL_S.
        Called at each step."""
        if self.report.fetched > self.fetched:
            self.fetched_at = now
        self.fetched = self.report.fetched
        return self.fetched_at is not None and now - self.fetched_at < STALL_S and self.report.generation == 0


@dataclass(frozen=True)
class Condition:
    """Facts of a worker that its reports do not contain."""

    exited: bool = False  # its end is confirmed
    leaving_s: float | None = None  # seconds until its host goes, or must be free; None: it stays
    leaving_why: str = ""  # "notice" or "drain"


def view_of(worker: WorkerRecord, condition: Condition, now: float, stage: Stage | None = None,
            silent: bool | None = None) -> WorkerView:
    """Return Membership's view of a worker. `stage` and `silent` replace those of the record."""
    report = worker.report
    return WorkerView(
        worker.name, worker.host, worker.local_rank, report.stage if stage is None else stage, report.generation,
        report.failed, report.version, report.store, condition.leaving_s, condition.leaving_why,
        worker.silent if silent is None else silent, worker.silent_for_s(now), condition.exited, worker.stopped,
        worker.quiet_s, report.waits, report.step_s, report.resumed, worker.watch_fetch(now), report.unreached,
        report.backend, -1 if report.read_rank is None else report.read_rank, report.read_size)


def observe(membership: Membership, workers: Mapping[str, WorkerRecord], views: Sequence[WorkerView], coming: int,
            now: float) -> list[Change]:
    """Pass `views` to Membership; return its decisions. Evicted workers are wanted no more.

    `coming`: workers that are about to be started; those of `views` that are starting are added.
    """
    known = [workers[v.worker] for v in views if v.worker in workers]
    young = sum(w.wanted and not w.ended and w.report.stage is Stage.STARTING for w in known)
    changes = membership.observe(views, coming + young, now)
    for change in changes:
        if isinstance(change, Evicted):
            for name in change.workers:
                if name in workers:
                    workers[name].wanted, workers[name].evicted = False, True
    return changes


def release(membership: Membership, workers: Iterable[WorkerRecord], leaving: Collection[str], kept: int) -> None:
    """Clear `wanted` of the workers in `leaving` that are needed no more, as members or for their state.

    `kept` is the version of the newest checkpoint.
    """
    live = list(workers)
    for worker in live:
        if worker.name not in leaving or worker.name in membership.members:
            continue
        held = worker.report.generation
        out = held == 0 or (membership.phase is Phase.RUNNING and held != membership.generation)
        if out and not _holds_alone(worker, live, leaving, kept):
            worker.wanted = False


def _holds_alone(worker: WorkerRecord, live: Sequence[WorkerRecord], leaving: Collection[str], kept: int) -> bool:
    """Return whether the newest state would be lost with this worker."""
    version = worker.report.version
    if version <= max(0, kept):
        return False
    return not any(o.report.version >= version and o.name not in leaving and not (o.silent or o.stopped)
                   for o in live if o is not worker)


def worker_orders(orders: Orders, every_s: float) -> WorkerOrders:
    """Return a worker's orders by Membership; callers that keep checkpoints add theirs. `every_s` 0: none by timer."""
    return WorkerOrders(orders.assignment, orders.founded, orders.provisional, every_s, orders.checkpoint_now,
                        stands_in=orders.stands_in, backend=orders.backend)
