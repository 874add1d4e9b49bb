"""Workers that behave: they form generations together, make steps in lockstep, and end. No processes, no tensors.

One `World` stands for all processes and the network between them. `tick` lets 1 step pass. As in the real runtime a
planned change is taken at a step boundary by all members at once, a death breaks the group of the others, and those
that form a generation agree on the newest version that any of them holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotfleet.protocol.messages import (
    Assignment,
    Checkpoint,
    Exit,
    SlotOrder,
    Stage,
    WorkerOrders,
    WorkerReport,
    WorkerState,
)

SETUP = "setup failed: line 2 (`pip install nothing`) exited with code 1\nits last output:\n  no such thing"


BROKEN = "spotfleet.worker.errors.CommBroken: a peer is gone"


@dataclass
class Script:
    """What the user's script does."""

    steps: int = 30
    calls_init: bool = True
    gang: bool = False  # its agent starts it once it has its place, as torchrun does
    outside: str = ""  # "together" or "alone": after init() it trains without elastic.run
    fails: Callable[[FakeWorker], str] = lambda worker: ""  # a traceback, from the moment it should raise
    setup: Callable[[FakeWorker], int] = lambda worker: 0  # which try of its setup fails on its host
    leaves: Callable[[FakeWorker], bool] = lambda worker: False  # from the moment that it leaves with status 0
    tail: int = 0  # ticks that rank 0 needs after training
    hangs: bool = False  # the other ranks' scripts never end after training
    differs: Callable[[FakeWorker], str] = lambda worker: ""  # how its state differs, from the moment it is compared
    wants: Callable[[FakeWorker], int] = lambda worker: 0  # what its resize policy asks for
    resize: str = ""  # what its resize policy says of each change


@dataclass
class FakeWorker:
    order: SlotOrder
    script: Script
    stage: Stage = Stage.STARTING
    generation: int = 0
    failed: int = 0
    version: int = 0
    resumed: int = 0
    repeated: int = 0
    outside: int = 0
    error: str = ""
    diverged: str = ""
    exit: Exit | None = None
    tries: int = 0  # number for a setup that has failed
    checkpoint: Checkpoint | None = None  # a version that it has written to an object store
    damaged: Checkpoint | None = None
    objects: set[str] = field(default_factory=set)  # the store, shared by all: digests of what can be read there
    ticks: int = 0
    tail_ticks: int = 0
    gone: bool = False  # its process has ended, and its agent still sends what it left

    @property
    def name(self) -> str:
        return self.order.worker

    @property
    def assignment(self) -> Assignment | None:
        return self.order.orders.assignment

    def state(self) -> WorkerState:
        report = WorkerReport(
            self.name, self.order.job, self.stage, self.generation, self.failed, self.version, f"store-{self.name}:1",
            0.02, self.repeated, self.resumed, 0.1, error=self.error, blame_host=self.error.startswith("this host's"),
            checkpoint=self.checkpoint, damaged=self.damaged, wanted=self.script.wants(self), resize=self.script.resize,
            setup_tries=self.tries, outside=self.outside, together=self.script.outside == "together",
            diverged=self.diverged, blame_peer=bool(self.diverged) or self.error == BROKEN)
        return WorkerState(report, self.order.slot, 0 if self.tries or self.gone else 1, self.exit)


@dataclass
class World:
    scripts: dict[str, Script] = field(default_factory=dict)  # by the job's name stem
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    history: list[tuple[str, int, tuple[str, ...], int]] = field(default_factory=list)
    """Every generation that was formed: job, number, members by rank, version at its beginning."""

    objects: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)  # names, in the order in which agents were told to start them

    def start(self, order: SlotOrder) -> None:
        self.started.append(order.worker)
        script = self.scripts[order.job.rpartition("-")[0]]
        self.workers[order.worker] = worker = FakeWorker(order, script, objects=self.objects)
        worker.tries = script.setup(worker)

    def tick(self) -> None:
        """Everybody makes one move; a group makes one step."""
        running = [w for w in self.workers.values() if w.exit is None]
        for worker in running:
            worker.ticks += 1
            self._live(worker)
        for job, generation in {(w.order.job, w.generation) for w in running
                                if w.generation and not (w.script.outside or w.script.gang)}:
            self._step(job, generation)
        for worker in running:
            self._enter(worker)

    def kill(self, name: str, exit: Exit | None = None, error: str = "") -> None:
        """End a process: `exit` None means that nobody is there to see it (its host is gone)."""
        worker = self.workers[name]
        worker.exit, worker.error = exit or Exit(-9), error
        if exit is None:
            del self.workers[name]
        if worker.script.outside == "together":
            for other in self._members(worker.order.job, worker.generation):
                other.exit, other.error = Exit(1), BROKEN
        if worker.generation and worker.stage is Stage.READY and not worker.script.gang:
            for other in self._members(worker.order.job, worker.generation):
                other.failed, other.generation = max(other.failed, worker.generation), 0

    def _members(self, job: str, generation: int) -> list[FakeWorker]:
        return [w for w in self.workers.values()
                if w.order.job == job and w.generation == generation and w.exit is None]

    def _live(self, worker: FakeWorker) -> None:
        error = SETUP if worker.tries else worker.script.fails(worker)
        if error:
            return self.kill(worker.name, Exit(1), error)
        if worker.script.leaves(worker):
            return self.kill(worker.name, Exit(0, done=True))
        worker.diverged = worker.script.differs(worker)
        if worker.diverged:
            return self.kill(worker.name, Exit(1), worker.diverged)
        orders: WorkerOrders = worker.order.orders
        if worker.script.gang:
            worker.stage = Stage.READY if worker.ticks > 2 else Stage.STARTING
            if worker.order.gang is not None and orders.assignment is not None and orders.assignment.rank >= 0:
                worker.generation = orders.assignment.generation
        elif not worker.script.calls_init:
            if worker.ticks >= worker.script.steps:
                worker.exit = Exit(0, done=True)
        elif worker.stage is Stage.STARTING and worker.ticks > 2:
            worker.stage = Stage.INIT
        elif worker.stage is Stage.INIT and (orders.founded or orders.assignment):
            if not worker.script.outside:
                worker.stage = Stage.READY
                return None
            worker.generation = orders.assignment.generation if orders.assignment and not orders.founded else 0
            worker.outside += 1
            if worker.outside >= worker.script.steps:
                worker.exit = Exit(0, done=True)
        elif worker.stage is Stage.READY and worker.version == 0 and orders.restore is not None:
            if orders.restore.url and orders.restore.digest not in worker.objects:
                worker.damaged = orders.restore
            else:
                worker.version = orders.restore.version
        elif worker.stage is Stage.FINISHED:
            worker.tail_ticks += 1
            first = worker.assignment is None or worker.assignment.rank == 0
            if worker.tail_ticks > (worker.script.tail if first else 0) and (first or not worker.script.hangs):
                worker.exit = Exit(0, done=True)
        return None

    def _step(self, job: str, generation: int) -> None:
        group = self._members(job, generation)
        if any(w.stage is Stage.FINISHED for w in group):
            return
        newer = [w for w in group if w.assignment and w.assignment.generation > generation]
        for worker in group:
            if newer:
                worker.generation = 0  # the flag travels with the reduction: all leave at the same boundary
                continue
            worker.version += 1
            worker.resumed = generation
            if worker.version >= worker.script.steps:
                worker.stage = Stage.FINISHED

    def _enter(self, worker: FakeWorker) -> None:
        """Form the assigned generation once every member is there."""
        place = worker.assignment
        if worker.script.gang:
            return
        if place is None or place.rank < 0 or worker.stage is not Stage.READY or worker.generation >= place.generation:
            return
        if worker.damaged is not None and worker.damaged == worker.order.orders.restore:
            return  # it waits to be named another one
        members = [self.workers.get(m) for m in place.members]
        there = [m for m in members if m is not None and m.exit is None and m.stage is Stage.READY and m.generation == 0
                 and m.assignment is not None and m.assignment.generation == place.generation]
        if len(there) < len(members):
            return
        version = max(m.version for m in there)
        self.history.append((worker.order.job, place.generation, place.members, version))
        for member in there:
            member.generation, member.version = place.generation, version
