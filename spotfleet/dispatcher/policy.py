"""Policy controller: calls the pure policy each tick, records its decisions, and enforces the budget.

    fleet/policy/decide.py   how many hosts of either market    -> PolicyDecided when that changes
    fleet/policy/budget.py   the rest of `max_cost`             -> BudgetReached, and at 100 % the fleet's end
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace

from spotfleet.dispatcher.cloud.dispatcher_cost import DispatcherCost
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.jobs.report import job_status
from spotfleet.dispatcher.lifecycle.shutdown import FleetShutdown
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.fleet.cost.extras import MONTH_H
from spotfleet.fleet.cost.meter import Meter
from spotfleet.fleet.domain.actions import Wanted
from spotfleet.fleet.domain.events import BudgetReached, PolicyChanged, PolicyDecided
from spotfleet.fleet.domain.history import JobProgressSoFar
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.domain.state import FleetState, of_group
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.policy import budget
from spotfleet.fleet.policy.deadline import impossible
from spotfleet.fleet.policy.decide import DeadlineJob, PolicyInput, decide, is_plain
from spotfleet.fleet.policy.lifetimes import BootTime, boot_time
from spotfleet.fleet.policy.mix import apply_choice, on_demand_needs
from spotfleet.fleet.policy.pools import price_now
from spotfleet.fleet.policy.values import DecisionInput, MarketTarget
from spotfleet.membership.schedule import by_priority, shares
from spotfleet.model import CloudState, HostState, JobSpec, JobState, Need, Offer, PolicySpec, Role
from spotfleet.plugins import kind_missing
from spotfleet.protocol.messages import JobStatus, PolicyStatus
from spotfleet.providers import Provider
from spotfleet.providers.plugin import traits_of

log = logging.getLogger(__name__)
OFFERS_S = 30.0  # period of reading the offers, where they matter to the decision
IDLE_S = 600.0  # without a job for this time the fleet is idle; ending on-demand hosts earlier would boot them again
COUNT_S = 10.0  # period of counting the cost; between two counts it is extrapolated with the burn
REST = 30.0  # pause after a count, in durations of that count, if longer than COUNT_S: a ledger of months is long


class PolicyController:
    """Decisions of the policy, deadlines of jobs, and the budget, for the loop and the ticks."""

    def __init__(self, core: Core, dispatcher_cost: DispatcherCost, shutdown: FleetShutdown) -> None:
        self._core, self._dispatcher_cost, self._shutdown = core, dispatcher_cost, shutdown
        self.choices: dict[str, MarketTarget] = {}  # by group
        self._offers: tuple[Offer, ...] | None = None
        self._read_at = self._count_at = -math.inf  # monotonic
        self._written: dict[str, tuple[int, int, str, tuple[str, ...]]] = {}  # by group
        self._warned: tuple[int, int] = (0, 0)  # (limit, percent) of the last BudgetReached
        self._counted: tuple[float, int] | None = None  # (monotonic, micro-dollars)
        self._on_demand: int | None = None  # by then, if all had been on demand; None: not known
        self._counting: asyncio.Task[None] | None = None

    @property
    def _state(self) -> FleetState:
        return self._core.journal.state

    # ---- which hosts

    def offers_due(self, now: float) -> bool:
        """Return whether offers must be read before the next decision. `now` is monotonic."""
        unix = self._core.unix()
        return now - self._read_at >= OFFERS_S and not all(
            is_plain(self._input(part.name, part.any_of, 0, unix), of_group(self._state, part.name))
            for part in self._core.boot.spec.parts)

    def read_offers(self, provider: Provider) -> None:
        """Read the provider's offers; called in a thread. The tick that follows reports the provider's errors."""
        self._read_at = time.monotonic()
        needs = self._core.boot.spec.any_of
        with suppress(SpotfleetError, OSError):
            found = {o.pool: o for need in (*needs, *on_demand_needs(needs))
                     for o in provider.offers(replace(need, max_micros_h=0))}
            self._offers = tuple(found.values())

    def divide(self, wanted: Wanted) -> Wanted:
        """Return `wanted`, divided between the markets by the policy, within the limit on its price."""
        unix, policy = self._core.unix(), self._core.policy
        if policy.max_micros_h:
            wanted = replace(wanted, max_micros_h=max(1, policy.max_micros_h - self._own_burn()))
        parts = [self._divided(part, unix) for part in wanted.parts or (wanted,)]
        self.choices = {part.group: choice for part, choice in parts if choice is not None}
        return replace(wanted, parts=tuple(part for part, _ in parts)) if wanted.parts else parts[0][0]

    def _divided(self, part: Wanted, unix: float) -> tuple[Wanted, MarketTarget | None]:
        """Return what one group should have, divided between the markets; with the choice, if there was one."""
        inputs, state = self._input(part.group, part.any_of, part.hosts, unix), of_group(self._state, part.group)
        if not part.hosts or is_plain(inputs, state):
            return part, None
        choice = decide(inputs, state, unix)
        self._write(part.group, choice, unix)
        return apply_choice(part, choice), choice

    def _input(self, group: str, any_of: tuple[Need, ...], target: int, unix: float) -> PolicyInput:
        live = [j for j in self._core.jobs.values() if not j.state.ended and j.spec.group in ("", group)]
        due = [j for j in live if j.spec.deadline_s]
        held = self._shares(group, live, target) if due else {}
        deadline_jobs = tuple(self._deadline_job(j, held[j.id], unix) for j in due)
        busy = sum(held[j.id] for j in live if not j.spec.deadline_s) if due else 0
        needed = self._core.ranges[group].min if not live and self._is_idle() else None
        return PolicyInput(self._core.policy, any_of, target, deadline_jobs, self._offers, busy, needed)

    def _is_idle(self) -> bool:
        """Return whether there has been no job for IDLE_S and no host holds a worker, such as one of a job not adopted
        yet."""
        idle_s = self._core.clock.idle_s(self._core.fleet_clock.passed(), working=False)
        return idle_s >= IDLE_S and not any(s.report.workers for s in self._core.connections.values())

    @property
    def held(self) -> int:
        """Number of on-demand hosts that will be launched once there is a job."""
        return sum(choice.held for choice in self.choices.values())

    def _shares(self, group: str, live: list[ManagedJob], target: int) -> dict[str, int]:
        """Return the number of hosts of each job of a group once the whole target is up."""
        stay = {h.request_id for h in of_group(self._state, group).hosts if h.counts and h.notice_deadline is None}
        needs = [j.need(n) for n, j in enumerate(live)]
        hosts = {j.id: tuple(dict.fromkeys(host for host, _ in j.held() if host in stay)) for j in live
                 if j.state is not JobState.QUEUED}
        return shares(by_priority(needs, {j.id: j.spec.priority for j in live}), hosts, target, self._slots(group),
                      group)

    def _slots(self, group: str) -> int:
        """Return the slots of the smallest host of a group."""
        return min((h.offer.slots for h in of_group(self._state, group).hosts if h.role is Role.WORKER and h.counts),
                   default=1)

    def _target(self, spec: JobSpec) -> int:
        """Return the target of the hosts that a job may use."""
        return self._core.ranges[spec.group].target if spec.group in self._core.ranges else self._core.nodes.target

    def _can_use(self, spec: JobSpec) -> int:
        """Return the number of the target's hosts that the job can use."""
        slots = 1 if spec.per_host else self._slots(spec.group)
        return max(1, min(self._target(spec), math.ceil(spec.max_workers / slots)))

    def _write(self, group: str, choice: MarketTarget, unix: float) -> None:
        """Record the choice once: changing figures in its reason alone do not make a new event."""
        decided = of_group(self._state, group).history.decided
        last = self._written.get(group) or (
            decided and (decided.spot, decided.on_demand, decided.rule, decided.shun))
        now = choice.spot, choice.on_demand, choice.rule, choice.shun
        self._written[group] = now
        if now != last:
            log.info("policy%s: %d spot, %d on demand: %s", f" of group {group}" if group else "", choice.spot,
                     choice.on_demand, choice.why)
            self._core.journal.note(PolicyDecided(unix, *now[:2], choice.why, choice.rule, choice.shun, group))

    # ---- jobs and their deadlines

    def _deadline_job(self, job: ManagedJob, held: int, unix: float) -> DeadlineJob:
        left_s = job.record.submitted_at + job.spec.deadline_s - unix
        return DeadlineJob(job.id, left_s, self._work_left(job), self._can_use(job.spec), held)

    def _work_left(self, job: ManagedJob) -> float:
        """Return the remaining host-seconds; infinite while unknown. A step, including the time until the next one, is
        assumed to need the same host-seconds on any number of hosts: see `JobProgressSoFar.pace_s`."""
        spec, done = job.spec, self._state.history.progress.get(job.id, JobProgressSoFar())
        if spec.work_s:
            return self.sized(spec).work_host_s - done.host_s
        if not spec.work_steps or done.step_s <= 0 or not done.hosts:
            return math.inf
        return max(0, spec.work_steps - max(done.version, job.record.version)) * done.pace_s * done.hosts

    def sized(self, spec: JobSpec) -> JobSpec:
        """Return `spec` with its work in host-seconds at the current target, unless it has them already."""
        return replace(spec, work_host_s=spec.work_host_s or spec.work_s * self._target(spec))

    def annotated(self, job: ManagedJob, unix: float) -> JobStatus:
        """Return the job's status with its deadline, remaining work and expected end."""
        status, spec = job_status(job, unix), job.spec
        if job.state.ended or not (spec.deadline_s or spec.work_s or spec.work_steps):
            return status
        left, done = self._work_left(job), self._state.history.progress.get(job.id, JobProgressSoFar())
        known = left < math.inf
        works = status.world_size > 0 and done.hosts > 0
        return replace(
            status, deadline_in_s=job.record.submitted_at + spec.deadline_s - unix if spec.deadline_s else None,
            work_left_s=max(0.0, left) / max(1, self._target(spec)) if known else None,
            finish_in_s=max(0.0, left) / done.hosts if known and works else None)

    def check(self, spec: JobSpec) -> None:
        """Raise UsageError for a deadline that cannot be kept even if all usable hosts start on demand at once, or for
        which this fleet cannot mix markets, see `config/money.py`."""
        fleet = self._core.boot.spec
        if spec.deadline_s and fleet.all_or_nothing:
            raise UsageError("a deadline is kept by mixing both markets, and all_or_nothing launches all hosts in one",
                             hint="train without --deadline, or make a fleet without all_or_nothing")
        if spec.deadline_s and kind_missing(traits_of(fleet), fleet.any_of):
            raise UsageError("a deadline is kept by mixing both markets, and the fleet file names no kind of host",
                             hint="name instance_type or accelerators under `resources`, so that both are of one kind")
        refuse_impossible(self.sized(spec), self._can_use(spec), boot_time(self._state.history))

    # ---- money

    def burn(self) -> int:
        """Return micro-dollars an hour of all machines, including the dispatcher's."""
        hosts = (h for h in self._state.hosts if h.cloud is CloudState.RUNNING and h.state is not HostState.STOPPED)
        return self._own_burn() + sum(price_now(self._state, h)[0] for h in hosts)

    def spent(self, now: float) -> int | None:
        """Return micro-dollars since the fleet was made, as in `spotfleet cost`; None before the first count. `now`
        is monotonic."""
        if self._counted is None:
            return None
        at, micros = self._counted
        return micros + int((self.burn() + self._beside(*self._state.hosts, *self._own)) * (now - at) / 3600)

    def spent_on_demand(self, now: float) -> int | None:
        """Return `spent` if all machines had been on demand; None where that is not known."""
        if self._counted is None or self._on_demand is None:
            return None
        running = [h for h in self._state.hosts if h.cloud is CloudState.RUNNING and h.state is not HostState.STOPPED]
        burn = self._own_burn() + sum(price_now(self._state, h)[1] for h in running)
        beside = self._beside(*self._state.hosts, *self._own)
        return self._on_demand + int((burn + beside) * (now - self._counted[0]) / 3600)

    def _beside(self, *hosts: Host) -> int:
        """Return micro-dollars an hour of disks and addresses of running hosts."""
        rates = {**self._dispatcher_cost.state.rates, **self._state.rates}
        found = 0.0
        for host in hosts:
            stamp = rates.get(f"{host.offer.provider}/{host.offer.region}")
            if stamp is not None and host.cloud is CloudState.RUNNING:
                found += host.disk_gib * stamp.rates.disk_micros_gib_month / MONTH_H
                found += host.addresses * stamp.rates.address_micros_h
        return round(found)

    @property
    def _own(self) -> list[Host]:
        own = self._dispatcher_cost.own
        return [own] if own is not None else []

    def enforce_budget(self) -> None:
        """Count the cost, warn, and end the fleet in time; called after each tick."""
        self._count()
        unix, limit = self._core.unix(), self._core.policy.max_micros
        spent_now = self.spent(time.monotonic())
        if not limit or spent_now is None or (self._shutdown.decision and self._shutdown.decision.limited):
            return
        spec = self._core.boot.spec
        beside, kept = self._beside(*self._state.hosts, *self._own), self._own_burn() + self._beside(*self._own)
        current = budget.Budget(limit, spent_now, self.burn() + beside, kept, traits_of(spec).keeps_results_s)
        percent, past = budget.level(current), self._state.history.reached.get("max_cost")
        reached = [self._warned, (past.limit_micros, past.percent) if past else (0, 0)]
        if percent > max((done for of, done in reached if of == limit), default=0):
            self._warned, why = (limit, percent), budget.describe(current)
            log.warning("budget: %s", why)
            self._core.journal.note(BudgetReached(unix, "max_cost", percent, spent_now, limit, why))
        if percent == 100:
            self._shutdown.begin(f"max_cost: {budget.describe(current)}", by_ourselves=True, at=unix, limited=True)
            self._shutdown.limit()

    def _count(self) -> None:
        if time.monotonic() >= self._count_at and (self._counting is None or self._counting.done()):
            self._count_at = math.inf
            self._counting = asyncio.create_task(self._count_ledger())

    async def _count_ledger(self) -> None:
        began, unix = time.monotonic(), self._core.unix()
        ledger = self._core.journal.ledger
        try:
            micros, self._on_demand = await asyncio.to_thread(lambda: self._total(ledger, unix))
            self._counted = began, micros
        finally:
            now = time.monotonic()
            self._count_at = now + max(COUNT_S, REST * (now - began))

    def _own_burn(self) -> int:
        own = self._dispatcher_cost.machine
        return own.offer.price_micros_h if own is not None else 0

    def _total(self, ledger: Ledger, unix: float) -> tuple[int, int | None]:
        events = [event for _, event in ledger.each()]
        meter = Meter([*events, *self._dispatcher_cost.events(events)], unix)
        return meter.micros(), meter.on_demand_micros()

    # ---- changes of the fleet file, and status

    async def set_policy(self, policy: PolicySpec) -> None:
        if policy != self._core.policy:
            self._core.journal.note(PolicyChanged(self._core.unix(), policy, "asked by `spotfleet up`"))
            await self._core.journal.flush()
            self._read_at = -math.inf
            self._core.tick_soon()

    def status(self, unix: float) -> PolicyStatus | None:
        policy, choices = self._core.policy, self.choices
        limits = policy.max_micros, policy.max_micros_h
        if not choices:
            return PolicyStatus(0, 0, "", "", 0.0, *limits) if any(limits) else None
        decided = [d.at for g in choices if (d := of_group(self._state, g).history.decided) is not None]
        why = "; ".join(f"{group}: {c.why}" if group else c.why for group, c in choices.items())
        rule = ", ".join(dict.fromkeys(c.rule for c in choices.values()))
        spot, on_demand = sum(c.spot for c in choices.values()), sum(c.on_demand for c in choices.values())
        for_s = max(0.0, unix - max(decided)) if decided else 0.0
        return PolicyStatus(spot, on_demand, why, rule, for_s, *limits)


def refuse_impossible(spec: JobSpec, hosts: int, boot: BootTime) -> None:
    """Raise UsageError if `work_host_s` cannot be done by `deadline_s` on `hosts` hosts."""
    if not (spec.deadline_s and spec.work_s):
        return
    why = impossible(DecisionInput(0.0, hosts, left_s=spec.deadline_s, work_s=spec.work_host_s, boot_s=boot.seconds,
                                   boots=boot.boots))
    if why:
        raise UsageError(f"the deadline is impossible: {why}", hint="allow more time, or more hosts")
