"""Coordinator of one elastic run: its workers' reports, Membership, and their orders. It knows nothing of Ray.

    line.py: reports, ends of connections --.
    elastic_job.py: added, ended, leaving --+--> step: membership/desk.py --> changes; orders to the workers
    checkpoints.py: the newest one ---------'

The end of a connection is the first sign of a death, but no proof: the worker counts as silent, and as lost once a
peer's collective breaks, or after `silent_s`. `ended` confirms it.

Threads: those of the server call `_receive` and `_close`; the run's thread calls the rest. `_lock` guards the records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spotfleet.membership import Change, Finished, Formed, Membership, Ordered, Phase, Tuning
from spotfleet.membership.desk import Condition, WorkerRecord, observe, release, view_of, worker_orders
from spotfleet.membership.pace import Pace
from spotfleet.membership.quiet import QuietWatch
from spotfleet.membership.views import Orders
from spotfleet.protocol.messages import Stage, WorkerOrders, WorkerReport
from spotfleet.ray.run.checkpoints import RunCheckpoints
from spotfleet.ray.run.line import ControlServer

JOB = "ray"
REPEAT_S = 1.0


@dataclass(frozen=True)
class Leaving:
    """Reason and time for workers to leave a node: its end, or a request to free it."""

    until: float  # monotonic
    why: str  # "notice" or "drain"


@dataclass(frozen=True)
class RunStatus:
    """State of a run, for people and callbacks."""

    phase: str
    why: str
    generation: int
    members: tuple[str, ...]
    version: int


class Coordinator:
    """One run's workers. `wake` is called when there is something new for `step`."""

    def __init__(self, address: str, key: str, min_workers: int, max_workers: int, wake: Callable[[], None],
                 on_log: Callable[[str, Any], Any], pace: Pace | None = None) -> None:
        self.membership = Membership(JOB, min_workers, max_workers, Tuning(pace=pace or Pace()))
        self.leaving: dict[str, Leaving] = {}  # by host
        self.group: tuple[str, ...] = ()  # newest generation that had members
        self.finished: tuple[str, ...] = ()  # by rank, once training has ended
        self.checkpoints = RunCheckpoints()
        self.resets = 0  # generations after the first that have formed
        self._workers: dict[str, WorkerRecord] = {}
        self._quiet: dict[str, QuietWatch] = {}
        self._sent: dict[str, tuple[WorkerOrders, float]] = {}
        self._lock = threading.RLock()
        self._wake = wake
        self._server = ControlServer(address, key, self._receive, self._close, on_log)
        self.path = self._server.path

    def use(self, checkpoints: RunCheckpoints) -> None:
        """Keep checkpoints, and begin with the newest one that there is. Called before any worker is added."""
        self.checkpoints = checkpoints
        if (found := checkpoints.newest) is not None:  # as if its workers had just been lost
            self.membership.adopt(found.generation, ())

    def add(self, name: str, host: str, local_rank: int) -> None:
        """Expect a worker: it is about to run."""
        with self._lock:
            self._workers[name] = WorkerRecord(name, host, local_rank, local_rank, WorkerReport(name, JOB))
            self._quiet[name] = QuietWatch(time.monotonic())

    def ended(self, name: str) -> None:
        """Record that the worker's function has returned, or that its process is gone."""
        with self._lock:
            if name in self._workers:
                self._workers[name].exited = True

    def report(self, name: str) -> WorkerReport:
        with self._lock:
            return self._workers[name].report if name in self._workers else WorkerReport(name, JOB)

    def wanted(self, name: str) -> bool:
        with self._lock:
            return name not in self._workers or self._workers[name].wanted

    def standing(self) -> RunStatus:
        with self._lock:
            m = self.membership
            return RunStatus(m.phase.value, m.why, m.generation, m.members, max(0, m.version))

    def resize(self, min_workers: int, max_workers: int) -> None:
        with self._lock:
            self.membership.min_workers, self.membership.max_workers = min_workers, max_workers

    def step(self, coming: int) -> list[Change]:
        """Decide with everything known now, and send the orders. `coming`: workers that will be added."""
        now = time.monotonic()
        with self._lock:
            for record in self._workers.values():
                record.quiet_s = self._quiet[record.name].quiet_s(now)
                record.report = self._quiet[record.name].corrected(record.report, now)
            views = [view_of(w, self._condition(w, now), now) for w in self._workers.values()]
            changes = observe(self.membership, self._workers, views, coming, now)
            for change in changes:
                self._note(change)
            live = [w for w in self._workers.values() if not w.ended]
            release(self.membership, live, {w.name for w in live if w.host in self.leaving}, self.checkpoints.version)
            for name in [w.name for w in self._workers.values() if w.ended and w.report.stage is not Stage.FINISHED]:
                del self._workers[name], self._quiet[name]  # Membership has seen the end
            orders = self.membership.orders_of([w.name for w in self._workers.values() if w.wanted and not w.ended])
            left_s = self.membership.leaves_s
        for name, found in orders.items():
            self._send(name, self._worker_orders(found, left_s), now)
        return changes

    def close(self) -> None:
        self._server.close()

    def _worker_orders(self, orders: Orders, left_s: float | None) -> WorkerOrders:
        target = self.checkpoints.target
        if not target:  # a checkpoint would lie on the node that goes
            return replace(worker_orders(orders, 0.0), checkpoint_now=False)
        return replace(worker_orders(orders, target.every_s), checkpoint_url=target.url, checkpoint_keep=target.keep,
                       restore=self.checkpoints.newest if orders.needs_restore else None,
                       seconds_left=float(int(left_s)) if orders.checkpoint_now and left_s is not None else None)

    def _condition(self, worker: WorkerRecord, now: float) -> Condition:
        leaving = self.leaving.get(worker.host)
        if leaving is None:
            return Condition(worker.exited)
        return Condition(worker.exited, max(0.0, leaving.until - now), leaving.why)

    def _note(self, change: Change) -> None:
        match change:
            case Ordered():
                self.group = change.members or self.group
            case Formed():
                self.resets += change.generation > 1
            case Finished():
                self.finished = change.members

    def _send(self, name: str, orders: WorkerOrders, now: float) -> None:
        before, at = self._sent.get(name, (None, 0.0))
        if orders != before or now - at >= REPEAT_S:
            self._sent[name] = orders, now
            self._server.send(name, orders)

    # Threads of the server

    def _receive(self, report: WorkerReport) -> None:
        now = time.monotonic()
        with self._lock:
            record = self._workers.get(report.worker)
            if record is None or record.exited:
                return
            news = record.silent or _news(report) != _news(record.report)
            record.report, record.seen, record.silent, record.last_report_at = report, True, False, now
            self._quiet[report.worker].record(report, now)
            self.checkpoints.take(report)
            if news:
                self._sent.pop(report.worker, None)  # a new connection has no orders yet
        if news:
            self._wake()

    def _close(self, worker: str) -> None:
        with self._lock:
            if worker in self._workers:
                self._workers[worker].silent = True
                self._sent.pop(worker, None)
        self._wake()


def _news(report: WorkerReport) -> WorkerReport:
    """Return the report without the numbers that change at each step."""
    blank = WorkerReport(report.worker, report.job)
    return replace(report, version=0, step_s=0.0, waits=False, fetched=0, pause_s=0.0, outside=min(report.outside, 1),
                   cost=blank.cost)


def is_held_up(phase: Phase) -> bool:
    """Return whether a run in this phase waits for workers."""
    return phase in (Phase.STARTING, Phase.HOLDING)
