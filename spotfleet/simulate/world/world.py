"""Simulated fleet on one stretch of records, under a virtual clock: the product's own reconciler, planner and policy.

This is the loop of a dispatcher without its waiting. It jumps to the next instant at which something can change (a host
gets a notice, is taken or becomes ready; a refused pool may be retried; the policy is due; the work is done) and runs
`fleet.reconcile.tick` there, on a ledger in memory and a `simulate.cloud.Cloud`. `tests/simulate` compares it with a
dispatcher's loop that ticks every second on the local cloud.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.actions import Action, Drain, Launch, Observed, Terminate, Wait, Wanted
from spotfleet.fleet.domain.events import (
    GenerationFormed,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    PolicyDecided,
)
from spotfleet.fleet.domain.state import FleetState, cooling_until
from spotfleet.fleet.memory_ledger import MemoryLedger
from spotfleet.fleet.planner.plan import RETRY_S
from spotfleet.fleet.policy.mix import apply_choice
from spotfleet.fleet.policy.values import MarketTarget
from spotfleet.membership.views import Tuning
from spotfleet.model import HostState, JobState, Need, Nodes, Notice, Offer, PolicySpec, Role
from spotfleet.providers import Boot
from spotfleet.providers.local.market.book import exact
from spotfleet.simulate.world.cloud import SimulatedCloud
from spotfleet.simulate.world.work import Work

TICK = 1 / 1024  # the cloud's instants are multiples of it
TICK_S = 1.0  # as the dispatcher's: the next tick after an action comes this much later
JOB = "work"
TUNING = Tuning()
LOOK = 600  # ticks between two checks of the policy's choice
QUIET = 20  # limit of ticks at one instant; more would be a loop


@dataclass(frozen=True)
class Setting:
    """Values of a fleet file that matter to a simulation."""

    fleet: str = "simulated"
    any_of: tuple[Need, ...] = (Need(),)
    hosts: int = 1
    boot_s: float = 180.0  # from a launch until the host works; paid
    placement: str = "spread"
    all_or_nothing: bool = False
    policy: PolicySpec = field(default_factory=PolicySpec)

    def wanted(self, choice: MarketTarget | None) -> Wanted:
        wanted = Wanted(self.fleet, Role.WORKER, self.hosts, self.any_of, placement=self.placement,
                        all_or_nothing=self.all_or_nothing, launch_timeout_s=max(600.0, 2 * self.boot_s),
                        max_micros_h=self.policy.max_micros_h)
        return wanted if choice is None else apply_choice(wanted, choice)


Decide = Callable[[float, float], MarketTarget | None]  # (now, work left) -> how many hosts; None: as the needs require


@dataclass
class SimulatedWorld:
    setting: Setting
    cloud: SimulatedCloud
    work: Work
    decider: Callable[[SimulatedWorld], Decide]
    until: float  # Unix seconds: the deadline, or the end of the records
    deadline: float = math.inf  # Unix seconds
    sees_room: bool = False  # the strategy is called at once when room changes, and never for a price
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    watch: Callable[[float], None] = lambda share: None  # gets the share of the time that is over; may raise

    def __post_init__(self) -> None:
        self.now = self.began_at = self.cloud.now
        self.until = exact(self.until)
        self.choice: MarketTarget | None = None
        self._wanted = self.setting.wanted(None)
        self._asked = False
        self.generation = 0
        self.finished_at: float | None = None
        self._ready_at: dict[str, float] = {}  # host -> the instant at which its agent joins
        self._ready_as_of = -1  # version of the cloud
        self._resumes: JobResumed | None = None  # replaced if other hosts form a generation in the same instant
        self._sold = self.cloud.sold()
        self._decide = self.decider(self)
        self._tick_at = self.now
        reconcile.create(self.ledger, self.cloud, self.setting.fleet, Nodes(1, self.setting.hosts, self.setting.hosts),
                         self.now)  # type: ignore[arg-type]
        self.ledger.append(JobSubmitted(self.now, JOB, "job", "train", 1, self.setting.hosts))

    @property
    def state(self) -> FleetState:
        return self.ledger.state()

    # ---- time

    def run(self) -> None:
        """Run until the work is done, or time is up."""
        while not self.step():
            pass

    def step(self) -> bool:
        """Do everything that is due now, and jump to the next instant; return True at the end."""
        if self.now < self.until:
            self.watch((self.now - self.began_at) / (self.until - self.began_at))
        before = self.cloud.changes
        self.cloud.advance(self.now)
        news = self.cloud.changes != before or self._someone_joins()
        self._work(lost=True)
        if self.work.done:
            self.finished_at = self.now
            self.ledger.append(JobChanged(self.now, JOB, JobState.SUCCEEDED, "", self._version))
        if self.work.done or self.now >= self.until:
            self._close()
            return True
        news = self._ask() or self._price_changed() or news
        if news or self.now >= self._tick_at:
            self._tick()
        if self._resumes is not None:
            self.ledger.append(self._resumes)
            self._resumes = None
        self.now = self._next()
        self.work.advance(self.now)
        return False

    def _next(self) -> float:
        """Return the next instant at which something may change."""
        finish = self.work.finish_at()
        if finish < math.inf:
            finish = exact(finish) + TICK
        due = min(self._tick_at, self.cloud.next_due(), self._next_leave(),
                  min((at for at in self._ready().values() if at > self.now), default=math.inf),
                  self.cloud.next_change() if self.sees_room else self.cloud.next_price())
        due = exact(max(min(due, self.until), self.now + TICK))
        return self._changes_its_mind(min(due, finish))

    # ---- hosts and agents

    def _ready(self) -> dict[str, float]:
        """Map running hosts to the instants at which they join."""
        if self._ready_as_of != self.cloud.version:
            self._ready_as_of = self.cloud.version
            self._ready_at = {n: exact(at + self.setting.boot_s) for n, at in self.cloud.live().items()}
        return self._ready_at

    def _price_changed(self) -> bool:
        """Return whether the planner may launch at a price that it did not pay before."""
        before, self._sold = self._sold, self.cloud.sold()
        return before != self._sold and any(n.max_micros_h for n in self.setting.any_of)

    def _someone_joins(self) -> bool:
        ready = self._ready()
        return any(h.state is HostState.LAUNCHING and ready.get(h.request_id, math.inf) <= self.now
                   for h in self.state.hosts)

    def _joined(self) -> list[str]:
        return [n for n, at in self._ready().items() if at <= self.now]

    def _work(self, lost: bool = False) -> None:
        """Update the membership; hosts with a notice and draining ones stay until others replace them."""
        joined = self._joined()
        going = {h.request_id: h for h in self.state.hosts if h.state is HostState.DRAINING}
        staying = [n for n in joined if n not in going]
        places = self.work.target - len(staying)
        dead = any(m not in joined for m in self.work.members)
        for name in [n for n in joined if n in going and n in self.work.members]:
            if places > 0 and self.now < self._leaves_at(name, going[name].since):
                staying.append(name)
                places -= 1
        formed = self.work.regroup(staying, lost=dead and lost)
        if formed is None:
            return
        self._tick_at = self.now
        if formed.repeated_s:
            self.ledger.append(JobProgress(self.now, JOB, self._version, 1.0))
        self.generation += bool(formed.members)
        self.ledger.append(GenerationFormed(self.now, JOB, self.generation, tuple(f"{m}/0/1" for m in formed.members),
                                            formed.cause, "", self._version))
        self._resumes = JobResumed(
            self.now, JOB, self.generation, self._version, round(formed.repeated_s / len(formed.members)),
            formed.pause_s) if formed.members else None

    def _leaves_at(self, name: str, since: float) -> float:
        """Return when a draining host leaves even without a replacement."""
        taken = self.cloud.notices().get(name)
        if taken is None:
            return since  # our own choice: the remaining hosts suffice
        short = taken - since < TUNING.short_notice_s
        return taken - (TUNING.short_lead_s if short else TUNING.leave_lead_s)

    def _next_leave(self) -> float:
        going = {h.request_id: h.since for h in self.state.hosts if h.state is HostState.DRAINING}
        times = [self._leaves_at(n, going[n]) for n in self.work.members if n in going]
        return min((at for at in times if at > self.now), default=math.inf)

    @property
    def _version(self) -> int:
        """Return the number of steps, as if one step took all hosts a second."""
        return int(self.work.useful_s / self.setting.hosts)

    # ---- decisions

    def _ask(self) -> bool:
        """Return whether the policy's choice has changed."""
        choice = self._decide(self.now, self.work.left_s)
        changed = not self._asked or _essence(choice) != _essence(self.choice)
        self._asked = True
        if changed:
            self.choice = choice
            self._wanted = self.setting.wanted(choice)
            if choice is not None:
                self.ledger.append(PolicyDecided(self.now, choice.spot, choice.on_demand, choice.why, choice.rule,
                                                 choice.shun))
        return changed

    def _changes_its_mind(self, due: float) -> float:
        """Return when the policy's choice changes although nothing happens, if that is before `due`; else `due`.

        A dispatcher calls its policy each second. Here it is called seldom. If the choice has changed meanwhile, the
        first second with the new choice is searched.
        """
        same = math.floor((self.now - self.began_at) / TICK_S)
        last = math.ceil((due - self.began_at) / TICK_S) - 1  # the last second before `due`
        while same < last:
            later = min(same + LOOK, last)
            self.watch(later * TICK_S / (self.until - self.began_at))
            if not self._differs(later):
                same = later
                continue
            while later - same > 1:
                middle = (same + later) // 2
                same, later = (same, middle) if self._differs(middle) else (middle, later)
            return max(self.now, self.began_at + later * TICK_S)
        return due

    def _differs(self, tick: int) -> bool:
        when = self.began_at + tick * TICK_S
        return _essence(self._decide(when, self.work.left_at(when))) != _essence(self.choice)

    def observed(self) -> Observed:
        joined = {n: f"{n}/1" for n in self._joined()}
        notices = {n: Notice(at - self.now) for n, at in self.cloud.notices().items() if n in joined}
        going = {h.request_id for h in self.state.hosts if h.state is HostState.DRAINING}
        held = frozenset(self.work.members)
        return Observed(joined, notices, frozenset(going - held), {}, held)

    def _tick(self) -> None:
        """Run ticks until one drains no host, each preceded by a decision: a released host brings the next tick at
        once. Then the next tick is due when a wait of the planner is over."""
        for _ in range(QUIET):
            done = reconcile.tick(self._wanted, self.ledger, self.cloud, _boot,  # type: ignore[arg-type]
                                  self.observed(), self.now)
            self._work()
            if not any(isinstance(a, Drain) for a in done):
                break
            self._ask()
        acted = any(isinstance(a, (Launch, Drain, Terminate)) for a in done) and not self._only_refused(done)
        self._tick_at = self.now + TICK_S if acted else self._wake(any(isinstance(a, Wait) for a in done))

    def _only_refused(self, done: Sequence[Action]) -> bool:
        """Return whether this tick had only refusals; then the next tick could only wait."""
        state = self.state
        names = [a.request_id for a in done if isinstance(a, Launch)]
        return (len(names) == sum(not isinstance(a, Wait) for a in done)
                and all((h := state.host(n)) is not None and h.was_refused for n in names)
                and all(cooling_until(state, p.offer) > self.now for p in self.cloud.pools))

    def _wake(self, waits: bool) -> float:
        """Return when the planner would act although nothing happens."""
        state, times = self.state, []
        if waits:
            times += list(state.cooldown_until.values())
        wanted = self._wanted
        for host in state.hosts:
            if host.terminate_at is not None:
                times.append(host.terminate_at + RETRY_S)
            elif host.state is HostState.LAUNCHING:
                times.append(host.since + wanted.launch_timeout_s)
            elif host.state is HostState.DRAINING:
                times.append(max(host.since, (host.notice_deadline or 0.0) - wanted.drain_timeout_s)
                             + wanted.drain_timeout_s)
        return min((t for t in times if t > self.now), default=math.inf)

    def _close(self) -> None:
        """Record the cloud's listing at the end."""
        self.ledger.append(JobProgress(self.now, JOB, self._version, 1.0))
        reconcile.record_listing(self._wanted, self.ledger, self.cloud, self.now)  # type: ignore[arg-type]


def _essence(choice: MarketTarget | None) -> tuple[int, int, str, tuple[str, ...]] | None:
    return choice and (choice.spot, choice.on_demand, choice.rule, choice.shun)


def _boot(request_id: str, offer: Offer) -> Boot:
    return Boot("simulated")
