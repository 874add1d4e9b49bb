"""A fleet whose workers are threads of this process: a whole job, with deaths, in a tenth of a second.

Each worker has a real Runtime, real gloo groups and a state of its own; only agent and dispatcher are small and in
memory, and a death is an exception that nothing catches, after which the worker's sockets are shut as the kernel would.
What all threads share, the global random generators, cannot be tested here: see test_random_streams.py. Only one
fleet may run at a time: a group that is aborted shuts every socket of the process that was born as it formed.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from spotfleet.protocol.messages import Assignment, RankInfo, Stage, WorkerOrders, WorkerReport
from spotfleet.train import current, default_group, runtime

LIMIT_S = 60.0
TICK_S = 0.005


class Lost(BaseException):
    """This worker's machine is gone."""


class MemoryControl:
    """What `control.Control` is to a worker, without a socket; all workers of a fleet share one condition."""

    def __init__(self, fleet: ThreadFleet, worker: str) -> None:
        self._fleet, self.cv = fleet, fleet.cv
        place = fleet.provisional or RankInfo(size=max(1, len(fleet.members)))
        self.orders = WorkerOrders(founded=fleet.founded, provisional=place, checkpoint_every_s=0.0)
        self._report = WorkerReport(worker, "job")
        self.on_orders: Callable[[WorkerOrders], None] = lambda orders: None
        self.live: Callable[[], dict[str, Any]] = dict
        self.tick: Callable[[], bool] = lambda: False

    @property
    def report(self) -> WorkerReport:
        return replace(self._report, **self.live())

    def update(self, **fields: Any) -> None:
        with self.cv:
            self._report = replace(self._report, **fields)
            self._fleet.decide()

    def receive(self, **fields: Any) -> None:
        self.orders = replace(self.orders, **fields)
        self.on_orders(self.orders)

    def start(self) -> None:
        pass

    def flush(self, timeout_s: float) -> bool:
        return True

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        pass


@dataclass
class Worker:
    name: str
    runtime: runtime.Runtime
    control: MemoryControl
    fleet: ThreadFleet
    thread: threading.Thread | None = None
    alive: bool = True
    leaving: bool = False
    result: Any = None
    error: BaseException | None = None
    exit: int | None = None  # what it ended with by itself
    notes: list[Any] = field(default_factory=list)  # for the script


class ThreadFleet:
    """`script(worker)` runs on each of `founders` workers, and on spares that fill the places of lost ones."""

    provisional: RankInfo | None = None  # the place that joiners are told

    def __init__(self, script: Callable[[Worker], Any], founders: int, spares: int = 0) -> None:
        self.script, self.founders, self.founded = script, founders, False
        self.cv = threading.Condition(threading.RLock())
        self.workers: dict[str, Worker] = {}
        self.members: tuple[str, ...] = ()
        self.generation = 0
        self.closed = False
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()
        for _ in range(founders):
            self.start()
        self.wait(lambda: self.founded, "the first generation")
        for _ in range(spares):
            self.start()

    def start(self) -> Worker:
        with self.cv:
            name = f"h{len(self.workers)}/0/1"
            made = runtime.Runtime({"SPOTFLEET_WORKER": name, "SPOTFLEET_JOB": "job", "SPOTFLEET_JOB_KEY": "key"})
            made._key = "key"
            worker = Worker(name, made, MemoryControl(self, name), self)
            made.control = worker.control
            self.workers[name] = worker
            worker.thread = threading.Thread(target=self._live, args=(worker,), name=name, daemon=True)
            worker.thread.start()
        return worker

    def _live(self, worker: Worker) -> None:
        here.runtime = worker.runtime
        try:
            worker.result = self.script(worker)
            worker.runtime.shutdown()
        except SystemExit as end:
            worker.exit = end.code
        except Lost:
            pass
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            worker.error = error
        with self.cv:
            worker.alive = False
            groups, worker.runtime.group, worker.runtime.retiring = (
                (worker.runtime.group, worker.runtime.retiring), None, None)
            for group in groups:
                if group is not None:
                    group.abort()
            self.decide()
        for group in groups:
            if group is not None:
                group.retire()

    def _tick(self) -> None:
        while not self.closed:
            with self.cv:
                for worker in self.workers.values():
                    if worker.alive:
                        worker.control.tick()
            time.sleep(TICK_S)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        with self.cv:
            if not self.cv.wait_for(condition, LIMIT_S):
                raise AssertionError(f"not within {LIMIT_S} s: {what}\n{self.story()}")

    def finish(self) -> list[Worker]:
        """Those whose script came to its end, when all have ended."""
        self.wait(lambda: not any(w.alive for w in self.workers.values()), "the end")
        errors = [w.error for w in self.workers.values() if w.error is not None]
        if errors:
            raise errors[0]
        return [w for w in self.workers.values() if w.result is not None]

    def drain(self, name: str) -> None:
        with self.cv:
            self.workers[name].leaving = True
            self.decide()

    def story(self) -> str:
        return "\n".join([f"generation {self.generation}: {self.members}",
                          *(f"{w.name} alive={w.alive} error={w.error!r} {w.control.report} {w.notes}"
                            for w in self.workers.values())])

    def close(self) -> None:
        with self.cv:
            for worker in self.workers.values():
                worker.control.receive(stop=True)
                if worker.runtime.group is not None:
                    worker.runtime.group.abort()
            self.cv.notify_all()
        for worker in self.workers.values():
            worker.thread.join(LIMIT_S)
            worker.runtime.outside.end()  # its hook is torch's, for all threads
        self.closed = True
        self._ticker.join()

    # The dispatcher's part, with `cv` held

    def decide(self) -> None:
        live = {n: w for n, w in self.workers.items() if w.alive}
        reports = {n: w.control._report for n, w in live.items()}
        ended = any(r.stage is Stage.FINISHED for r in reports.values())
        spares = [n for n, r in reports.items() if n not in self.members and r.stage is Stage.READY]
        if not self.founded:
            ready = [n for n, r in reports.items() if r.stage is Stage.INIT]
            if len(ready) == self.founders:
                self._form(tuple(ready), urgent=False)
        elif ended:
            for name, worker in live.items():
                if name not in self.members and not worker.control.orders.stop:
                    worker.control.receive(stop=True)
            if any(n in live and reports[n].failed >= self.generation for n in self.members):
                self._form(tuple(n for n in self.members if n in live), urgent=True)
        elif any(n not in live for n in self.members):
            self._renew([n for n in self.members if n in live], spares, urgent=True)
        elif (any(live[n].leaving for n in self.members)
              and all(reports[n].generation == self.generation for n in self.members)):
            self._renew([n for n in self.members if not live[n].leaving], spares, urgent=False)
        elif any(reports[n].failed >= self.generation for n in self.members):
            self._form(self.members, urgent=True)  # broken with nobody lost
        self.cv.notify_all()

    def _renew(self, kept: list[str], spares: list[str], urgent: bool) -> None:
        """Survivors keep their places; one who is lost is replaced in its own."""
        slots = [n if n in kept else (spares.pop(0) if spares else None) for n in self.members]
        if kept:
            self._form(tuple(n for n in slots if n is not None), urgent)

    def _form(self, members: tuple[str, ...], urgent: bool) -> None:
        self.generation += 1
        out = [n for n in self.members if n not in members and self.workers[n].alive]
        self.members, self.founded = members, True
        store = self.workers[members[0]].control._report.store
        for name in [*members, *out]:
            rank = members.index(name) if name in members else -1
            self.workers[name].control.receive(
                founded=True, stop=self.workers[name].leaving and rank < 0,
                assignment=Assignment(self.generation, rank, members, store, urgent=urgent))
        for worker in self.workers.values():
            if worker.alive and worker.name not in members:
                worker.control.receive(founded=True)


here = threading.local()


def install(monkeypatch: Any) -> None:
    """Each thread that is a worker has a runtime of its own."""
    others = current._find
    monkeypatch.setattr(current, "_find", lambda: here.runtime if hasattr(here, "runtime") else others())
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    monkeypatch.setattr(atexit, "register", lambda function, *args: function)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(runtime, "_warm_up", lambda: None)
    monkeypatch.setattr(default_group, "enter", lambda group, place: None)  # torch has one default group in a process
    monkeypatch.setattr(default_group, "leave", lambda: None)
