"""Decide what a fleet needs next. Pure: the same arguments give the same actions.

What frees a host that is stuck:

    LAUNCHING   `launch_timeout_s` -> Terminate, and another is launched
    UP          a notice or the user's wish -> Drain; agent silent for `silent_timeout_s` -> Terminate
    DRAINING    holds no worker any more, or `drain_timeout_s` -> Terminate
    STOPPED     `restart_after_s` -> Terminate
    any         its token was revoked -> Terminate
    terminating asked again every `RETRY_S` until the cloud lists it as ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotfleet.fleet.fold import FleetState, Host, cooling_until, scope_keys
from spotfleet.model import CloudState, HostState, Market, Need, Notice, Offer, Role

RETRY_S = 10.0  # between two requests to terminate the same host
GOES_DOWN = "the fleet goes down"
SPREAD_WITHIN = 1.5  # pools up to this many times the cheapest price share the hosts
RECLAIM_MEMORY_S = 180.0  # over 92 % of co-interruptions of a pool come within three minutes (arXiv 2604.16457)


@dataclass(frozen=True)
class Wanted:
    """The hosts of one role that should exist. `hosts` == 0 means down."""

    fleet: str
    role: Role
    hosts: int
    any_of: tuple[Need, ...] = (Need(),)
    interruption_behavior: str = "terminate"
    tags: dict[str, str] = field(default_factory=dict)
    launch_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0
    restart_after_s: float = 600.0
    silent_timeout_s: float = 120.0  # for workers only: a laptop off the network must not replace its dispatcher


@dataclass(frozen=True)
class Observed:
    """What the caller sees of the hosts themselves, by request_id."""

    joined: Mapping[str, str] = field(default_factory=dict)  # agents connected and ready -> incarnation
    notices: Mapping[str, Notice] = field(default_factory=dict)
    released: frozenset[str] = frozenset()  # draining hosts that hold no worker any more
    drain: Mapping[str, str] = field(default_factory=dict)  # hosts the user asked to drain -> why
    busy: frozenset[str] = frozenset()  # hosts that hold workers: the last to go when there are too many
    settle_until: float = 0.0  # after the caller's restart: nothing is launched or ended before, unless all joined


@dataclass(frozen=True)
class Launch:
    request_id: str
    offer: Offer
    why: str


@dataclass(frozen=True)
class Drain:
    request_id: str
    why: str


@dataclass(frozen=True)
class Terminate:
    request_id: str
    why: str


@dataclass(frozen=True)
class Wait:
    why: str


Action = Launch | Drain | Terminate | Wait


def plan(wanted: Wanted, state: FleetState, offers: Sequence[Offer], observed: Observed, now: float) -> list[Action]:
    """The actions that move `state` towards `wanted`; [] when nothing is left to do."""
    drains = urgent(wanted, state, observed)
    unheard = settling(wanted, state, observed, now)
    if unheard:
        return [*drains, Wait(f"after a restart: waiting for {', '.join(unheard)} to report, "
                              f"until {clock(observed.settle_until)}")]
    ends = _ends(wanted, state, observed, now)
    staying = _staying(wanted, state, [*drains, *ends])
    surplus = _surplus(wanted, staying, observed)
    missing = wanted.hosts - len(staying)
    launches = _launches(wanted, state, offers, staying, now) if missing > 0 else []
    return [*drains, *ends, *surplus, *launches]


def missing(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> int:
    """How many hosts `plan` would launch if everything were on offer; 0 while it settles."""
    if settling(wanted, state, observed, now):
        return 0
    leaving = [*urgent(wanted, state, observed), *_ends(wanted, state, observed, now)]
    return max(0, wanted.hosts - len(_staying(wanted, state, leaving)))


def urgent(wanted: Wanted, state: FleetState, observed: Observed) -> list[Drain]:
    """The drains that wait for no provider: hosts that the cloud takes, hosts the user gives away, all at the end."""
    drains = []
    for host in _hosts(wanted, state):
        if not host.counts:
            continue
        if host.notice_deadline is not None:
            drains.append(Drain(host.request_id, f"the cloud takes it at {clock(host.notice_deadline)}"))
        elif host.request_id in observed.drain:
            drains.append(Drain(host.request_id, observed.drain[host.request_id]))
        elif wanted.hosts == 0 and host.state is HostState.UP:
            drains.append(Drain(host.request_id, GOES_DOWN))
    return drains


def settling(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[str]:
    """The running hosts whose agents are still to report after the caller's restart; [] once that is over."""
    if now >= observed.settle_until:
        return []
    return [h.request_id for h in _hosts(wanted, state)
            if h.state is not HostState.STOPPED and h.cloud is CloudState.RUNNING
            and h.terminate_at is None and not h.revoked and h.request_id not in observed.joined]


def matches(need: Need, offer: Offer) -> bool:
    """Is `offer` what `need` describes, whatever it costs?"""
    market = Market.SPOT if need.use_spot else Market.ON_DEMAND
    return (offer.market is market
            and need.region in ("", offer.region)
            and need.zone in ("", offer.zone)
            and need.instance_type in ("", offer.instance_type)
            and need.accelerator.casefold() in ("", offer.accelerator.casefold())
            and (not need.accelerator_count or (bool(offer.accelerator) and offer.slots == need.accelerator_count)))


def clock(at: float) -> str:
    """12:03:10 UTC"""
    second = int(at) % 86400
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d} UTC"


def _hosts(wanted: Wanted, state: FleetState) -> list[Host]:
    return [h for h in state.hosts if h.role is wanted.role]


def _staying(wanted: Wanted, state: FleetState, leaving: Iterable[Drain | Terminate]) -> list[Host]:
    gone = {action.request_id for action in leaving}
    return [h for h in _hosts(wanted, state) if h.counts and h.request_id not in gone]


def _ends(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Terminate]:
    ends = []
    for host in _hosts(wanted, state):
        why = _end(wanted, host, observed, now)
        if why:
            ends.append(Terminate(host.request_id, why))
    return ends


def _end(wanted: Wanted, host: Host, observed: Observed, now: float) -> str:
    """Why `host` should be terminated now, "" if it should not."""
    held_s = now - host.since
    if host.terminate_at is not None:
        waited = now - host.terminate_at >= RETRY_S
        return f"not ended yet, asked at {clock(host.terminate_at)}" if waited else ""
    if host.revoked:
        return f"its token was revoked: {host.revoked}"
    match host.state:
        case HostState.LAUNCHING if held_s >= wanted.launch_timeout_s:
            return f"has not joined within {wanted.launch_timeout_s:.0f} s"
        case HostState.UP if _silent(wanted, host, now):
            return f"its agent has been silent for {wanted.silent_timeout_s:.0f} s"
        case HostState.DRAINING:
            return _drained(wanted, host, observed, now)
        case HostState.STOPPED if wanted.hosts == 0:
            return GOES_DOWN
        case HostState.STOPPED if held_s >= wanted.restart_after_s:
            return f"stopped by the cloud and not restarted within {wanted.restart_after_s:.0f} s"
    return ""


def _silent(wanted: Wanted, host: Host, now: float) -> bool:
    return (host.role is Role.WORKER and host.silent_since is not None
            and now - host.silent_since >= wanted.silent_timeout_s)


def _drained(wanted: Wanted, host: Host, observed: Observed, now: float) -> str:
    begun = host.since
    if host.notice_action == "stop" and host.notice_deadline is not None and wanted.hosts:
        begun = max(begun, host.notice_deadline)  # the cloud stops it and may bring it back: leave it that chance
    elif host.request_id in observed.released:
        return f"drained: {host.why}"
    if now - begun >= wanted.drain_timeout_s:
        return f"not drained within {wanted.drain_timeout_s:.0f} s: {host.why}"
    return ""


def _surplus(wanted: Wanted, staying: list[Host], observed: Observed) -> list[Drain | Terminate]:
    """Those that hold no work go first, then the dearest, then the newest."""
    def worth(host: Host) -> tuple:
        return (host.request_id in observed.busy, host.state is HostState.UP, -host.offer.price_micros_h, -host.since,
                host.request_id)

    extra = sorted(staying, key=worth)[:max(0, len(staying) - wanted.hosts)]
    why = GOES_DOWN if wanted.hosts == 0 else f"{len(staying)} hosts, {wanted.hosts} wanted"
    return [Drain(h.request_id, why) if h.state is HostState.UP else Terminate(h.request_id, why) for h in extra]


def _launches(wanted: Wanted, state: FleetState, offers: Sequence[Offer], staying: list[Host],
              now: float) -> list[Launch | Wait]:
    have, lacking = len(staying), wanted.hosts - len(staying)
    usable = {o: i for o in offers if (i := _preference(wanted, o)) >= 0 and cooling_until(state, o) <= now}
    if not usable:
        return [Wait(f"{lacking} of {wanted.hosts} hosts missing: {_obstacles(wanted, state, offers, now)}")]
    cheapest = min(o.price_micros_h for o in usable)
    near = [o for o in usable if o.price_micros_h <= cheapest * SPREAD_WITHIN]
    load = Counter(h.offer.pool for h in staying)

    def cost(offer: Offer) -> tuple:
        burnt = now - state.reclaimed_at.get(offer.pool, -RECLAIM_MEMORY_S) < RECLAIM_MEMORY_S
        return (burnt, load[offer.pool], offer.price_micros_h, usable[offer], offer.pool)

    launches = []
    for n in range(lacking):
        offer = min(near, key=cost)
        load[offer.pool] += 1
        launches.append(Launch(request_id(wanted, state.launches + n), offer,
                               f"{have + n} of {wanted.hosts} hosts; {dollars(offer.price_micros_h)} in {offer.pool}"))
    return launches


def request_id(wanted: Wanted, number: int) -> str:
    """FLEET-N for a worker host, FLEET-d-N for a dispatcher."""
    return f"{wanted.fleet}-d-{number}" if wanted.role is Role.DISPATCHER else f"{wanted.fleet}-{number}"


def _preference(wanted: Wanted, offer: Offer) -> int:
    """The place in the user's `any_of` of the first need that `offer` meets at its price; -1 for none."""
    for place, need in enumerate(wanted.any_of):
        if matches(need, offer) and (not need.max_micros_h or offer.price_micros_h <= need.max_micros_h):
            return place
    return -1


def _obstacles(wanted: Wanted, state: FleetState, offers: Sequence[Offer], now: float) -> str:
    """What stands in the way of a launch, and until when."""
    cooling: dict[str, float] = {}
    dear = []
    for offer in offers:
        if _preference(wanted, offer) >= 0:
            for key in scope_keys(offer).values():
                if state.cooldown_until.get(key, 0.0) > now:
                    cooling[key] = state.cooldown_until[key]
        elif any(matches(need, offer) for need in wanted.any_of):
            dear.append(offer)
    reasons = [f"{key} refused, asked again at {clock(until)}" for key, until in sorted(cooling.items())]
    if dear:
        least = min(dear, key=lambda o: (o.price_micros_h, o.pool))
        limit = max(n.max_micros_h for n in wanted.any_of if matches(n, least))
        reasons.append(f"the cheapest of {len(dear)} offers above the limit is {dollars(least.price_micros_h)} "
                       f"in {least.pool}, the limit is {dollars(limit)}")
    if not reasons:
        reasons.append(f"nothing on sale is {' or '.join(_describe(n) for n in wanted.any_of)}; "
                       "looked up again at every tick")
    return "; ".join(reasons)


def _describe(need: Need) -> str:
    accelerator = f"{need.accelerator}:{need.accelerator_count or 1}" if need.accelerator else ""
    parts = ["spot" if need.use_spot else "on-demand", need.instance_type, accelerator, need.zone or need.region]
    return " ".join(p for p in parts if p)


def dollars(micros_h: int) -> str:
    """$0.123456/h, without superfluous zeros."""
    text = f"{micros_h // 1_000_000}.{micros_h % 1_000_000:06d}"
    whole, _, fraction = text.partition(".")
    return f"${whole}.{fraction.rstrip('0').ljust(2, '0')}/h"
