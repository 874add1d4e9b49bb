"""How many hosts of either market there should be now, and why. Pure: the same arguments give the same choice.

    spot        all of the target are spot hosts, but for `on_demand_base`
    on-demand   all are on demand
    auto        on-demand hosts fill in for spot hosts that are not to be had, once waiting has lasted as long as it is
                likely to go on (`likely_s`) by what was seen before, and a boot takes less; they go again when spot
                hosts have been up for a while. Where spot costs no less than on demand, it is on demand (`dearer`).
                Once no job runs or waits, on-demand hosts fill in up to nodes.min alone
    deadline    a job has one: as many on demand as it takes to be in time (`deadline.py`)

Whatever changes, a host that works goes only when the one which relieves it works too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from spotfleet.fleet.actions import dollars, matches
from spotfleet.fleet.copies import replace
from spotfleet.fleet.fold import FleetState, cooling_until, scope_keys
from spotfleet.fleet.host import Host
from spotfleet.fleet.policy import deadline
from spotfleet.fleet.policy.lifetimes import boot_s, stall_s
from spotfleet.fleet.policy.memory import plenty, remember
from spotfleet.fleet.policy.mix import on_demand_needs
from spotfleet.fleet.policy.pools import of_use
from spotfleet.fleet.policy.values import Choice, Memory, Moment
from spotfleet.model import HostState, Market, Need, Offer, PolicySpec, Role

TICK_S = 10.0  # between two decisions at most, where nothing happens
SETTLED_S = 300.0  # a spot host that has been up for as long as a boot takes, or so long, relieves another
CHEAPER = 0.95  # a pool that has cost no less than on demand is taken again once it costs so much of that
LATE = 2.0  # a spot host that boots for so many times as long as others do counts as missing


@dataclass(frozen=True)
class Task:
    """What is left of a job that has a deadline."""

    job: str
    left_s: float  # until its deadline; negative once that is over
    work_s: float  # host-seconds; infinite while nobody knows
    hosts: int = 0  # it can use so many at most; 0: all of the target
    held: int = 0  # it has so many when all of the target are up; 0: it waits, or nobody asked


@dataclass(frozen=True)
class Scene:
    """What is asked of the fleet, and what is on sale."""

    policy: PolicySpec
    any_of: tuple[Need, ...]
    target: int  # hosts
    tasks: tuple[Task, ...] = ()
    offers: tuple[Offer, ...] | None = None  # for the needs, in both markets; None: nobody has looked yet
    busy: int = 0  # hosts that jobs without a deadline have when all of the target are up
    needed: int | None = None  # on-demand hosts fill in up to so many, as no job runs or waits; None: up to the target

    DERIVED: ClassVar = {"taken": ("any_of", "offers"), "full": ("any_of", "offers"),
                         "beside": ("any_of", "offers")}

    @cached_property
    def taken(self) -> list[Offer]:
        """Spot offers that a need takes at its price."""
        return self._sold(Market.SPOT, self.any_of)

    @cached_property
    def full(self) -> list[Offer]:
        """On-demand offers that would fill in, of a known price."""
        return [o for o in self._sold(Market.ON_DEMAND, on_demand_needs(self.any_of)) if o.price_micros_h]

    @cached_property
    def beside(self) -> dict[str, int]:
        """Spot pools taken -> what the same machine costs on demand in the zone, or if it is not sold there in the
        region; micro-dollars an hour. Without those that have no such machine beside them."""
        prices: dict[tuple[str, ...], int] = {}
        for o in self.full:
            for place in (o.zone, ""):
                key = (o.provider, o.region, o.instance_type, place)
                prices[key] = min(o.price_micros_h, prices.get(key, o.price_micros_h))
        found = {o.pool: prices.get((o.provider, o.region, o.instance_type, o.zone)) or prices.get(
            (o.provider, o.region, o.instance_type, "")) for o in self.taken}
        return {pool: price for pool, price in found.items() if price}

    def _sold(self, market: Market, needs: Sequence[Need]) -> list[Offer]:
        return [o for o in self.offers or () if o.market is market and any(
            matches(n, o) and (not n.max_micros_h or o.price_micros_h <= n.max_micros_h) for n in needs)]


def is_plain(scene: Scene, state: FleetState) -> bool:
    """Is there nothing to decide, since hosts are simply of the markets that the needs name?"""
    policy, markets = scene.policy, {n.use_spot for n in scene.any_of}
    odd = any(h.offer.market is Market.ON_DEMAND for h in _hosts(state))
    asked = policy.spot_policy != "spot" or policy.on_demand_base or scene.tasks
    return not asked and not (odd and markets == {True})


def decide(scene: Scene, state: FleetState, now: float) -> Choice:
    """What there should be now. Never more than the target of either market."""
    policy, target = scene.policy, scene.target
    base = min(policy.on_demand_base, target)
    moment = moment_of(scene, state, now)
    if target == 0:
        return Choice(0, 0, "no host is wanted", "base")
    task = _tightest(scene)
    if policy.spot_policy == "on-demand" or not any(n.use_spot for n in scene.any_of):
        why = "spot_policy: on-demand" if policy.spot_policy == "on-demand" else "the needs allow no spot host"
        choice = Choice(0, target, why, "on-demand")
    elif task is not None:
        due = _in_time(task, moment)
        choice = replace(due, spot=min(due.spot, target - base), on_demand=max(base, due.on_demand))
    elif policy.spot_policy == "auto" or scene.tasks:
        choice = _auto(scene, state, moment, base, now)
    else:
        why = f"on_demand_base: {base} of {target} hosts" if base else "spot_policy: spot"
        choice = Choice(target - base, max(base, _unrelieved(moment, moment.spot_ready)), why, "base")
    if moment.on_demand_ready < choice.on_demand:  # those that are to be on demand boot yet
        choice = replace(choice, spot=max(choice.spot, min(moment.spot, target - moment.on_demand_ready)))
    return choice


def moment_of(scene: Scene, state: FleetState, now: float) -> Moment:
    """What there is now."""
    hosts = _hosts(state)
    spot = [h for h in hosts if h.offer.market is Market.SPOT]
    full = [h for h in hosts if h.offer.market is Market.ON_DEMAND]
    prices = [o.price_micros_h for o in spot_offers(scene)]
    memory, room = state.seen.memory, _room(scene, state, now)
    if memory.spells:  # the last one goes on, unless it is plain that it does not
        held = plenty(len(spot), 0, scene.target)
        memory = remember(memory, now, held or (room != 0 and memory.spells[-1].available))
    dear = [o.price_micros_h for o in scene.offers or () if o.market is Market.ON_DEMAND]
    return Moment(
        now, scene.target, len(spot), _ready(spot), len(full), _ready(full), room,
        boot_s=boot_s(state), stall_s=stall_s(state), tick_s=TICK_S, spot_micros_h=min(prices, default=0),
        on_demand_micros_h=min(dear, default=0), memory=memory)


def spot_offers(scene: Scene) -> list[Offer]:
    """Those that a need takes at its price."""
    return scene.taken


# ---- deadline


def _tightest(scene: Scene) -> Task | None:
    """The deadline that leaves least slack per host, all the work that is due by then, and the hosts for it; None where
    no work is known, or more was done than was said.

    Jobs keep the hosts that they have: those of jobs that are due later, or whose work nobody knows, are not for it. A
    job that waits for such a host counts with all of them, as nobody knows how long it will.
    """
    known = sorted((t for t in scene.tasks if 0 < t.work_s < math.inf), key=lambda t: t.left_s)
    busy, found = scene.busy + sum(t.held for t in scene.tasks if t not in known), []
    for n, task in enumerate(known):
        others = busy + sum(t.held for t in known[n + 1:])
        free = scene.target - others if others < scene.target else scene.target
        can = [min(free, t.hosts or free) for t in known[:n + 1]]
        found.append(replace(task, hosts=can[-1]))
        found.append(replace(task, work_s=sum(t.work_s for t in known[:n + 1]), hosts=min(free, sum(can))))
    return min(found, key=lambda t: t.left_s - t.work_s / t.hosts, default=None)


def _in_time(task: Task, moment: Moment) -> Choice:
    """For the hosts that the job can use; the others are of any market, as long as it may be on any."""
    few, rest = task.hosts, moment.hosts - task.hosts
    due = replace(moment, hosts=few, left_s=task.left_s, work_s=task.work_s)
    if rest:
        due = replace(due, spot=min(few, due.spot), spot_ready=min(few, due.spot_ready),
                      on_demand=min(few, due.on_demand), on_demand_ready=min(few, due.on_demand_ready))
    choice = deadline.choose(due)
    if not rest:
        return replace(choice, why=f"{task.job}: {choice.why}")
    choice = replace(choice, why=f"{task.job}, on {few} of {moment.hosts} hosts: {choice.why}")
    if choice.spot < few:  # it must not be on more spot hosts than that, and nobody says which hosts it is on
        return replace(choice, on_demand=choice.on_demand + rest)
    kept = max(choice.on_demand, _unrelieved(moment, moment.spot_ready))
    return replace(choice, spot=moment.hosts, on_demand=kept)


# ---- auto


def _auto(scene: Scene, state: FleetState, moment: Moment, base: int, now: float) -> Choice:
    dear = dearer(scene, state, now)
    full_refused = all(cooling_until(state, o) > now for o in scene.full)
    if not dear or (full_refused and len(dear) < len(scene.taken)):
        return _filled_in(scene, state, moment, base, now)
    pool = min(dear, key=lambda p: (dear[p].micros_h, p))
    why = f"{dear[pool]} in {pool}"
    if len(dear) == len(scene.taken):
        fills = scene.target - min(scene.target, moment.on_demand) if full_refused else 0
        refused = f", but refused: {fills} spot hosts stand in" if fills else ""
        return Choice(fills, scene.target, f"spot costs no less than on demand{refused}: {why}", "auto",
                      shun=() if fills else tuple(sorted(dear)))
    cheap = replace(scene, offers=tuple(o for o in scene.offers or () if o.pool not in dear))
    choice = _filled_in(cheap, state, moment_of(cheap, state, now), base, now)
    return replace(choice, why=f"{choice.why}; no more spot hosts at {why}", shun=tuple(sorted(dear)))


@dataclass(frozen=True)
class Dear:
    """What an hour of use costs in a spot pool, and on demand."""

    micros_h: int
    full_micros_h: int

    def __str__(self) -> str:
        return f"{dollars(round(self.micros_h, -2))} of use, {dollars(self.full_micros_h)} on demand,"


def dearer(scene: Scene, state: FleetState, now: float) -> dict[str, Dear]:
    """The spot pools in which useful work costs no less than on the same machines on demand. One that was among them
    when it was decided last still is, until it costs CHEAPER of that."""
    last = state.seen.decided.shun if state.seen.decided else ()
    beside = scene.beside
    use = of_use(state, [o for o in scene.taken if o.pool in beside], scene.target, now) if beside else {}
    return {pool: Dear(round(micros), beside[pool]) for pool, micros in use.items()
            if micros >= beside[pool] * (CHEAPER if pool in last else 1.0)}


def _filled_in(scene: Scene, state: FleetState, moment: Moment, base: int, now: float) -> Choice:
    """On-demand hosts where spot is not to be had for long."""
    wanted = scene.target - base
    since, refused = refused_since(scene, state), moment.room == 0
    waited_s = now - since if since is not None else 0.0
    booting = [h for h in _hosts(state) if h.offer.market is Market.SPOT and h.state is HostState.LAUNCHING]
    late = sum(now - h.since > LATE * moment.boot_s for h in booting)
    missing = max(0, wanted - moment.spot)
    fills = max(0, moment.on_demand - base)
    likely = likely_s(moment.memory, waited_s)
    gives_up = missing > 0 and (none_on_sale(scene) or (since is not None and likely >= moment.boot_s))
    short = min(max(0, wanted - moment.spot_ready), late + (missing if gives_up else 0))
    settled = sum(h.state is HostState.UP and now - h.since >= min(moment.boot_s, SETTLED_S)
                  for h in _hosts(state) if h.offer.market is Market.SPOT)
    keep = _unrelieved(replace(moment, on_demand=fills), settled + base)
    extra = min(wanted, max(short, keep))
    if short and extra == short:
        if none_on_sale(scene):
            why = f"no spot host is on sale at the price: {short} on demand fill in"
        elif gives_up:
            why = (f"spot is refused for {_span(waited_s)} and likely to be for {_span(likely)} more, a boot takes "
                   f"{_span(moment.boot_s)}: {short} on demand fill in")
        else:
            why = f"{late} spot hosts boot for more than {_span(LATE * moment.boot_s)}: on-demand hosts fill in"
    elif extra:
        why = f"{extra} on demand stay until {wanted} spot hosts have been up for a while"
    elif missing and refused:
        why = f"spot is refused for {_span(waited_s)}: wait, on-demand hosts take {_span(moment.boot_s)} to boot"
    else:
        why = "spot hosts are to be had"
    held = 0 if scene.needed is None else max(0, extra - max(0, scene.needed - base - moment.spot_ready))
    if held:
        why = f"no job runs or waits, so on-demand hosts fill in up to nodes.min, {scene.needed}, alone: {why}"
    return Choice(wanted, base + extra - held, why, "auto", held=held)


def likely_s(memory: Memory, waited_s: float) -> float:
    """How much longer spot will be refused, after it has been for `waited_s`: the mean of what was left of earlier
    spells that lasted longer, and of one that goes on for as long as it has lasted, which stands for all unseen."""
    past = [s.until - s.since for s in memory.spells[:-1] if not s.available]
    rest = [length - waited_s for length in past if length > waited_s]
    return (waited_s + sum(rest)) / (1 + len(rest))


def refused_since(scene: Scene, state: FleetState) -> float | None:
    """Since when every spot pool on sale has refused, without a launch that went well; None where one might do."""
    since: list[float] = []
    for offer in spot_offers(scene):
        first = [past.first_at for key in scope_keys(offer).values() if (past := state.refusals.get(key)) is not None]
        if not first:
            return None
        since.append(min(first))
    return max(since, default=None)


def none_on_sale(scene: Scene) -> bool:
    return scene.offers is not None and not spot_offers(scene)


# ---- what there is


def _hosts(state: FleetState) -> list[Host]:
    return [h for h in state.hosts if h.role is Role.WORKER and h.counts and h.notice_deadline is None]


def _ready(hosts: Sequence[Host]) -> int:
    return sum(h.state is HostState.UP and h.silent_since is None for h in hosts)


def _room(scene: Scene, state: FleetState, now: float) -> int | None:
    if scene.offers is None:
        return None
    usable = [o for o in spot_offers(scene) if cooling_until(state, o) <= now]
    return None if any(not o.room for o in usable) else sum(o.room for o in usable)


def _unrelieved(moment: Moment, relieving: int) -> int:
    """On-demand hosts that must stay until spot hosts work in their place."""
    return max(0, min(moment.on_demand, moment.hosts - relieving))


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else (
        f"{seconds / 3600:.1f} h")
