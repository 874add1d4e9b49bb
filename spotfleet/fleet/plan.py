"""Decide what a fleet needs next. Pure: the same arguments give the same actions.

What frees a host that is stuck:

    LAUNCHING   `launch_timeout_s` -> Terminate, and another is launched
    UP          a notice or the user's wish -> Drain; agent silent for `silent_timeout_s` -> Terminate
    DRAINING    holds no worker any more, or `drain_timeout_s` -> Terminate
    STOPPED     `restart_after_s` -> Terminate
    any         of no use beside the others -> Drain or Terminate
    any         a second machine of a host -> Terminate
    any         its token was revoked -> Terminate
    terminating asked again every `RETRY_S` until the cloud lists it as ended
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spotfleet.fleet.actions import Action, Drain, Launch, Observed, Terminate, Wait, Wanted, clock, dollars, matches
from spotfleet.fleet.choose import SPREAD_WITHIN, home_of, launches, place
from spotfleet.fleet.fold import FleetState, Host
from spotfleet.fleet.policy.mix import shares
from spotfleet.fleet.policy.pools import accepted, price_now
from spotfleet.model import SECOND, CloudState, HostState, Need, Offer, Role

RETRY_S = 10.0  # between two requests to terminate the same host
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
    "clock",
    "dollars",
    "lacking",
    "matches",
    "plan",
    "settling",
    "urgent",
]


def plan(wanted: Wanted, state: FleetState, offers: Sequence[Offer], observed: Observed, now: float) -> list[Action]:
    """The actions that move `state` towards `wanted`; [] when nothing is left to do."""
    drains = urgent(wanted, state, observed)
    unheard = settling(wanted, state, observed, now)
    if unheard:
        return [*drains, Wait(f"after a restart: waiting for {', '.join(unheard)} to report, "
                              f"until {clock(observed.settle_until)}")]
    ends = _ends(wanted, state, observed, now)
    staying = _staying(wanted, state, [*drains, *ends])
    apart = _apart(wanted, state, staying)
    staying = _staying(wanted, state, [*drains, *ends, *apart])
    surplus = _surplus(wanted, state, staying, observed)
    more = launches(wanted, state, offers, _staying(wanted, state, [*drains, *ends, *apart, *surplus]), now)
    return [*drains, *ends, *apart, *surplus, *more]


def lacking(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Need]:
    """What the hosts must be that `plan` would launch if everything were on offer; [] while it settles."""
    if settling(wanted, state, observed, now):
        return []
    leaving = [*urgent(wanted, state, observed), *_ends(wanted, state, observed, now)]
    leaving += _apart(wanted, state, _staying(wanted, state, leaving))
    staying = _staying(wanted, state, leaving)
    return [n for share in shares(wanted) if share.wanted.hosts > len(share.of(staying)) for n in share.wanted.any_of]


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
        elif not wanted.total and host.state is HostState.UP:
            drains.append(Drain(host.request_id, GOES_DOWN))
    return drains


def settling(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[str]:
    """The running hosts whose agents are still to report after the caller's restart; [] once that is over."""
    if now >= observed.settle_until:
        return []
    return [h.request_id for h in _hosts(wanted, state)
            if h.state is not HostState.STOPPED and h.cloud is CloudState.RUNNING
            and h.terminate_at is None and not h.revoked and not h.is_second and h.request_id not in observed.joined]


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
    if host.is_second:
        return f"a second machine of {host.request_id.partition(SECOND)[0]}, which nobody asked for"
    if host.revoked:
        return f"its token was revoked: {host.revoked}"
    match host.state:
        case HostState.LAUNCHING if held_s >= wanted.launch_timeout_s:
            return f"has not joined within {wanted.launch_timeout_s:.0f} s"
        case HostState.UP if _silent(wanted, host, now):
            return f"its agent has been silent for {wanted.silent_timeout_s:.0f} s"
        case HostState.DRAINING:
            return _drained(wanted, host, observed, now)
        case HostState.STOPPED if not wanted.total:
            return GOES_DOWN
        case HostState.STOPPED if held_s >= wanted.restart_after_s:
            return f"stopped by the cloud and not restarted within {wanted.restart_after_s:.0f} s"
    return ""


def _silent(wanted: Wanted, host: Host, now: float) -> bool:
    return (host.role is Role.WORKER and host.silent_since is not None
            and now - host.silent_since >= wanted.silent_timeout_s)


def _drained(wanted: Wanted, host: Host, observed: Observed, now: float) -> str:
    begun = host.since
    if host.notice_deadline is not None:  # one that is given long before has the whole time
        begun = max(begun, host.notice_deadline - wanted.drain_timeout_s)
    if host.notice_action == "stop" and host.notice_deadline is not None and wanted.total:
        begun = max(begun, host.notice_deadline)  # the cloud stops it and may bring it back: leave it that chance
    elif host.request_id in observed.released:
        return f"drained: {host.why}"
    if now - begun >= wanted.drain_timeout_s:
        return f"not drained within {wanted.drain_timeout_s:.0f} s: {host.why}"
    return ""


def _apart(wanted: Wanted, state: FleetState, staying: list[Host]) -> list[Drain | Terminate]:
    """Hosts that cannot be of use beside the others: in another place where all must be in one, or what came of a gang
    that was refused in part."""
    home = home_of(wanted, staying)
    apart: list[Drain | Terminate] = []
    for host in staying:
        why = ""
        if place(wanted, host.offer) != home:
            why = f"it is in {place(wanted, host.offer)}, the fleet in {home}"
        elif refused := _refused_of(wanted, state, host):
            why = f"all or none: {refused} was refused"
        if why:
            apart.append(Drain(host.request_id, why) if host.state is HostState.UP else Terminate(host.request_id, why))
    return apart


def _refused_of(wanted: Wanted, state: FleetState, host: Host) -> str:
    others = (state.host(name) for name in host.together) if wanted.all_or_nothing else ()
    return next((h.request_id for h in others if h is not None and h.was_refused), "")


def _surplus(wanted: Wanted, state: FleetState, staying: list[Host], observed: Observed) -> list[Drain | Terminate]:
    """Of each kind those beyond its number, and what the limit on their price has no room for: those that hold no work
    go first, then those that the cloud may take soon, the dearest, the newest."""
    def worth(host: Host) -> tuple:
        return (host.request_id in observed.busy, host.state is HostState.UP, not host.hint,
                -host.offer.price_micros_h, -host.since, host.request_id)

    extra: dict[str, tuple[Host, str]] = {}
    for share in shares(wanted):
        mine, hosts = share.of(staying), share.wanted.hosts
        why = f"{len(mine)} {share.called}, {hosts} wanted" if wanted.total else GOES_DOWN
        extra.update((h.request_id, (h, why)) for h in sorted(mine, key=worth)[:max(0, len(mine) - hosts)])
    if wanted.max_micros_h:
        left = [h for h in staying if h.request_id not in extra]
        burn = sum(accepted(state, h) for h in left)
        for host in sorted(left, key=lambda h: (-price_now(state, h)[0], worth(h))):
            if burn <= wanted.max_micros_h:
                break
            why = f"hosts cost {dollars(burn)}, and max_hourly_cost leaves {dollars(wanted.max_micros_h)} for them"
            extra[host.request_id] = host, why
            burn -= accepted(state, host)
    return [Drain(h.request_id, why) if h.state is HostState.UP else Terminate(h.request_id, why)
            for h, why in extra.values()]
