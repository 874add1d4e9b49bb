"""Number of hosts of each market that there should be now, and why. Pure: the same arguments give the same choice.

    spot        all of the target are spot hosts, except `on_demand_base`
    on-demand   all are on demand
    auto        on-demand hosts fill in for unavailable spot hosts, once the expected further wait (`likely_s`, from
                this wait and former ones) is at least as long as a boot. They leave again when spot hosts have been up
                for a while. Where spot costs no less than on demand, hosts are on demand (`expensive_pools`). While
                no job runs or waits, on-demand hosts fill in up to nodes.min only
    deadline    a job has a deadline: as many hosts on demand as it takes to be in time (`deadline.py`)

In every change, a working host leaves only when its replacement works too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from spotfleet.fleet.domain.availability import AvailabilityHistory, is_available, observe
from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.domain.state import FleetState, cooling_until, scope_keys
from spotfleet.fleet.policy import deadline
from spotfleet.fleet.policy.lifetimes import boot_time, stall_s
from spotfleet.fleet.policy.mix import on_demand_needs
from spotfleet.fleet.policy.pools import useful_price_by_pool
from spotfleet.fleet.policy.values import DecisionInput, MarketTarget
from spotfleet.matching import meets
from spotfleet.model import HostState, Market, Need, Offer, PolicySpec, Role
from spotfleet.words import about, rate

TICK_S = 10.0  # longest time between two decisions while nothing happens
SETTLED_S = 300.0  # a spot host replaces another once it has been up for the time of a boot, or for this time
CHEAPER = 0.95  # a pool that cost no less than on demand is used again at this share of the on-demand price
LATE = 2.0  # a spot host that takes this many times the usual boot time counts as missing
LATE_LEAST_S = 30.0  # and at least so long: boots of seconds vary by more than their length


@dataclass(frozen=True)
class DeadlineJob:
    """Remaining work of a job that has a deadline."""

    job: str
    left_s: float  # until its deadline; negative after it
    work_s: float  # host-seconds; infinite while unknown
    hosts: int = 0  # the most that it can use; 0: all of the target
    held: int = 0  # the hosts that it has when all of the target are up; 0: it waits, or this was not computed


@dataclass(frozen=True)
class PolicyInput:
    """Requirements of the fleet, and the offers."""

    policy: PolicySpec
    any_of: tuple[Need, ...]
    target: int  # hosts
    tasks: tuple[DeadlineJob, ...] = ()
    offers: tuple[Offer, ...] | None = None  # for the needs, in both markets; None: not requested yet
    busy: int = 0  # hosts of jobs without a deadline when all of the target are up
    needed: int | None = None  # limit for on-demand hosts that fill in, while no job runs or waits; None: the target

    DERIVED: ClassVar = {"taken": ("any_of", "offers"), "full": ("any_of", "offers"),
                         "beside": ("any_of", "offers")}

    @cached_property
    def taken(self) -> list[Offer]:
        """Spot offers that meet a need at its price."""
        return self._sold(Market.SPOT, self.any_of)

    @cached_property
    def full(self) -> list[Offer]:
        """On-demand offers with a known price that would fill in."""
        return [o for o in self._sold(Market.ON_DEMAND, on_demand_needs(self.any_of)) if o.price_micros_h]

    @cached_property
    def beside(self) -> dict[str, int]:
        """Usable spot pool -> on-demand price of the same machine, micro-dollars an hour.

        The price is that of the zone, or of the region if the zone does not sell it. Pools without such a machine are
        left out.
        """
        prices: dict[tuple[str, ...], int] = {}
        for o in self.full:
            for place in (o.zone, ""):
                key = (o.provider, o.region, o.instance_type, place)
                prices[key] = min(o.price_micros_h, prices.get(key, o.price_micros_h))
        found = {o.pool: prices.get((o.provider, o.region, o.instance_type, o.zone)) or prices.get(
            (o.provider, o.region, o.instance_type, "")) for o in self.taken}
        return {pool: price for pool, price in found.items() if price}

    def _sold(self, market: Market, needs: Sequence[Need]) -> list[Offer]:
        return [o for o in self.offers or () if o.market is market and any(meets(n, o) for n in needs)]


def is_plain(inputs: PolicyInput, state: FleetState) -> bool:
    """Return whether there is nothing to decide, because the needs alone determine the markets."""
    policy, markets = inputs.policy, {n.use_spot for n in inputs.any_of}
    odd = any(h.offer.market is Market.ON_DEMAND for h in _hosts(state))
    asked = policy.spot_policy != "spot" or policy.on_demand_base or inputs.tasks
    return not asked and not (odd and markets == {True})


def decide(inputs: PolicyInput, state: FleetState, now: float) -> MarketTarget:
    """Return the hosts that there should be now, of each market at most the target."""
    policy, target = inputs.policy, inputs.target
    base = min(policy.on_demand_base, target)
    moment = decision_input(inputs, state, now)
    if target == 0:
        return MarketTarget(0, 0, "no host is wanted", "base")
    task = _tightest(inputs)
    if policy.spot_policy == "on-demand" or not any(n.use_spot for n in inputs.any_of):
        why = "spot_policy: on-demand" if policy.spot_policy == "on-demand" else "the needs allow no spot host"
        choice = MarketTarget(0, target, why, "on-demand")
    elif task is not None:
        due = _in_time(task, moment)
        choice = replace(due, spot=min(due.spot, target - base), on_demand=max(base, due.on_demand))
    elif policy.spot_policy == "auto" or inputs.tasks:
        choice = _auto(inputs, state, moment, base, now)
    else:
        why = f"on_demand_base: {base} of {target} hosts" if base else "spot_policy: spot"
        choice = MarketTarget(target - base, max(base, _unrelieved(moment, moment.spot_ready)), why, "base")
    if moment.on_demand_ready < choice.on_demand:  # the new on-demand hosts still boot
        choice = replace(choice, spot=max(choice.spot, min(moment.spot, target - moment.on_demand_ready)))
    return choice


def decision_input(inputs: PolicyInput, state: FleetState, now: float) -> DecisionInput:
    """Return the present situation."""
    hosts = _hosts(state)
    spot = [h for h in hosts if h.offer.market is Market.SPOT]
    full = [h for h in hosts if h.offer.market is Market.ON_DEMAND]
    prices = [o.price_micros_h for o in spot_offers(inputs)]
    availability, room = state.history.availability, _room(inputs, state, now)
    if availability.periods:  # the last one goes on, unless it has clearly ended
        held = is_available(len(spot), 0, inputs.target)
        availability = observe(availability, now, held or (room != 0 and availability.periods[-1].available))
    on_demand_prices = [o.price_micros_h for o in inputs.offers or () if o.market is Market.ON_DEMAND]
    boot = boot_time(state.history)
    return DecisionInput(
        now, inputs.target, len(spot), _ready(spot), len(full), _ready(full), room,
        boot_s=boot.seconds, stall_s=stall_s(state), tick_s=TICK_S, spot_micros_h=min(prices, default=0),
        on_demand_micros_h=min(on_demand_prices, default=0), availability=availability, boots=boot.boots)


def spot_offers(inputs: PolicyInput) -> list[Offer]:
    """Return the spot offers that meet a need at its price."""
    return inputs.taken


# ---- deadline


def _tightest(inputs: PolicyInput) -> DeadlineJob | None:
    """Return the deadline with the least slack per host, all the work due by then, and its hosts.

    None if no work is known, or if more was done than was announced. Jobs keep the hosts that they have: hosts of jobs
    with a later deadline, or with unknown work, are not available. A job that waits for such a host counts with all of
    them, because its waiting time is unknown.
    """
    known = sorted((t for t in inputs.tasks if 0 < t.work_s < math.inf), key=lambda t: t.left_s)
    busy, found = inputs.busy + sum(t.held for t in inputs.tasks if t not in known), []
    for n, task in enumerate(known):
        others = busy + sum(t.held for t in known[n + 1:])
        free = inputs.target - others if others < inputs.target else inputs.target
        can = [min(free, t.hosts or free) for t in known[:n + 1]]
        found.append(replace(task, hosts=can[-1]))
        found.append(replace(task, work_s=sum(t.work_s for t in known[:n + 1]), hosts=min(free, sum(can))))
    return min(found, key=lambda t: t.left_s - t.work_s / t.hosts, default=None)


def _in_time(task: DeadlineJob, moment: DecisionInput) -> MarketTarget:
    """Return the choice for the hosts that the job can use; the others are of any market, if the job may use any."""
    few, rest = task.hosts, moment.hosts - task.hosts
    due = replace(moment, hosts=few, left_s=task.left_s, work_s=task.work_s)
    if rest:
        due = replace(due, spot=min(few, due.spot), spot_ready=min(few, due.spot_ready),
                      on_demand=min(few, due.on_demand), on_demand_ready=min(few, due.on_demand_ready))
    choice = deadline.choose(due)
    if not rest:
        return replace(choice, why=f"{task.job}: {choice.why}")
    choice = replace(choice, why=f"{task.job}, on {few} of {moment.hosts} hosts: {choice.why}")
    if choice.spot < few:  # it must not use more spot hosts than that, and which hosts it uses is unknown
        return replace(choice, on_demand=choice.on_demand + rest)
    kept = max(choice.on_demand, _unrelieved(moment, moment.spot_ready))
    return replace(choice, spot=moment.hosts, on_demand=kept)


# ---- auto


def _auto(inputs: PolicyInput, state: FleetState, moment: DecisionInput, base: int, now: float) -> MarketTarget:
    expensive = expensive_pools(inputs, state, now)
    full_refused = all(cooling_until(state, o) > now for o in inputs.full)
    if not expensive or (full_refused and len(expensive) < len(inputs.taken)):
        return _filled_in(inputs, state, moment, base, now)
    pool = min(expensive, key=lambda p: (expensive[p].micros_h, p))
    why = f"{expensive[pool]} in {pool}"
    if len(expensive) == len(inputs.taken):
        fills = inputs.target - min(inputs.target, moment.on_demand) if full_refused else 0
        refused = f", but refused: {fills} spot hosts stand in" if fills else ""
        return MarketTarget(fills, inputs.target, f"spot costs no less than on demand{refused}: {why}", "auto",
                            shun=() if fills else tuple(sorted(expensive)))
    cheap = replace(inputs, offers=tuple(o for o in inputs.offers or () if o.pool not in expensive))
    choice = _filled_in(cheap, state, decision_input(cheap, state, now), base, now)
    return replace(choice, why=f"{choice.why}; no more spot hosts at {why}", shun=tuple(sorted(expensive)))


@dataclass(frozen=True)
class Expensive:
    """Cost of a useful hour in a spot pool, and on demand."""

    micros_h: int
    full_micros_h: int

    def __str__(self) -> str:
        return f"{rate(round(self.micros_h, -2))} of useful work, {rate(self.full_micros_h)} on demand,"


def expensive_pools(inputs: PolicyInput, state: FleetState, now: float) -> dict[str, Expensive]:
    """Return the spot pools in which useful work costs no less than on the same machines on demand.

    A pool of the last decision stays among them until it costs CHEAPER of the on-demand price.
    """
    last = state.history.decided.shun if state.history.decided else ()
    beside = inputs.beside
    compared = [o for o in inputs.taken if o.pool in beside and not o.reserved]
    use = useful_price_by_pool(state, compared, inputs.target, now) if compared else {}
    return {pool: Expensive(round(micros), beside[pool]) for pool, micros in use.items()
            if micros >= beside[pool] * (CHEAPER if pool in last else 1.0)}


def _filled_in(inputs: PolicyInput, state: FleetState, moment: DecisionInput, base: int, now: float) -> MarketTarget:
    """Return the choice in which on-demand hosts fill in where spot is unavailable for long."""
    wanted = inputs.target - base
    since, refused = refused_since(inputs, state), moment.room == 0
    waited_s = now - since if since is not None else 0.0
    booting = [h for h in _hosts(state) if h.offer.market is Market.SPOT and h.state is HostState.LAUNCHING]
    late_s = max(LATE_LEAST_S, LATE * moment.boot_s)
    late = sum(now - h.since > late_s for h in booting)
    missing = max(0, wanted - moment.spot)
    fills = max(0, moment.on_demand - base)
    likely = likely_s(moment.availability, waited_s)
    gives_up = missing > 0 and (none_on_sale(inputs) or (since is not None and likely >= moment.boot_s))
    short = min(max(0, wanted - moment.spot_ready), late + (missing if gives_up else 0))
    settled = sum(h.state is HostState.UP and now - h.since >= min(moment.boot_s, SETTLED_S)
                  for h in _hosts(state) if h.offer.market is Market.SPOT)
    keep = _unrelieved(replace(moment, on_demand=fills), settled + base)
    extra = min(wanted, max(short, keep))
    if short and extra == short:
        if none_on_sale(inputs):
            why = f"no spot host is offered at the price: {short} on demand fill in"
        elif gives_up:
            why = (f"spot is refused for {about(waited_s)} and likely to be for {about(likely)} more, a boot takes "
                   f"{_boot(moment)}: {short} on demand fill in")
        else:
            why = f"{late} spot hosts boot for more than {about(late_s)}: on-demand hosts fill in"
    elif extra:
        why = f"{extra} on demand stay until {wanted} spot hosts have been up for a while"
    elif missing and refused:
        why = f"spot is refused for {about(waited_s)}: wait, on-demand hosts take {_boot(moment)} to boot"
    else:
        why = "spot hosts are available"
    held = 0 if inputs.needed is None else max(0, extra - max(0, inputs.needed - base - moment.spot_ready))
    if held:
        why = f"no job runs or waits, so on-demand hosts fill in up to nodes.min, {inputs.needed}, alone: {why}"
    return MarketTarget(wanted, base + extra - held, why, "auto", held=held)


def _boot(moment: DecisionInput) -> str:
    return about(moment.boot_s) + ("" if moment.boots else " (assumed, none was measured)")


def likely_s(availability: AvailabilityHistory, waited_s: float) -> float:
    """Return how much longer spot is likely to be refused, after `waited_s` of refusals.

    This is the mean remaining length of earlier periods that lasted longer, and of one assumed period that goes on for
    as long as it has lasted. The latter represents everything not yet observed.
    """
    past = [s.until - s.since for s in availability.periods[:-1] if not s.available]
    rest = [length - waited_s for length in past if length > waited_s]
    return (waited_s + sum(rest)) / (1 + len(rest))


def refused_since(inputs: PolicyInput, state: FleetState) -> float | None:
    """Return since when every spot pool on offer has refused without a success; None if one has not refused."""
    since: list[float] = []
    for offer in spot_offers(inputs):
        first = [past.first_at for key in scope_keys(offer).values() if (past := state.refusals.get(key)) is not None]
        if not first:
            return None
        since.append(min(first))
    return max(since, default=None)


def none_on_sale(inputs: PolicyInput) -> bool:
    return inputs.offers is not None and not spot_offers(inputs)


# ---- the present hosts and room


def _hosts(state: FleetState) -> list[Host]:
    return [h for h in state.hosts if h.role is Role.WORKER and h.counts and h.notice_deadline is None]


def _ready(hosts: Sequence[Host]) -> int:
    return sum(h.state is HostState.UP and h.silent_since is None for h in hosts)


def _room(inputs: PolicyInput, state: FleetState, now: float) -> int | None:
    if inputs.offers is None:
        return None
    usable = [o for o in spot_offers(inputs) if cooling_until(state, o) <= now]
    return None if any(not o.room for o in usable) else sum(o.room for o in usable)


def _unrelieved(moment: DecisionInput, relieving: int) -> int:
    """Return the number of on-demand hosts that must stay until spot hosts work in their place."""
    return max(0, min(moment.on_demand, moment.hosts - relieving))
