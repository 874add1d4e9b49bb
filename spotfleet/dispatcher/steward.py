"""Carries out the fleet's policy: asks the pure parts each tick, writes down what they decide, and minds the money.

    fleet/policy/decide.py   how many hosts of either market    -> PolicyDecided when that changes
    fleet/policy/budget.py   what is left of `max_cost`         -> BudgetReached, and at last the fleet's end
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from spotfleet.dispatcher import lifetime
from spotfleet.dispatcher.schedule import JobNeed, shares
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.fleet.actions import Wanted
from spotfleet.fleet.cost import spent
from spotfleet.fleet.cost_meters import MONTH_H
from spotfleet.fleet.events import BudgetReached, Event, PolicyChanged, PolicyDecided
from spotfleet.fleet.fold import FleetState
from spotfleet.fleet.host import Host
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.policy import budget
from spotfleet.fleet.policy.deadline import impossible
from spotfleet.fleet.policy.decide import Scene, Task, decide, is_plain
from spotfleet.fleet.policy.lifetimes import boot_s
from spotfleet.fleet.policy.mix import chosen, on_demand_needs
from spotfleet.fleet.policy.pools import price_now
from spotfleet.fleet.policy.seen import Worked
from spotfleet.fleet.policy.values import Choice, Moment
from spotfleet.messages import JobStatus, PolicyStatus
from spotfleet.model import CloudState, HostState, JobSpec, JobState, Offer, PolicySpec, Role
from spotfleet.providers import Provider

if TYPE_CHECKING:
    from spotfleet.dispatcher.jobs import Job
    from spotfleet.dispatcher.state import Dispatcher

log = logging.getLogger(__name__)
OFFERS_S = 30.0  # what is on sale is looked up again after this, where that decides something
IDLE_S = 600.0  # without a job for so long nothing hurries; on-demand hosts that go earlier would only boot again
COUNT_S = 10.0  # what was spent is counted again after this; between, the burn goes on
PAGE = 5000  # events that are read at once: others wait for the ledger meanwhile
REST = 30.0  # or after so many times as long as counting took: a ledger of months is long


class Steward:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.choice: Choice | None = None
        self._offers: tuple[Offer, ...] | None = None
        self._looked_at = self._count_at = -math.inf  # monotonic
        self._written: tuple[int, int, str, tuple[str, ...]] | None = None
        self._warned: tuple[int, int] = (0, 0)  # (limit, percent) of what was written last
        self._counted: tuple[float, int] | None = None  # (Unix, micro-dollars)
        self._counting: asyncio.Task[None] | None = None

    @property
    def policy(self) -> PolicySpec:
        return self._state.seen.policy or self._dispatcher.boot.spec.policy

    @property
    def _state(self) -> FleetState:
        return self._dispatcher.journal.state

    # ---- which hosts

    def looks(self, now: float) -> bool:
        """Must offers be looked up before the next decision? `now` is monotonic."""
        return now - self._looked_at >= OFFERS_S and not is_plain(self._scene(0, time.time()), self._state)

    def look(self, provider: Provider) -> None:
        """Look up what is on sale, in a thread. What the provider raises is told by the tick that follows."""
        self._looked_at = time.monotonic()
        needs = self._dispatcher.boot.spec.any_of
        with suppress(SpotfleetError, OSError):
            found = {o.pool: o for need in (*needs, *on_demand_needs(needs))
                     for o in provider.offers(replace(need, max_micros_h=0))}
            self._offers = tuple(found.values())

    def share(self, wanted: Wanted) -> Wanted:
        """`wanted` as the policy divides it between the markets, within the limit on its price."""
        unix, policy = time.time(), self.policy
        if policy.max_micros_h:
            wanted = replace(wanted, max_micros_h=max(1, policy.max_micros_h - self._own_burn()))
        scene = self._scene(wanted.hosts, unix)
        if not wanted.hosts or is_plain(scene, self._state):
            self.choice = None
            return wanted
        self.choice = choice = decide(scene, self._state, unix)
        self._write(choice, unix)
        return chosen(wanted, choice)

    def _scene(self, target: int, unix: float) -> Scene:
        live = [j for j in self._dispatcher.jobs.values() if not j.state.ended]
        due = [j for j in live if j.spec.deadline_s]
        held = self._shares(live, target) if due else {}
        tasks = tuple(self._task(j, held[j.id], unix) for j in due)
        busy = sum(held[j.id] for j in live if not j.spec.deadline_s) if due else 0
        needed = self._dispatcher.nodes.min if not live and self._is_idle() else None
        return Scene(self.policy, self._dispatcher.boot.spec.any_of, target, tasks, self._offers, busy, needed)

    def _is_idle(self) -> bool:
        """Has there been no job for long, and do hosts hold no worker, as of a job that is not adopted yet?"""
        idle_s = self._dispatcher.stopwatch.idle_s(time.monotonic(), working=False)
        return idle_s >= IDLE_S and not any(s.report.workers for s in self._dispatcher.seats.values())

    @property
    def held(self) -> int:
        """On-demand hosts that fill in once there is a job."""
        return self.choice.held if self.choice is not None else 0

    def _shares(self, live: list[Job], target: int) -> dict[str, int]:
        """How many hosts each job has once all of the target are up."""
        stay = {h.request_id for h in self._state.hosts if h.counts and h.notice_deadline is None}
        needs = [JobNeed(j.id, j.spec.min_workers, j.sizing.places, n) for n, j in enumerate(live)]
        hosts = {j.id: tuple(dict.fromkeys(host for host, _ in j.held() if host in stay)) for j in live
                 if j.state is not JobState.QUEUED}
        return shares(needs, hosts, target, self._slots)

    @property
    def _slots(self) -> int:
        """Workers that the smallest host has room for."""
        return min((h.offer.slots for h in self._state.hosts if h.role is Role.WORKER and h.counts), default=1)

    def _can_use(self, spec: JobSpec) -> int:
        """Hosts of the target."""
        return max(1, min(self._dispatcher.nodes.target, math.ceil(spec.max_workers / self._slots)))

    def _write(self, choice: Choice, unix: float) -> None:
        """Once for each choice: figures in its reason that go on changing are no news."""
        decided = self._state.seen.decided
        last = self._written or (decided and (decided.spot, decided.on_demand, decided.rule, decided.shun))
        now = choice.spot, choice.on_demand, choice.rule, choice.shun
        self._written = now
        if now != last:
            log.info("policy: %d spot, %d on demand: %s", choice.spot, choice.on_demand, choice.why)
            self._dispatcher.journal.note(PolicyDecided(unix, *now[:2], choice.why, choice.rule, choice.shun))

    # ---- jobs and their deadlines

    def _task(self, job: Job, held: int, unix: float) -> Task:
        left_s = job.record.submitted_at + job.spec.deadline_s - unix
        return Task(job.id, left_s, self._work_left(job), self._can_use(job.spec), held)

    def _work_left(self, job: Job) -> float:
        """Host-seconds; infinite while nobody knows. Steps are taken to need as much work on any number of hosts,
        with all that is between them: see `Worked.pace_s`."""
        spec, done = job.spec, self._state.seen.works.get(job.id, Worked())
        if spec.work_s:
            return self.sized(spec).work_host_s - done.host_s
        if not spec.work_steps or done.step_s <= 0 or not done.hosts:
            return math.inf
        return max(0, spec.work_steps - max(done.version, job.record.version)) * done.pace_s * done.hosts

    def sized(self, spec: JobSpec) -> JobSpec:
        """With its work in host-seconds at the target of now, unless it was sized before."""
        return replace(spec, work_host_s=spec.work_host_s or spec.work_s * self._dispatcher.nodes.target)

    def annotated(self, job: Job, unix: float) -> JobStatus:
        """The job's status, with what is known of its deadline and its end."""
        status, spec = job.status(unix), job.spec
        if job.state.ended or not (spec.deadline_s or spec.work_s or spec.work_steps):
            return status
        left, done = self._work_left(job), self._state.seen.works.get(job.id, Worked())
        known = left < math.inf
        works = status.world_size > 0 and done.hosts > 0
        return replace(
            status, deadline_in_s=job.record.submitted_at + spec.deadline_s - unix if spec.deadline_s else None,
            work_left_s=max(0.0, left) / max(1, self._dispatcher.nodes.target) if known else None,
            finish_in_s=max(0.0, left) / done.hosts if known and works else None)

    def check(self, spec: JobSpec) -> None:
        """Raise UsageError for a deadline that cannot be kept even with all hosts it can use on demand at once, or that
        this fleet cannot mix markets for, see `config/money.py`."""
        fleet = self._dispatcher.boot.spec
        if spec.deadline_s and fleet.all_or_nothing:
            raise UsageError("a deadline is kept by mixing both markets, and all_or_nothing launches all hosts in one",
                             hint="train without --deadline, or make a fleet without all_or_nothing")
        if spec.deadline_s and fleet.provider == "aws" and any(
                n.use_spot and not (n.instance_type or n.accelerator) for n in fleet.any_of):
            raise UsageError("a deadline is kept by mixing both markets, and the fleet file names no kind of host",
                             hint="name instance_type or accelerators under `resources`, so that both are of one kind")
        refuse_impossible(self.sized(spec), self._can_use(spec), boot_s(self._state))

    # ---- money

    def burn(self) -> int:
        """Micro-dollars an hour, of all machines, the dispatcher's included."""
        hosts = (h for h in self._state.hosts if h.cloud is CloudState.RUNNING and h.state is not HostState.STOPPED)
        return self._own_burn() + sum(price_now(self._state, h)[0] for h in hosts)

    def spent(self, unix: float) -> int | None:
        """Micro-dollars since the fleet was made, as `spotfleet cost` has them; None before they were counted first."""
        if self._counted is None:
            return None
        at, micros = self._counted
        return micros + int((self.burn() + self._beside(*self._state.hosts, *self._own)) * max(0.0, unix - at) / 3600)

    def _beside(self, *hosts: Host) -> int:
        """Micro-dollars an hour of the disks and addresses of those that run."""
        rates = {**self._dispatcher.machines.own_bill.state.rates, **self._state.rates}
        found = 0.0
        for host in hosts:
            stamp = rates.get(f"{host.offer.provider}/{host.offer.region}")
            if stamp is not None and host.cloud is CloudState.RUNNING:
                found += host.disk_gib * stamp.rates.disk_micros_gib_month / MONTH_H
                found += host.addresses * stamp.rates.address_micros_h
        return round(found)

    @property
    def _own(self) -> list[Host]:
        own = self._dispatcher.machines.own_bill.own
        return [own] if own is not None else []

    def mind(self) -> None:
        """After each tick: count, warn, and end the fleet in time."""
        self._count()
        unix, limit = time.time(), self.policy.max_micros
        spent_now = self.spent(unix)
        if not limit or spent_now is None or self._dispatcher.endgame.why:
            return
        spec = self._dispatcher.boot.spec
        beside, kept = self._beside(*self._state.hosts, *self._own), self._own_burn() + self._beside(*self._own)
        purse = budget.Purse(limit, spent_now, self.burn() + beside, kept, lifetime.keep_s(spec))
        percent, past = budget.level(purse), self._state.seen.reached.get("max_cost")
        told = [self._warned, (past.limit_micros, past.percent) if past else (0, 0)]
        if percent > max((said for of, said in told if of == limit), default=0):
            self._warned, why = (limit, percent), budget.said(purse)
            log.warning("budget: %s", why)
            self._dispatcher.journal.note(BudgetReached(unix, "max_cost", percent, spent_now, limit, why))
        if percent == 100:
            self._dispatcher.go_down(f"max_cost: {budget.said(purse)}", by_ourselves=True)

    def _count(self) -> None:
        if time.monotonic() >= self._count_at and (self._counting is None or self._counting.done()):
            self._count_at = math.inf
            self._counting = asyncio.create_task(self._count_ledger())

    async def _count_ledger(self) -> None:
        began, unix = time.monotonic(), time.time()
        ledger = self._dispatcher.journal.ledger
        try:
            self._counted = unix, await asyncio.to_thread(lambda: self._total(ledger, unix))
        finally:
            now = time.monotonic()
            self._count_at = now + max(COUNT_S, REST * (now - began))

    def _own_burn(self) -> int:
        own = self._dispatcher.machines.own
        return own.offer.price_micros_h if own is not None else 0

    def _total(self, ledger: Ledger, unix: float) -> int:
        events = list(_all(ledger))
        return spent([*events, *self._dispatcher.machines.own_bill.events(events)], unix)

    # ---- the file changes, and what is shown

    async def set_policy(self, policy: PolicySpec) -> None:
        if policy != self.policy:
            self._dispatcher.journal.note(PolicyChanged(time.time(), policy, "asked by `spotfleet up`"))
            await self._dispatcher.journal.flush()
            self._looked_at = -math.inf
            self._dispatcher.machines.poke()

    def status(self, unix: float) -> PolicyStatus | None:
        policy, decided = self.policy, self._state.seen.decided
        limits = policy.max_micros, policy.max_micros_h
        if self.choice is None:
            return PolicyStatus(0, 0, "", "", 0.0, *limits) if any(limits) else None
        for_s = max(0.0, unix - decided.at) if decided else 0.0
        return PolicyStatus(self.choice.spot, self.choice.on_demand, self.choice.why, self.choice.rule, for_s, *limits)


def _all(ledger: Ledger) -> Iterator[Event]:
    seq = 0
    while page := ledger.events(seq, PAGE):
        yield from (event for _, event in page)
        seq = page[-1][0]


def refuse_impossible(spec: JobSpec, hosts: int, boots_s: float) -> None:
    """Raise UsageError where `work_host_s` cannot be done by `deadline_s` on so many hosts."""
    if not (spec.deadline_s and spec.work_s):
        return
    why = impossible(Moment(0.0, hosts, left_s=spec.deadline_s, work_s=spec.work_host_s, boot_s=boots_s))
    if why:
        raise UsageError(f"the deadline is impossible: {why}", hint="allow more time, or more hosts")
