"""Planner: the next actions of a fleet. Pure: the same arguments give the same actions.

What frees a host that is stuck:

    LAUNCHING   `launch_timeout_s` -> Terminate, and another is launched
    UP          a notice or the user's request -> Drain; agent silent for `silent_timeout_s` -> Terminate
    DRAINING    no worker and no unsent result left, or `drain_timeout_s` -> Terminate
                after a notice in the time that is free if the cloud ends the run: the cloud ends it
                with unsent results its time in `Observed.unsent`, which the dispatcher decides
    STOPPED     `restart_after_s` -> Terminate
    any         unusable beside the others -> Drain or Terminate
    any         a second machine of a host -> Terminate
    any         its token was revoked -> Terminate
    any         its machine is broken, as it reports -> Terminate
    terminating requested again every `RETRY_S` until the cloud lists it as ended
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotfleet.fleet.domain.actions import Action, Drain, Launch, Observed, Terminate, Wait, Wanted
from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.domain.state import FleetState, Host, of_group
from spotfleet.fleet.planner.groups import limits_of_groups
from spotfleet.fleet.planner.pool_choice import SPREAD_WITHIN, because, common_place, launches, place
from spotfleet.fleet.policy.mix import shares
from spotfleet.fleet.policy.pools import host_charge, offer_charges, price_now
from spotfleet.model import SECOND, CloudState, HostState, Market, Need, Offer, Role
from spotfleet.words import about, clock_utc, counted, rate

RETRY_S = 10.0  # between two requests to terminate the same host
SOON_S = 150.0  # an interruption comes sooner after its notice; clouds announce maintenance longer before, and bill it
GOES_DOWN = "the fleet goes down"

__all__ = [
    "SPREAD_WITHIN",
    "Action",
    "Drain",
    "Launch",
    "Observed",
    "Terminate",
    "Wait",
    "Wanted",
    "missing_needs",
    "plan",
    "settling",
    "urgent",
]


def plan(wanted: Wanted, state: FleetState, offers: Sequence[Offer], observed: Observed, now: float) -> list[Action]:
    """Return the actions that move `state` towards `wanted`; [] when nothing is left to do."""
    if wanted.parts:
        return _plan_groups(wanted, state, offers, observed, now)
    drains = urgent(wanted, state, observed)
    unreported = settling(wanted, state, observed, now)
    if unreported:
        return [*drains, Wait(f"after a restart: waiting for {', '.join(unreported)} to report, "
                              f"until {clock_utc(observed.settle_until)}")]
    ends = _ends(wanted, state, observed, now)
    staying = _staying(wanted, state, [*drains, *ends])
    apart = _apart(wanted, state, staying)
    staying = _staying(wanted, state, [*drains, *ends, *apart])
    surplus = _surplus(wanted, state, staying, observed)
    more = launches(wanted, state, offers, _staying(wanted, state, [*drains, *ends, *apart, *surplus]), now)
    return [*drains, *ends, *apart, *surplus, *more]


def _plan_groups(wanted: Wanted, state: FleetState, offers: Sequence[Offer], observed: Observed,
                 now: float) -> list[Action]:
    """Return the plans of all groups: the numbers of their launches and the limit on the price are the fleet's."""
    drains = urgent(wanted, state, observed)
    if settling(wanted, state, observed, now):
        return plan(replace(wanted, parts=()), state, offers, observed, now)
    actions: list[Action] = []
    limits = limits_of_groups(wanted, state)
    launched, spent = state.launches, 0
    for part in wanted.parts:
        view = replace(of_group(state, part.group), launches=launched)
        limit = max(1, limits[part.group] - spent) if wanted.max_micros_h else 0
        found = plan(replace(part, max_micros_h=limit), view, offers, observed, now)
        begun = [a.offer for a in found if isinstance(a, Launch)]
        launched += len(begun)
        spent += sum(offer_charges(state, begun, now)[offer] for offer in begun)
        actions += found
    names = {part.group for part in wanted.parts}
    strays = replace(state, hosts=tuple(h for h in _hosts(wanted, state) if h.group not in names))
    nowhere = replace(wanted, hosts=0, on_demand=0, parts=(), stays=True, why="in no group of the fleet file")
    actions += plan(nowhere, strays, (), observed, now)
    return list(dict.fromkeys([*drains, *actions]))


def missing_needs(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Need]:
    """Return the needs of the hosts that `plan` would launch if everything were on offer; [] while it settles."""
    if settling(wanted, state, observed, now):
        return []
    if wanted.parts:
        return list(dict.fromkeys(need for part in wanted.parts for need in
                                  missing_needs(part, of_group(state, part.group), observed, now)))
    leaving = [*urgent(wanted, state, observed), *_ends(wanted, state, observed, now)]
    leaving += _apart(wanted, state, _staying(wanted, state, leaving))
    staying = _staying(wanted, state, leaving)
    return [n for share in shares(wanted) if share.wanted.hosts > len(share.of(staying)) for n in share.wanted.any_of]


def urgent(wanted: Wanted, state: FleetState, observed: Observed) -> list[Drain]:
    """Return the drains that need no provider: interrupted hosts, hosts that the user drains, all when going down."""
    drains = []
    for host in _hosts(wanted, state):
        if not host.counts:
            continue
        if host.notice_deadline is not None:
            drains.append(Drain(host.request_id, f"interruption notice: it ends at {clock_utc(host.notice_deadline)}"))
        elif host.request_id in observed.drain:
            drains.append(Drain(host.request_id, observed.drain[host.request_id]))
        elif wanted.is_down and host.state is HostState.UP:
            drains.append(Drain(host.request_id, GOES_DOWN))
    return drains


def settling(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[str]:
    """Return the running hosts whose agents have not reported since the caller's restart; [] after `settle_until`."""
    if now >= observed.settle_until:
        return []
    return [h.request_id for h in _hosts(wanted, state)
            if h.state is not HostState.STOPPED and h.cloud is CloudState.RUNNING
            and h.terminate_at is None and not h.revoked and not h.failed and not h.is_second
            and h.request_id not in observed.joined]


def _hosts(wanted: Wanted, state: FleetState) -> list[Host]:
    return [h for h in state.hosts if h.role is wanted.role]


def _staying(wanted: Wanted, state: FleetState, leaving: Iterable[Drain | Terminate]) -> list[Host]:
    gone = {action.request_id for action in leaving}
    return [h for h in _hosts(wanted, state) if h.counts and h.request_id not in gone]


def _ends(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Terminate]:
    ends = []
    free_s = state.created.billing.free_if_taken_within_s if state.created is not None else 0
    for host in _hosts(wanted, state):
        why = _end(wanted, host, observed, now, free_s)
        if why:
            ends.append(Terminate(host.request_id, why))
    return ends


def _end(wanted: Wanted, host: Host, observed: Observed, now: float, free_s: float) -> str:
    """Return why `host` should be terminated now; "" if it should not."""
    held_s = now - host.since
    if host.terminate_at is not None:
        waited = now - host.terminate_at >= RETRY_S
        return f"not ended yet, asked at {clock_utc(host.terminate_at)}" if waited else ""
    if host.is_second:
        return f"a second machine of {host.request_id.partition(SECOND)[0]}, which nobody asked for"
    if host.revoked:
        return f"its token was revoked: {host.revoked}"
    if host.broken:
        return f"its machine is broken: {host.failed}"
    match host.state:
        case HostState.LAUNCHING if held_s >= wanted.launch_timeout_s:
            return f"has not joined within {wanted.launch_timeout_s:.0f} s"
        case HostState.UP if _silent(wanted, host, now):
            return f"its agent has been silent for {wanted.silent_timeout_s:.0f} s"
        case HostState.DRAINING:
            return _drained(wanted, host, observed, now, free_s)
        case HostState.STOPPED if wanted.is_down:
            return GOES_DOWN
        case HostState.STOPPED if held_s >= wanted.restart_after_s:
            return f"stopped by the cloud and not restarted within {wanted.restart_after_s:.0f} s"
    return ""


def _silent(wanted: Wanted, host: Host, now: float) -> bool:
    return (host.role is Role.WORKER and host.silent_since is not None
            and now - host.silent_since >= wanted.silent_timeout_s)


def _drained(wanted: Wanted, host: Host, observed: Observed, now: float, free_s: float) -> str:
    begun = host.since
    if host.notice_deadline is not None:  # after an early notice the host has the whole time
        begun = max(begun, host.notice_deadline - wanted.drain_timeout_s)
    if host.notice_deadline is not None and not wanted.is_down and (
            host.notice_action == "stop" or _free_if_taken(host, host.notice_deadline, free_s)):
        begun = max(begun, host.notice_deadline)  # the cloud ends the run, and may restart a stopped host: wait for it
    elif host.request_id in observed.released:
        return f"drained: {host.why}"
    if (stays_s := observed.unsent.get(host.request_id)) is not None:
        return "" if stays_s > 0 else f"not drained, its time to send results is over: {host.why}"
    if now - begun >= wanted.drain_timeout_s:
        return f"not drained within {wanted.drain_timeout_s:.0f} s: {host.why}"
    return ""


def _free_if_taken(host: Host, deadline: float, free_s: float) -> bool:
    """Return whether the cloud would not bill the current run if it ends the host at `deadline`; it bills our end."""
    return (bool(host.runs) and host.offer.sold == Market.SPOT.value and deadline - host.runs[-1].started_at <= free_s
            and deadline - host.since <= SOON_S)


def _apart(wanted: Wanted, state: FleetState, staying: list[Host]) -> list[Drain | Terminate]:
    """Return the ends of hosts that are unusable beside the others.

    These are hosts outside the place that all must share, and the launched part of a gang with a refusal.
    """
    common = common_place(wanted, staying)
    apart: list[Drain | Terminate] = []
    for host in staying:
        why = ""
        if place(wanted, host.offer) != common:
            why = f"it is in {place(wanted, host.offer)}, the fleet in {common}"
        elif refused := _refused_of(wanted, state, host):
            why = f"all or none: {refused} was refused"
        if why:
            apart.append(Drain(host.request_id, why) if host.state is HostState.UP else Terminate(host.request_id, why))
    return apart


def _refused_of(wanted: Wanted, state: FleetState, host: Host) -> str:
    others = (state.host(name) for name in host.together) if wanted.all_or_nothing else ()
    return next((h.request_id for h in others if h is not None and h.was_refused), "")


def _surplus(wanted: Wanted, state: FleetState, staying: list[Host], observed: Observed) -> list[Drain | Terminate]:
    """Return the ends of hosts beyond the number of their kind, and of hosts that exceed the limit on the price.

    Hosts without work go first, then those with a hint of interruption, the most expensive, the newest. Those in
    reserved capacity stay longest: it costs as much without them.
    """
    def worth(host: Host) -> tuple:
        return (host.request_id in observed.busy, host.request_id not in observed.idle, bool(host.offer.reserved),
                host.state is HostState.UP, not host.hint, -host.offer.price_micros_h, -host.since, host.request_id)

    def idle(host: Host) -> str:
        seconds = observed.idle.get(host.request_id)
        return "" if seconds is None or wanted.is_down else f"without work for {about(seconds)}; "

    extra: dict[str, tuple[Host, str]] = {}
    for share in shares(wanted):
        own, hosts = share.of(staying), share.wanted.hosts
        why = f"{counted(len(own), share.called.removesuffix('s'))}, {hosts} wanted"
        why = GOES_DOWN if wanted.is_down else because(wanted, why)
        extra.update((h.request_id, (h, f"{idle(h)}{why}")) for h in sorted(own, key=worth)[:max(0, len(own) - hosts)])
    if wanted.max_micros_h:
        left = [h for h in staying if h.request_id not in extra]
        burn = sum(host_charge(state, h) for h in left)
        for host in sorted(left, key=lambda h: (-price_now(state, h)[0], worth(h))):
            if burn <= wanted.max_micros_h:
                break
            why = f"hosts cost {rate(burn)}, and max_hourly_cost leaves {rate(wanted.max_micros_h)} for them"
            extra[host.request_id] = host, why
            burn -= host_charge(state, host)
    return [Drain(h.request_id, why) if h.state is HostState.UP else Terminate(h.request_id, why)
            for h, why in extra.values()]
