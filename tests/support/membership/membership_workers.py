"""Simulated workers and process groups that behave as the runtime does. The truth, which the dispatcher cannot see."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from spotfleet.membership import Orders
from spotfleet.protocol.messages import Assignment, Stage

BOOT_S, SCRIPT_S, FORM_S, STEP_S, FORM_TIMEOUT_S = 0.4, 0.6, 0.3, 0.4, 20.0


@dataclass
class Worker:
    name: str
    host: str
    stage: Stage = Stage.STARTING
    busy_s: float = BOOT_S  # until it comes to the next stage by itself
    version: int = 0
    failed: int = 0
    group: Group | None = None  # formed and held
    forming: Group | None = None
    waited_s: float = 0.0  # in `forming`
    last: int = 0  # newest generation that it tried to form
    in_init: bool = False
    returned: bool = False  # the training function has returned
    assignment: Assignment | None = None
    orders: Orders = field(default_factory=Orders)
    frozen_s: float = 0.0  # it hangs or stands still: sockets stay open, nothing is done
    stopped: bool = False  # by SIGSTOP, which its agent sees
    quiet_s: float = 0.0  # since it made a step
    resumed: int = 0  # newest generation in which it made one
    dead: bool = False
    read_rank: int = -1  # what its script has read before it trained
    read_size: int = 0

    @property
    def acts(self) -> bool:
        return not self.dead and self.frozen_s <= 0

    def hears(self, orders: Orders) -> None:
        """Orders may come late, twice and out of order: the higher generation counts."""
        new, known = orders.assignment, self.assignment
        if new is not None and (known is None or new.generation >= known.generation):
            self.assignment = new
        self.orders = orders

    def breaks(self) -> None:
        """Its collective failed, or it aborts: the peers see EOF."""
        for group in (self.group, self.forming):
            if group is not None:
                group.broken = True
                self.failed = max(self.failed, group.generation)
                if group is self.forming and group.sending and self.version < group.newest():
                    self.version = -1  # half received
        self.group = self.forming = None

    @property
    def change_waits(self) -> bool:
        held = self.group.generation if self.group else 0
        return self.assignment is not None and self.assignment.generation > held

    def wants(self) -> Assignment | None:
        """The generation that it would form now."""
        ready = self.stage is Stage.READY or (self.stage is Stage.INIT and self.in_init)
        new = self.assignment
        if not ready or self.group or self.forming or new is None or new.rank < 0 or new.generation <= self.last:
            return None
        return new


@dataclass(eq=False)
class Group:
    """One process group: formed by all members or by none."""

    generation: int
    members: tuple[str, ...]
    workers: dict[str, Worker] = field(default_factory=dict)  # who joined
    formed: bool = False
    sending: bool = False
    broken: bool = False
    mute: bool = False  # a member's machine vanished: no EOF ever comes
    busy_s: float = 0.0

    def newest(self) -> int:
        return max([0, *(w.version for w in self.workers.values())])


class Workers:
    """All workers of one job, and their groups."""

    def __init__(self, rng: random.Random, total_steps: int = 10**9) -> None:
        self.rng, self.total_steps = rng, total_steps
        self.all: dict[str, Worker] = {}
        self.groups: dict[int, Group] = {}
        self.cut: set[frozenset[str]] = set()  # pairs of hosts that cannot reach each other
        self.kept = 0  # version of the newest checkpoint
        self.last_formed = Group(0, ())
        self.stepped = 0  # newest generation that made a step
        self.steps = 0  # made by the job, repeated ones too
        self.reads = ""  # what scripts read between init() and elastic.run: "", "rank", "size" or both
        self.script_dies = False  # a collective of the user's, before elastic.run, fails when a founder dies

    def spawn(self, name: str, host: str) -> None:
        self.all[name] = Worker(name, host)

    def alive(self) -> list[Worker]:
        return [w for w in self.all.values() if not w.dead]

    def kill(self, worker: Worker, vanishes: bool = False) -> None:
        """`vanishes`: with its machine, so that no peer sees EOF."""
        for group in (worker.group, worker.forming):
            if group is None:
                continue
            if group.formed and not vanishes:
                self._break_in_a_step(group, worker)
            group.mute = group.mute or vanishes
            group.broken = group.broken or not vanishes
        worker.dead, worker.group, worker.forming = True, None, None

    def _break_in_a_step(self, group: Group, dying: Worker) -> None:
        """Some survivors may have finished the step, or passed the last barrier, before the others saw the death."""
        others = [w for w in group.workers.values() if w is not dying and w.group is group and w.acts]
        if len(others) < len(group.members) - 1 or any(w.stage is not Stage.READY for w in others) or group.broken:
            return
        lucky = [w for w in others if self.rng.random() < 0.3]
        if group.busy_s < STEP_S / 2 or not lucky:
            return
        if all(w.returned for w in group.workers.values()):
            for worker in lucky:
                worker.stage, worker.group = Stage.FINISHED, None
        elif not any(w.returned for w in group.workers.values()):
            self._count_step(group)
            for worker in lucky:
                worker.version += 1

    def advance(self, dt: float) -> None:
        for worker in self.alive():
            worker.quiet_s += dt
            if worker.frozen_s > 0:
                worker.frozen_s -= dt
                worker.stopped = worker.stopped and worker.frozen_s > 0
            elif worker.acts:
                self._live(worker, dt)
        for group in list(self.groups.values()):
            self._advance_group(group, dt)

    def _live(self, worker: Worker, dt: float) -> None:
        worker.busy_s -= dt
        if worker.stage is Stage.STARTING and worker.busy_s <= 0:
            worker.stage, worker.in_init = Stage.INIT, True
        for group in (worker.group, worker.forming):
            if group is not None and group.broken:
                if self.script_dies and worker.stage is Stage.INIT and not worker.in_init:
                    worker.dead = True
                worker.breaks()
        held = worker.group or worker.forming
        new = worker.assignment
        if held and new and new.urgent and new.generation > held.generation:
            worker.breaks()
        place = worker.orders.provisional
        told = worker.orders.founded and place and not worker.forming and not worker.wants()
        if worker.in_init and (worker.group or told):
            worker.in_init, worker.busy_s = False, SCRIPT_S
            if place and not worker.group:
                worker.read_rank = place.rank if "rank" in self.reads else -1
                worker.read_size = place.size if "size" in self.reads else 0
        if worker.stage is Stage.INIT and not worker.in_init and worker.busy_s <= 0:
            worker.stage = Stage.READY
        if worker.forming:
            worker.waited_s += dt
            if worker.waited_s > FORM_TIMEOUT_S:
                worker.breaks()
        elif wanted := worker.wants():
            self._begin(worker, wanted)

    def _begin(self, worker: Worker, wanted: Assignment) -> None:
        group = self.groups.setdefault(wanted.generation, Group(wanted.generation, wanted.members))
        assert group.members == wanted.members, f"two generations bear the number {wanted.generation}"
        assert wanted.members[wanted.rank] == worker.name, "a rank is not its own"
        assert worker.read_rank in (-1, wanted.rank), f"{worker.name} has read another rank"
        assert worker.read_size in (0, wanted.world_size), f"{worker.name} has read another size"
        worker.last, worker.waited_s = wanted.generation, 0.0
        worker.forming = group
        group.workers[worker.name] = worker

    def _advance_group(self, group: Group, dt: float) -> None:
        members = list(group.workers.values())
        if group.broken and not any(group in (w.group, w.forming) for w in members):
            del self.groups[group.generation]
        elif not group.broken and len(members) == len(group.members) and all(w.acts for w in members):
            if not self._connected(members):
                group.broken = group.formed  # a formed one notices, one that forms waits
            elif not group.formed:
                self._synchronise(group, members, dt)
            elif all(w.stage is Stage.READY for w in members):
                self._train(group, members, dt)

    def _connected(self, members: list[Worker]) -> bool:
        hosts = {w.host for w in members}
        return not any(pair <= hosts for pair in self.cut)

    def _synchronise(self, group: Group, members: list[Worker], dt: float) -> None:
        group.sending = True
        group.busy_s += dt
        if group.busy_s < FORM_S:
            return
        newest = group.newest()
        if newest == 0 and any(w.orders.needs_restore for w in members):
            newest = self.kept
        living = max([0, *(w.version for w in self.alive())])
        assert newest >= living - 1, f"version fell from {living} to {newest} while a survivor lives"
        returned = any(w.returned for w in members)
        for worker in members:
            worker.version, worker.group, worker.forming, worker.quiet_s = newest, group, None, 0.0
            worker.returned = returned
            worker.read_rank, worker.read_size = -1, 0
        group.formed, group.busy_s = True, 0.0
        self.last_formed = max(self.last_formed, group, key=lambda g: g.generation)

    def _count_step(self, group: Group) -> None:
        assert group.generation >= self.stepped, f"{group.generation} trains beside {self.stepped}"
        self.stepped = group.generation
        self.steps += 1

    def _train(self, group: Group, members: list[Worker], dt: float) -> None:
        group.busy_s += dt
        if group.busy_s < STEP_S:
            return
        group.busy_s = 0.0
        if all(w.returned for w in members):
            for worker in members:
                worker.stage, worker.group = Stage.FINISHED, None
            return
        self._count_step(group)
        for worker in members:
            worker.version += 1
            worker.quiet_s, worker.resumed = 0.0, group.generation
            worker.returned = worker.version >= self.total_steps
        if members[0].version % 10 == 0:
            self.kept = members[0].version
        if any(w.change_waits for w in members):  # carried by the reduction: all leave after the same step
            for worker in members:
                worker.group = None
            group.broken = True
