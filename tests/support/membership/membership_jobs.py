"""One simulated job as its dispatcher sees it: what it knows of each worker, what it orders. Checked as it happens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spotfleet.membership import Change, Finished, Membership, Ordered, Orders, Pace, Phase, Tuning, WorkerView
from spotfleet.membership.desk import Condition, WorkerRecord, observe, release, view_of
from spotfleet.membership.schedule import JobNeed
from spotfleet.protocol.messages import Stage, WorkerReport, WorkerState
from tests.support.membership.membership_workers import Workers

GROUPS = 8  # so many generations are on disk for a restarted dispatcher
BLANK = Orders()
Place = tuple[str, int]  # host, slot
Leaving = tuple[float, str]  # seconds left, why


@dataclass
class Known(WorkerRecord):
    """What the dispatcher knows of one worker."""

    unheard: bool = False  # taken from disk after a restart: it may live

    @property
    def place(self) -> Place:
        return self.host, self.slot


class SimJob:
    """`least` to `most` workers. `disk` outlives the dispatcher's process, what is in `known` and `core` does not."""

    def __init__(self, name: str, least: int, most: int, order: int, rng: random.Random, total_steps: int) -> None:
        self.name, self.order = name, order
        self.least, self.most, self.ceiling = least, most, most
        self.pace = Pace()
        self.world = Workers(rng, total_steps)
        self.core = Membership(name, least, most)
        self.known: dict[str, Known] = {}
        self.disk: list[Ordered] = []
        self.changes: list[Change] = []
        self.reported = 0  # newest generation that any dispatcher was told of
        self.cancelled = self.ended = False
        self.now = 0.0
        self.chosen_at: float | None = None  # the last join or drain, by the clock of the dispatcher's process
        self.restarted = False  # since the last look
        self._orders: dict[str, Orders] | None = None  # as last read

    def _membership(self) -> Membership:
        return Membership(self.name, self.least, self.most, Tuning(pace=self.pace))

    def paced(self, pace: Pace) -> None:
        """Of a job that has not begun."""
        self.pace = pace
        self.core = self._membership()

    def wish(self, most: int) -> None:
        """It asks for another size."""
        self.most = self.core.max_workers = most

    @property
    def hold(self) -> int:
        """Places that it may have: some that it no longer wants, where it lets go of them slowly."""
        running = self.core.phase is Phase.RUNNING
        return max(self.most, self.core.pacer.limit(len(self.core.members), running, self.most))

    @property
    def need(self) -> JobNeed:
        return JobNeed(self.name, self.least, self.hold, self.order)

    @property
    def wants_hosts(self) -> bool:
        return not self.ended and not self.cancelled

    # ---- the dispatcher's process

    def restart(self, reported: Iterable[WorkerState]) -> None:
        """A new process: what is on disk, and what agents report."""
        self.core, self.known, self._orders, self.restarted = self._membership(), {}, None, True
        for state in reported:
            self.add(state.report.worker).seen = True
            self.hear(state)
        group: tuple[str, ...] = ()
        for order in self.disk[-GROUPS:]:
            self.core.adopt(order.generation, order.members)
            group = order.members or group
        for name in group:
            if name not in self.known:
                known = self.add(name)
                known.seen = known.unheard = True

    def add(self, name: str) -> Known:
        host, slot, _ = name.split("/")
        self.known[name] = Known(name, host, int(slot), int(slot), WorkerReport(name, self.name))
        return self.known[name]

    def hear(self, state: WorkerState) -> None:
        known = self.known.get(state.report.worker)
        if known is not None:
            known.report, known.seen, known.unheard = state.report, True, False
            known.stopped, known.quiet_s = state.stopped, state.quiet_s

    def lose(self, gone: Callable[[Known], bool]) -> None:
        """These are confirmed dead."""
        self.known = {n: k for n, k in self.known.items() if not gone(k)}

    def orders(self, host: str) -> dict[str, Orders]:
        """What Membership wants of the host's workers since the last look."""
        if self._orders is None:
            self._orders = self.core.orders_of(self.known)
        said = self._orders
        return {k.name: said.get(k.name, BLANK) for k in self.known.values() if k.place[0] == host and k.wanted}

    def let_all_go(self) -> None:
        for known in self.known.values():
            known.wanted = False

    # ---- one look

    def look(self, now: float, expected: int, silent: Callable[[str], bool],
             leaving: Callable[[str], Leaving | None]) -> None:
        self._orders, self.now = None, now
        if self.restarted and self.disk:
            self.chosen_at = now  # by the new process's clock
        self.restarted = False
        views = [self._view(k, silent, leaving) for k in self.known.values()]
        by_name = {v.worker: v for v in views}
        self.reported = max([self.reported, *(v.generation for v in views)])  # what comes between two looks is not seen
        for change in observe(self.core, self.known, views, expected, now):
            self.changes.append(change)
            match change:
                case Ordered():
                    self._check(change, by_name)
                    self.disk.append(change)
                case Finished():
                    self.ended = True
        if self.ended:
            self.let_all_go()
        else:
            release(self.core, self.known.values(), {v.worker for v in views if v.leaving_s is not None},
                    self.world.kept)

    def _view(self, known: Known, silent: Callable[[str], bool],
              leaving: Callable[[str], Leaving | None]) -> WorkerView:
        known.silent = known.unheard or silent(known.host)
        return view_of(known, Condition(False, *(leaving(known.host) or (None, ""))), self.now)

    def _check(self, order: Ordered, views: dict[str, WorkerView]) -> None:
        members = order.members
        assert order.generation > max([0, *(o.generation for o in self.disk)]), "generations only grow"
        assert len(set(members)) == len(members), "a worker holds two ranks"
        leaving = [w for w in members if views[w].leaving_s is not None]
        assert len(leaving) <= 1, "noticed hosts enter a new generation"
        stays = [w for w in self.world.last_formed.members if w in members and w not in leaving]
        if leaving and self.reported == self.world.last_formed.generation:
            heard = all(self.known[w].report.version == self.world.all[w].version for w in stays)
            assert not heard or all(self.world.all[w].version < 0 for w in stays), "a noticed host enters without need"
        before = next((o for o in reversed(self.disk) if o.members), None)
        held = len(before.members) if before else 0
        most = self.most if self.pace == Pace() else max(self.most, held)
        assert len(members) <= (max(most, 2) if leaving else most), "more than max"
        self._check_pace(order, held, leaving)
        assert all(views[w].answers for w in members), "a silent worker enters"
        finishing = any(w.stage is Stage.FINISHED for w in self.world.all.values())
        assert not members or finishing or len(members) >= self.least, "fewer than min"

    def _check_pace(self, order: Ordered, held: int, leaving: list[str]) -> None:
        """Changes that we choose come slowly, and are small; a death is no way around that. Where nobody trains, all
        begin at once."""
        if self.disk and not self.disk[-1].members:
            held = len(order.members)
        more, carried = len(order.members) - held, 1 if leaving else 0
        if held and order.cause != "resume" and self.pace.max_join:
            assert more <= self.pace.max_join + carried, "too many join at once"
        if order.cause in ("join", "drain") and more > carried and self.pace.every_s and self.chosen_at is not None:
            assert self.now - self.chosen_at >= self.pace.every_s, "too soon after the last change"
        if order.cause in ("join", "drain"):
            self.chosen_at = self.now

    # ---- the truth

    def training(self) -> set[str]:
        return {w.name for w in self.world.alive() if w.acts and w.group and w.group.formed and not w.group.broken}

    def story(self) -> str:
        lines = [f"  {type(c).__name__} {c}" for c in self.changes[-12:]]
        workers = [
            f"  {w.name} {w.stage.value} v{w.version} failed={w.failed} group={w.group and w.group.generation} "
            f"forming={w.forming and w.forming.generation} last={w.last} frozen={w.frozen_s:.1f} "
            f"known={w.name in self.known}"
            for w in self.world.alive()
        ]
        head = f"{self.name} {self.least}..{self.most} {self.core.phase.value}: {self.core.why}"
        return "\n".join([head, *lines, *workers])

