"""A dispatcher that ticks every second on the local cloud, for a history of room in spot pools: nothing is skipped.

The decisions are those of `dispatcher/policy.py` itself, the cloud is the local provider's market in this process, the
agents are this file's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from spotfleet.dispatcher import policy as policy_module
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.lifecycle.clock import MonotonicClock
from spotfleet.dispatcher.lifecycle.fleet_clock import BootMoment, FleetClock, MachineClocks
from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.actions import Drain, Observed, Wanted
from spotfleet.fleet.domain.events import GenerationFormed, JobProgress, JobResumed, JobSubmitted
from spotfleet.fleet.memory_ledger import MemoryLedger
from spotfleet.membership.schedule import JobNeed
from spotfleet.model import (
    BillingRules,
    CloudState,
    FleetSpec,
    HostState,
    JobSpec,
    JobState,
    Market,
    Need,
    Nodes,
    Notice,
    Offer,
    PolicySpec,
    Role,
)
from spotfleet.providers import Boot
from spotfleet.providers.local.inprocess import InProcessProvider, ManualClock
from spotfleet.providers.local.market.pools import LocalPool, MarketRules
from spotfleet.simulate.world.cloud import SimulatedCloud, SpotPool, _lot, on_demand_like
from spotfleet.simulate.world.deciders import ours
from spotfleet.simulate.world.work import Work
from spotfleet.simulate.world.world import JOB, Setting, SimulatedWorld

BEGAN = 1_700_000_000.0
SPOT, FULL = 970_000, 3_060_000
STEPS_PER_S = 2**20  # so fine that no decision hangs on the work of a step


@dataclass(frozen=True)
class History:
    """What is asked of a fleet, and how many spot hosts each pool has room for: (second, hosts), from 0 on."""

    hosts: int
    pools: tuple[tuple[tuple[int, int], ...], ...]
    policy: PolicySpec = field(default_factory=PolicySpec)
    work_s: float = 900.00037  # at all hosts; odd, as else pauses of whole milliseconds bring two choices to a draw
    length_s: int = 1800
    boot_s: int = 30
    notice_s: int = 120

    def room(self, pool: int, at_s: float) -> int:
        return [n for at, n in self.pools[pool] if at <= at_s][-1]

    @property
    def deadline_at(self) -> float:
        return BEGAN + self.policy.deadline_s if self.policy.deadline_s else float("inf")


def zone(pool: int) -> str:
    return "abc"[pool]


def simulated(history: History) -> SimulatedWorld:
    """The simulator's world of this history, done."""
    pools = []
    for i, steps in enumerate(history.pools):
        offer = Offer("local", "local", zone(i), "gpu", Market.SPOT, 1, 0, FULL, "V100")
        pools.append(SpotPool(offer, tuple((BEGAN + at, n) for at, n in steps), ((0.0, SPOT),)))
    full = [on_demand_like(p.offer) for p in pools[:1]]
    cloud = SimulatedCloud(pools, full, BEGAN, history.notice_s, BillingRules(1))
    setting = Setting("f", (Need(),), history.hosts, history.boot_s, policy=history.policy)
    world = SimulatedWorld(setting, cloud, Work(history.hosts, history.work_s * history.hosts, BEGAN), ours,
                  BEGAN + history.length_s, history.deadline_at)
    world.run()
    return world


class Loop:
    """The same fleet, second by second."""

    def __init__(self, history: History, patch) -> None:
        self.history, self.clock = history, ManualClock(BEGAN)
        pools = [LocalPool(zone(i), "gpu", Market.SPOT, SPOT, 0, 1, "V100") for i in range(len(history.pools))]
        full = [LocalPool(zone(0), "gpu", Market.ON_DEMAND, FULL, 10_000, 1, "V100")]
        rules = MarketRules((*pools, *full), BillingRules(1), reclaim_s=0.0, listed_after_end_s=30.0)
        self.cloud = InProcessProvider(clock=self.clock, rules=rules)
        self.market, self.pools = self.cloud.market, pools
        self._terminate, self.cloud.terminate = self.cloud.terminate, self._end  # type: ignore[method-assign]
        self.ledger = MemoryLedger()
        self.work = Work(history.hosts, history.work_s * history.hosts, BEGAN)
        self.generation, self.trained_s = 0, 0.0
        self.resumes: JobResumed | None = None  # once its pause is over
        self.taken_at: dict[str, float] = {}
        spec = FleetSpec("f", any_of=(Need(),), nodes=Nodes(1, history.hosts, history.hosts), policy=history.policy)
        reconcile.create(self.ledger, self.cloud, "f", spec.nodes, self.clock())
        self.ledger.append(JobSubmitted(BEGAN, JOB, "job", "train", 1, history.hosts))
        patch.setattr(policy_module, "time", SimpleNamespace(time=self.clock, monotonic=self.clock))
        own = SimpleNamespace(machine=None)
        self.policy = policy_module.PolicyController(self._core(spec), own, None)  # type: ignore[arg-type]
        self.wanted = Wanted("f", Role.WORKER, history.hosts, spec.any_of)

    def _core(self, spec: FleetSpec) -> Core:
        """As much of a dispatcher's state as its policy controller reads."""
        ledger, policy = self.ledger, self.history.policy

        class Journal:
            @property
            def state(self):
                return ledger.state()

            def note(self, event) -> None:
                ledger.append(event)

        job = SimpleNamespace(id=JOB, state=JobState.RUNNING, record=SimpleNamespace(submitted_at=BEGAN, version=0),
                              spec=JobSpec("job", max_workers=self.history.hosts, deadline_s=policy.deadline_s,
                                           work_s=self.history.work_s),
                              need=lambda order: JobNeed(JOB, 1, self.history.hosts, order),
                              held=lambda: [(host, 0) for host in self.work.members])
        boot = SimpleNamespace(spec=spec, fleet="f", host="")
        clock = MonotonicClock(BEGAN, BEGAN, BEGAN, 0.0)
        clocks = MachineClocks(self.clock, self.clock, lambda: BootMoment("", self.clock()))
        return Core(boot, Path("none"), Journal(), {JOB: job},  # type: ignore[arg-type]
                    FleetClock(Path("none"), clocks), clock, DamagedFiles(Path("none")))  # type: ignore[arg-type]

    def run(self) -> Loop:
        for _ in range(self.history.length_s):
            self._move_cloud()
            self._resume()
            self._train(lost=True)
            self._progress()
            for _ in range(20):
                if self.policy.offers_due(self.clock()):
                    self.policy.read_offers(self.cloud)
                done = reconcile.tick(self.policy.divide(self.wanted), self.ledger, self.cloud,  # type: ignore[arg-type]
                                      lambda name, offer: Boot("x"), self.observed(), self.clock())
                self._train(lost=False)
                if not any(isinstance(a, Drain) for a in done):
                    break
            finish = self.work.finish_at()
            if finish <= self.clock() + 1:
                self.clock.now = int(finish * 1024) / 1024 + 1 / 1024
                self.market.advance(self.clock())
                break
            self.clock.advance(1.0)
            before = self.work.useful_s
            self.work.advance(self.clock())
            if self.work.members:
                self.trained_s += (self.work.useful_s - before) / len(self.work.members)
        self._resume()
        reconcile.record_listing(self.wanted, self.ledger, self.cloud, self.clock())  # type: ignore[arg-type]
        return self

    # ---- the cloud

    def _live(self, pool: str = "") -> dict[str, float]:
        return {n: h.runs[0].started_at for n, h in self.market.hosts.items()
                if h.runs and h.state is CloudState.RUNNING and pool in ("", h.offer.pool)}

    def _move_cloud(self) -> None:
        """Warn and take as the history says, and have no room that goes within a notice."""
        now, history = self.clock(), self.history
        self.market.advance(now)
        second = now - BEGAN
        for i, pool in enumerate(self.pools):
            for at, room in history.pools[i]:
                if second < at <= second + history.notice_s or at == second:
                    staying = sorted((n for n in self._live(pool.name) if n not in self.taken_at), key=_lot)
                    for name in staying[:max(0, len(staying) - room)]:
                        self.taken_at[name] = BEGAN + at
                        self.market.interrupt(name, BEGAN + at - now, now)
        self._make_room()

    def _make_room(self) -> None:
        now, history = self.clock(), self.history
        second = now - BEGAN
        for i, pool in enumerate(self.pools):
            later = [n for at, n in history.pools[i] if second < at <= second + history.notice_s]
            warned = sum(n in self.taken_at for n in self._live(pool.name))
            self.market.set_capacity(pool.name, min([history.room(i, second), *later]) + warned, now)

    def _end(self, request_id: str) -> None:
        """Nobody else has the place of a warned host, also if it leaves before it is taken."""
        self._terminate(request_id)
        self._make_room()

    # ---- agents and workers

    def _joined(self) -> list[str]:
        return [n for n, began in self._live().items() if began + self.history.boot_s <= self.clock()]

    def observed(self) -> Observed:
        joined = self._joined()
        notices = {n: Notice(at - self.clock()) for n, at in self.taken_at.items() if n in joined}
        going = {h.request_id for h in self.ledger.state().hosts if h.state is HostState.DRAINING}
        held = frozenset(self.work.members)
        return Observed({n: f"{n}/1" for n in joined}, notices, frozenset(going - held), {}, held)

    def _train(self, lost: bool) -> None:
        joined = self._joined()
        going = {h.request_id: h.since for h in self.ledger.state().hosts if h.state is HostState.DRAINING}
        ready = [n for n in joined if n not in going]
        for name in (n for n in joined if n in going and n in self.work.members):
            end = self.taken_at.get(name)
            if end is not None and len(ready) < self.history.hosts:
                lead_s = 5.0 if end - going[name] < 30 else 10.0  # membership.views.Tuning
                if self.clock() < end - lead_s:
                    ready.append(name)
        formed = self.work.regroup(ready, lost and any(m not in joined for m in self.work.members))
        if formed is not None:
            self.generation += 1
            self.ledger.append(GenerationFormed(self.clock(), JOB, self.generation,
                                                tuple(f"{m}/0/1" for m in formed.members), formed.cause, "",
                                                int(self.trained_s * STEPS_PER_S)))
            self.resumes = JobResumed(self.clock() + formed.pause_s, JOB, self.generation,
                                      int(self.trained_s * STEPS_PER_S), 0, formed.pause_s) if formed.members else None

    def _resume(self) -> None:
        if self.resumes is not None and self.resumes.at <= self.clock():
            self.ledger.append(self.resumes)
            self.resumes = None

    def _progress(self) -> None:
        """Reported each second, so that the dispatcher knows as much as the simulator does."""
        self.ledger.append(JobProgress(self.clock(), JOB, int(self.trained_s * STEPS_PER_S), 1 / STEPS_PER_S))
