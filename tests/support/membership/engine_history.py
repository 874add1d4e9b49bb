"""Random histories of one job: the caller's loop of `membership/desk.py`, real members, and an engine.

    trouble --> HistoryWorker: worker/member.py, without sockets --reports--> records --> desk --orders--> workers
                     '-- HistoryGroup: forms with all or none; a step needs all ranks

Every engine gets the same histories (engine_states.py). Checked at each moment: no step beside a later generation, one
state after each formation, and at most one step lost while a worker lives that holds it. Checked at the end: soon after
the trouble all workers train, and their count is the number of all steps less those that were lost.

`python -m tests.support.membership.engine_history SEED [COUNT]` replays them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spotfleet.membership import Membership, Ordered, Phase
from spotfleet.membership.desk import Condition, WorkerRecord, observe, release, view_of, worker_orders
from spotfleet.protocol.messages import Assignment, Stage, WorkerOrders, WorkerReport
from spotfleet.worker.member import Member
from tests.support.membership.engine_states import ENGINES, Engine, HeldState

DT, BOOT_S, SCRIPT_S, FORM_S, STEP_S = 0.1, 0.5, 0.3, 0.3, 0.3
SILENT_S = 3.0  # the caller replaces a worker that it has not reached for this time
CALM_S = 240.0


class HistoryLine:
    """The worker's end of its connection: its report, and the orders that have arrived."""

    def __init__(self, name: str) -> None:
        self.report, self.orders, self.cv = WorkerReport(name, "job"), WorkerOrders(), threading.Condition()

    def update(self, **fields: Any) -> None:
        self.report = replace(self.report, **fields)

    def flush(self, limit_s: float) -> bool:
        return True


@dataclass(eq=False)
class HistoryWorld:
    """One worker's end of a generation's group."""

    generation: int
    members: tuple[str, ...]
    forming: bool = True
    aborted: bool = False
    change_waits: bool = False
    listens: str = ""
    on_unreached: Callable[[tuple[str, ...]], None] = lambda peers: None

    def abort(self) -> None:
        self.aborted = True

    def retire(self) -> threading.Thread:
        return threading.Thread()


class HistoryWorker:
    """One worker: a real Member, and the state that it trains."""

    def __init__(self, name: str) -> None:
        self.name, self.host = name, name.partition("/")[0]
        self.state, self.busy_s = HeldState(), BOOT_S
        self.dead = self.vanished = False
        self.frozen_s = 0.0  # stopped: it neither trains nor answers
        self.inbox: deque[tuple[float, WorkerOrders]] = deque()
        self.ever_moved_at = 0.0
        self.member: Member[HistoryWorld] = Member(self._make_world, {"SPOTFLEET_WORKER": name, "SPOTFLEET_JOB": "job"})
        self.line = HistoryLine(name)
        self.member.control, self.member.initialized = self.line, True  # type: ignore[assignment]

    def _make_world(self, assignment: Assignment, address: str) -> HistoryWorld:
        return HistoryWorld(assignment.generation, assignment.members)

    @property
    def acts(self) -> bool:
        return not self.dead and self.frozen_s <= 0

    @property
    def group(self) -> HistoryWorld | None:
        return self.member.group

    def obey(self, now: float) -> None:
        """Take the orders that have arrived, as the control thread does."""
        while self.inbox and self.inbox[0][0] <= now:
            self.line.orders = self.inbox.popleft()[1]
            self.member._on_orders(self.line.orders)

    def advance(self) -> None:
        """Boot; come to init(); take a place in a new generation where one is offered."""
        report = self.line.report
        self.busy_s = max(0.0, self.busy_s - DT)
        if self.busy_s > 0:
            return
        if report.stage is Stage.STARTING:
            self.line.update(stage=Stage.INIT, store=f"{self.name}:1")
        elif self.group is None and self.member.is_offered():
            self.member.enter_generation(unless_founded=report.stage is Stage.INIT)
        elif report.stage is Stage.INIT and (self.member._is_joiner() or (self.group and not self.group.forming)):
            self.line.update(stage=Stage.READY)

    def fails(self) -> None:
        """Its collective broke: what `Runtime._fail` does."""
        assert self.group is not None
        self.member.on_broken(self.group.generation)
        self.member.drop_group()

    def leaves_as_planned(self) -> None:
        """What `Runtime._leave_group` does."""
        self.member.retire_old()
        self.member.retiring, self.member.group = self.member.group, None
        self.line.update(generation=0)


@dataclass
class Contact:
    """Knowledge of the caller about one worker, besides its reports."""

    silent_until: float = 0.0
    ended_at: float | None = None  # from then on its end is confirmed
    leaves_at: float | None = None
    why: str = ""


@dataclass
class Progress:
    """All that has happened to one generation's group."""

    busy_s: float = 0.0
    broken: bool = False


class EngineSim:
    """One job. `now` is the caller's clock and that of the world."""

    def __init__(self, engine: Engine, rng: random.Random, least: int, most: int) -> None:
        self.engine, self.rng, self.least, self.most = engine, rng, least, most
        self.now, self.numbers = 0.0, 0
        self.steps = self.best = self.lost = 0  # made; version of the newest state; steps that were made and lost
        self.core = Membership("job", least, most)
        self.workers: dict[str, HistoryWorker] = {}
        self.records: dict[str, WorkerRecord] = {}
        self.contacts: dict[str, Contact] = {}
        self.groups: dict[int, Progress] = {}
        self.stepped = 0  # newest generation that has made a step
        self.delay_s = 0.0
        self.changes: list[Any] = []

    # What happens

    def living(self) -> list[HistoryWorker]:
        return [w for w in self.workers.values() if not w.dead]

    def kill(self, worker: HistoryWorker, vanishes: bool = False, confirmed_after_s: float = 0.3) -> None:
        worker.dead, worker.vanished = True, vanishes
        self.contacts[worker.name].ended_at = self.now + confirmed_after_s

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / DT)):
            self.tick()

    def tick(self) -> None:
        self.now += DT
        for worker in self.living():
            worker.frozen_s = max(0.0, worker.frozen_s - DT)
            if worker.acts:
                worker.obey(self.now)
                worker.advance()
        for generation in sorted({w.group.generation for w in self.living() if w.group is not None}):
            self._group(generation)
        self._decide()

    # Groups

    def _group(self, generation: int) -> None:
        inside = [w for w in self.living() if w.group is not None and w.group.generation == generation]
        world, progress = inside[0].group, self.groups.setdefault(generation, Progress())
        assert world is not None
        lost = [w for n in world.members if (w := self.workers[n]) not in inside
                and (not w.dead or not w.vanished) and (w.dead or w.member.generation >= generation)]
        aborted = any(w.group.aborted for w in inside if w.group)
        if progress.broken or lost or aborted:
            self._breaks(progress, inside)
        elif len(inside) == len(world.members) and all(w.acts for w in inside):
            progress.busy_s += DT
            if world.forming:
                if progress.busy_s >= FORM_S:
                    self._form(inside, generation)
                    progress.busy_s = 0.0
            elif progress.busy_s >= STEP_S and all(w.line.report.stage is Stage.READY for w in inside):
                progress.busy_s = 0.0
                self._step(inside, generation)

    def _breaks(self, progress: Progress, inside: list[HistoryWorker]) -> None:
        """A member is lost in the middle of a step, perhaps: some ranks have applied it, others have not."""
        formed = [w for w in inside if w.group and not w.group.forming]
        if not progress.broken and formed and progress.busy_s >= STEP_S / 2 and self.rng.random() < 0.5:
            ahead = [w for w in formed if w.acts and self.rng.random() < 0.5]
            self._apply(ahead, formed[0].group.generation)  # type: ignore[union-attr]
        progress.broken = True
        for worker in inside:
            if worker.acts:
                worker.fails()

    def _form(self, inside: list[HistoryWorker], generation: int) -> None:
        order = sorted(inside, key=lambda w: w.member.place.rank)
        assert [w.member.place.rank for w in order] == list(range(len(order))), "ranks are not 0, 1, 2, ..."
        newest = max(w.state.version for w in order)
        alive = max([0, *(self._known(w) for w in self.living())])
        self.lost, self.best = self.lost + self.best - newest, newest
        self.engine.hand_over([w.state for w in order])
        found = {(w.state.version, w.state.step) for w in order}
        assert len(found) == 1, f"generation {generation} begins with {found}"
        assert order[0].state.version == newest >= alive - 1, f"version {alive} falls to {order[0].state.version}"
        for worker in order:
            assert worker.group is not None
            worker.group.forming = False
            worker.member.retire_old()
            worker.line.update(generation=generation, version=worker.state.version)
            worker.busy_s = SCRIPT_S if worker.line.report.stage is Stage.INIT else 0.0

    def _known(self, worker: HistoryWorker) -> int:
        """Return the newest version that the caller can know of: not the later steps of a silent worker."""
        record = self.records.get(worker.name)
        return record.report.version if record is not None and record.silent else worker.state.version

    def _step(self, inside: list[HistoryWorker], generation: int) -> None:
        assert generation >= self.stepped, f"generation {generation} makes a step beside {self.stepped}"
        self.stepped = generation
        self._apply(inside, generation)
        if any(w.group.change_waits for w in inside if w.group):  # carried by the reduction: all leave after this step
            for worker in inside:
                worker.leaves_as_planned()

    def _apply(self, workers: list[HistoryWorker], generation: int) -> None:
        if not workers:
            return
        before = {(w.state.step, w.state.version) for w in workers}
        assert len(before) == 1, f"ranks of generation {generation} hold {before}"
        self.steps += 1
        (_, version), = before
        self.best = max(self.best, version + 1)
        for worker in workers:
            worker.state.version, worker.state.step, worker.state.made_in = version + 1, self.steps, generation
            worker.line.update(version=version + 1, resumed=generation)
            worker.ever_moved_at = self.now

    # The caller: what ray/run/coordinator.py does, with this clock

    def _decide(self) -> None:
        self._staff()
        for name, record in self.records.items():
            contact, worker = self.contacts[name], self.workers[name]
            record.exited = contact.ended_at is not None and self.now >= contact.ended_at
            record.silent = worker.dead or self.now < contact.silent_until
            if not record.silent and worker.acts:
                record.report, record.seen, record.last_report_at = worker.line.report, True, self.now
            held = record.report.generation > 0
            record.quiet_s = self.now - worker.ever_moved_at if held else 0.0
            record.report = replace(record.report, waits=held and worker.acts)
        views = [view_of(r, self._condition(n), self.now) for n, r in self.records.items()]
        found = observe(self.core, self.records, views, 0, self.now)
        self.changes += found
        for change in found:
            if isinstance(change, Ordered):
                names = change.members
                assert len(set(names)) == len(names) and not any(self.records[n].exited for n in names), change
                assert not names or len(names) >= self.least, "fewer than min"
        live = [r for r in self.records.values() if not r.exited]
        release(self.core, live, {r.name for r in live if self.contacts[r.name].leaves_at is not None}, 0)
        for name in [n for n, r in self.records.items() if r.exited]:
            del self.records[name]
        for name, orders in self.core.orders_of([r.name for r in live if r.wanted]).items():
            if not self.records[name].silent:
                self.workers[name].inbox.append((self.now + self.delay_s * self.rng.random(), worker_orders(orders, 0)))
        for record in live:
            if not record.wanted and not self.workers[record.name].dead:
                self._end(self.workers[record.name], record.evicted)

    def _end(self, worker: HistoryWorker, evicted: bool) -> None:
        """End a worker that is wanted no more.

        A step of which some ranks were not sure is void once others have formed without it, and unknown where the
        worker fell silent before it reported the step: `_form` counts both as lost, one step at most.
        """
        others = [w for w in self.living() if w is not worker]
        held_elsewhere = worker.state.version <= max([0, *(w.state.version for w in others)])
        void = any(w.line.report.generation > worker.state.made_in for w in others)
        unknown = self.records[worker.name].report.version < worker.state.version
        assert evicted or held_elsewhere or void or unknown, f"{worker.name} is ended with the only newest state"
        self.kill(worker)

    def _condition(self, name: str) -> Condition:
        contact, exited = self.contacts[name], self.records[name].exited
        if contact.leaves_at is None:
            return Condition(exited)
        return Condition(exited, max(0.0, contact.leaves_at - self.now), contact.why)

    def _staff(self) -> None:
        """Replace workers that are lost or leave, and let the surplus go."""
        for name, contact in self.contacts.items():
            if contact.leaves_at is not None and self.now >= contact.leaves_at and not self.workers[name].dead:
                self.kill(self.workers[name], vanishes=True, confirmed_after_s=1.0)
        stay = [n for n, r in self.records.items() if r.wanted and not self.workers[n].dead
                and self.contacts[n].leaves_at is None and r.silent_for_s(self.now) < SILENT_S]
        for name in [n for n in stay if n not in self.core.members][:max(0, len(stay) - self.most)]:
            self.records[name].wanted = self.workers[name].state.version > 0
        for _ in range(self.most - len(stay)):
            self.numbers += 1
            name = f"h{self.numbers}/0/{self.numbers}"
            self.workers[name], self.contacts[name] = HistoryWorker(name), Contact()
            self.records[name] = WorkerRecord(name, f"h{self.numbers}", 0, 0, WorkerReport(name, "job"))

    # The end

    def is_whole(self) -> bool:
        training = {w.name for w in self.living() if w.acts and w.group and not w.group.forming and not w.group.aborted}
        return (self.core.phase is Phase.RUNNING and len(training) == self.most
                and training == set(self.core.members))

    def calm(self) -> None:
        """End all trouble; every job must train on all its workers soon, and go on."""
        self.delay_s = 0.0
        for worker in self.living():
            worker.frozen_s = 0.0
            self.contacts[worker.name].silent_until = 0.0
        self._within(self.is_whole, "not whole")
        before = self.steps
        self._within(lambda: self.steps > before + 3, "no steps")
        newest = max(w.state.version for w in self.living())
        assert self.steps == newest + self.lost, f"{self.steps} steps, {self.lost} lost, and version {newest}"

    def _within(self, holds: Callable[[], bool], what: str) -> None:
        end = self.now + CALM_S
        while not holds():
            assert self.now < end, f"{what} within {CALM_S:g} s"
            self.tick()

    def story(self) -> str:
        workers = [f"  {w.name} {w.line.report.stage.value} v{w.state.version} group={w.group} "
                   f"report={w.line.report.generation} failed={w.line.report.failed} frozen={w.frozen_s:.1f} "
                   f"known={w.name in self.records}" for w in self.living()]
        return "\n".join([f"at {self.now:.1f}: {self.core.phase.value}: {self.core.why}",
                          *(f"  {c}" for c in self.changes[-10:]), *workers])


KINDS = ("kill", "kill", "vanish", "silent", "part", "freeze", "notice", "drain", "resize", "late", "two", "last",
         "all")


def trouble(sim: EngineSim, rng: random.Random) -> None:
    living = sim.living()
    if not living:
        return
    worker = rng.choice(living)
    contact = sim.contacts[worker.name]
    match rng.choice(KINDS):
        case "kill":
            sim.kill(worker)
        case "vanish":
            sim.kill(worker, vanishes=True, confirmed_after_s=rng.choice([0.5, 3.0, 12.0]))
        case "silent":
            contact.silent_until = sim.now + rng.choice([0.5, 2.0, 6.0])
        case "part":  # the caller alone loses all of them; they train on
            for one in living:
                sim.contacts[one.name].silent_until = sim.now + rng.choice([2.0, 8.0])
        case "last":
            for one in living:
                if one is not worker:
                    sim.kill(one)
            contact.leaves_at, contact.why = sim.now + 30.0, "drain"
        case "freeze":
            worker.frozen_s = rng.choice([0.3, 2.0, 8.0, 60.0])
        case "notice" | "drain" as why:
            contact.leaves_at = contact.leaves_at or sim.now + rng.choice([2.0, 6.0, 30.0])
            contact.why = why
        case "resize":
            sim.most = rng.randint(sim.least, 5)
            sim.core.max_workers = sim.most
        case "late":
            sim.delay_s = rng.choice([0.0, 0.3, 1.0])
        case "two":
            for one in rng.sample(living, min(2, len(living))):
                sim.kill(one)
        case "all":
            for one in living if rng.random() < 0.3 else ():
                sim.kill(one)


def play(engine: str, seed: int) -> EngineSim:
    """Play one history on one engine. AssertionError, with its story, where it goes wrong."""
    rng = random.Random(seed)
    least = rng.randint(1, 2)
    sim = EngineSim(ENGINES[engine], random.Random(seed), least, rng.randint(least, 4))
    try:
        sim.run(rng.choice([0.0, 1.0, 4.0, 8.0]))
        for _ in range(rng.randint(1, 10)):
            trouble(sim, rng)
            sim.run(rng.choice([0.0, 0.1, 0.4, 1.0, 3.0, 8.0, 20.0]))
        sim.calm()
    except AssertionError as wrong:
        raise AssertionError(f"seed {seed}, {engine}: {wrong}\n{sim.story()}") from wrong
    return sim


def history(seed: int) -> None:
    """Play one history on each engine: all make the same decisions and the same steps."""
    ends = {name: play(name, seed) for name in ENGINES}
    stories = {(sim.steps, len(sim.changes), sim.core.generation) for sim in ends.values()}
    assert len(stories) == 1, f"seed {seed}: the engines part: {stories}"


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for number in range(first, first + count):
        history(number)
