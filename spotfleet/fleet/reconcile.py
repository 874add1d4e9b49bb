"""The only code that changes machines. One tick: observe, plan, write the intent, act. Safe to kill at any line.

A row is written before the provider is called, under an id that makes no second host however often it is asked for;
what the provider lists is written down when it differs from what the ledger says. Nothing is remembered elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.fleet.events import (
    Event,
    FleetCreated,
    HostDraining,
    HostJoined,
    HostListed,
    HostNoticed,
    HostSilent,
    LaunchIntended,
    LaunchRefused,
    PriceChanged,
    TerminateIntended,
)
from spotfleet.fleet.fold import FleetState, Host, cooling_until
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.plan import (
    Action,
    Drain,
    Launch,
    Observed,
    Terminate,
    Wait,
    Wanted,
    clock,
    missing,
    plan,
    settling,
    urgent,
)
from spotfleet.model import CloudHost, CloudState, HostState, Market, Nodes, Offer, Role
from spotfleet.providers import Boot, LaunchRequest, Provider

ASK_AGAIN_S = 5.0  # an intended host that is not listed is asked for again after this; doubles with each time
MISSING_S = 10.0  # a listed host must be absent for this long, in two ticks, before it counts as GONE
NEVER_LISTED_S = 60.0  # a terminated host that was never listed is GONE after this
NOTICE_MOVED_S = 2.0  # deadlines that differ by less are the same notice

__all__ = ["Action", "Drain", "Launch", "Observed", "Terminate", "Wait", "Wanted", "create", "leftovers", "tick"]


def create(ledger: Ledger, provider: Provider, fleet: str, nodes: Nodes, now: float) -> None:
    """Stamp fleet and billing rules into an empty ledger; change nothing in one that has them and is not down."""
    state = ledger.state()
    if state.created is None or state.down is not None:
        ledger.append(FleetCreated(now, fleet, provider.name, nodes, provider.billing()))


def leftovers(provider: Provider, fleet: str, role: Role | None = None) -> list[CloudHost]:
    """What still exists of `fleet` by the cloud's word; a stopped host exists."""
    return [h for h in provider.hosts(fleet)
            if h.state is not CloudState.TERMINATED and role in (None, h.role)]


def tick(wanted: Wanted, ledger: Ledger, provider: Provider, boot: Callable[[str, Offer], Boot],
         observed: Observed, now: float) -> list[Action]:
    """Move the fleet one step towards `wanted`; returns what was done and what is waited for.

    Raises NeedsPerson, after it is written down, when the provider cannot go on without a person. A provider that does
    not answer ends the tick with a Wait: calling again is always safe.
    """
    ledger.append(*_heard(wanted, ledger.state(), observed, now))
    done: list[Action] = []
    for drain in urgent(wanted, ledger.state(), observed):  # a notice waits for no provider
        ledger.append(HostDraining(now, drain.request_id, drain.why))
        done.append(drain)
    try:
        ledger.append(*_observe(wanted, ledger.state(), provider, observed, now))
        for action in [*_asked_again(wanted, ledger.state(), observed, now),
                       *_planned(wanted, ledger.state(), provider, observed, now)]:
            done += _act(action, wanted, ledger, provider, boot, now)
    except NeedsPerson:
        raise
    except (OSError, SpotfleetError) as error:
        done.append(Wait(f"{provider.name}: {str(error) or type(error).__name__}; the next tick asks again"))
    return done


def _planned(wanted: Wanted, state: FleetState, provider: Provider, observed: Observed, now: float) -> list[Action]:
    offers: dict[str, Offer] = {}
    if missing(wanted, state, observed, now):
        for need in wanted.any_of:  # without its limit, so that the plan can say how far off the price is
            offers.update((o.pool, o) for o in provider.offers(replace(need, max_micros_h=0)))
    return plan(wanted, state, list(offers.values()), observed, now)


def _heard(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Event]:
    """What agents say that the ledger does not know yet."""
    events: list[Event] = []
    for host in state.hosts:
        if host.role is not wanted.role:
            continue
        incarnation = observed.joined.get(host.request_id)
        if incarnation is not None:
            if incarnation != host.incarnation or host.silent_since is not None:
                events.append(HostJoined(now, host.request_id, incarnation))
        elif (host.state in (HostState.UP, HostState.DRAINING) and host.incarnation and host.silent_since is None
                and now >= observed.settle_until):
            events.append(HostSilent(now, host.request_id))
        notice = observed.notices.get(host.request_id)
        if notice is None or host.state is HostState.STOPPED:
            continue
        if notice.kind == "interruption":
            moved = host.notice_deadline is None or abs(host.notice_deadline - now - notice.seconds_left)
            if moved is True or moved > NOTICE_MOVED_S or host.notice_action != notice.action:
                events.append(HostNoticed(now, host.request_id, notice.seconds_left, notice.action))
        elif not host.rebalance:
            events.append(HostNoticed(now, host.request_id, notice.seconds_left, notice.action, notice.kind))
    return events


def _observe(wanted: Wanted, state: FleetState, provider: Provider, observed: Observed, now: float) -> list[Event]:
    """What the cloud lists, and the prices of every pool concerned, as one piece.

    One piece, because the last price of a host that has ended is not looked up again once its end is written.
    """
    listed = _distinct(h for h in provider.hosts(wanted.fleet) if h.role is wanted.role)
    events: list[Event] = []
    pools = {h.offer.pool: h for h in state.hosts if h.role is wanted.role and h.provider_id}
    starts: dict[str, float] = {}
    for line in listed.values():
        known = state.host(line.request_id)
        news = _news(known, line, now)
        events += news
        if news or (known is not None and known.state is not HostState.GONE):
            pools.setdefault(line.offer.pool, known or line)
            starts[line.offer.pool] = min([starts.get(line.offer.pool, now), *(r.started_at for r in line.runs)])
    for host in state.hosts:
        if host.role is wanted.role and host.request_id not in listed:
            events += _absent(host, observed, now)
    return events + _prices(state, provider, {p: h.offer for p, h in pools.items()}, starts)


def _distinct(lines: Iterable[CloudHost]) -> dict[str, CloudHost]:
    """The furthest line of each host: listings may repeat hosts, and differ about them."""
    found: dict[str, CloudHost] = {}
    for line in lines:
        other = found.get(line.request_id)
        if other is None or _progress(line) >= _progress(other):
            found[line.request_id] = line
    return found


def _progress(line: CloudHost | Host) -> tuple:
    """Grows over a host's life, whatever happens to it."""
    cloud = line.state if isinstance(line, CloudHost) else line.cloud
    ended = bool(line.runs) and line.runs[-1].ended_at is not None
    return (cloud is CloudState.TERMINATED, len(line.runs), ended)


def _news(known: Host | None, line: CloudHost, now: float) -> list[Event]:
    """[] if the listing shows nothing new, or if it lags behind what was listed before."""
    listed = HostListed(now, line.request_id, line.provider_id, line.state, line.runs, line.address, line.port,
                        line.why)
    if known is None:  # the ledger was lost, or belongs to somebody who died before the first row
        at = line.runs[0].started_at if line.runs else now
        return [LaunchIntended(at, line.request_id, line.role, line.offer, "adopted: the cloud lists it"), listed]
    if known.provider_id and known.missing_since is None and _progress(line) < _progress(known):
        return []
    same = (known.provider_id, known.cloud, known.runs, known.address, known.port) == (
        line.provider_id, line.state, line.runs, line.address or known.address, line.port or known.port)
    return [] if same and known.missing_since is None else [listed]


def _absent(host: Host, observed: Observed, now: float) -> list[Event]:
    """A listing that lags must not end a host; one that stays silent must."""
    if host.request_id in observed.joined:
        return []
    if not host.provider_id:
        given_up = host.terminate_at is not None and now - max(host.since, host.asked_at) >= NEVER_LISTED_S
        gone = HostListed(now, host.request_id, "", CloudState.TERMINATED, (), why="was never listed by the cloud",
                          missing=True)
        return [gone] if given_up else []
    if host.missing_since is None:
        assert host.cloud is not None
        return [HostListed(now, host.request_id, host.provider_id, host.cloud, host.runs, host.address, host.port,
                           "not in the cloud's listing", missing=True)]
    if now - host.missing_since < MISSING_S:
        return []
    runs = tuple(replace(r, ended_at=host.missing_since) if r.ended_at is None else r for r in host.runs)
    return [HostListed(now, host.request_id, host.provider_id, CloudState.TERMINATED, runs, host.address, host.port,
                       f"not in the cloud's listing since {clock(host.missing_since)}", missing=True)]


def _prices(state: FleetState, provider: Provider, pools: dict[str, Offer],
            starts: dict[str, float]) -> list[PriceChanged]:
    """Every change since the newest price known, or since the first run for a pool that is new to the ledger."""
    since = {pool: state.prices[pool].at if pool in state.prices else starts[pool]
             for pool in pools if pool in state.prices or pool in starts}
    if not since:
        return []
    changes = []
    known = {pool: (state.prices[pool].at, state.prices[pool].micros_h) for pool in since if pool in state.prices}
    for point in sorted(provider.prices(sorted(since), min(since.values())), key=lambda p: p.at):
        if point.pool not in since:
            continue
        at, micros_h = known.get(point.pool, (0.0, None))
        if (point.at > at and point.micros_h != micros_h) or micros_h is None:
            offer = pools[point.pool]
            on_demand = point.micros_h if offer.market is Market.ON_DEMAND else offer.on_demand_micros_h
            changes.append(PriceChanged(point.at, point.pool, point.micros_h, on_demand))
            known[point.pool] = (point.at, point.micros_h)
    return changes


def _asked_again(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Launch]:
    """Launches that were written down and never listed: we died before the call, or its answer was lost."""
    if settling(wanted, state, observed, now):
        return []
    return [Launch(h.request_id, h.offer, f"asked again: not listed since {clock(h.asked_at)}") for h in state.hosts
            if h.role is wanted.role and h.state is HostState.LAUNCHING and not h.provider_id and wanted.hosts > 0
            and now - h.launched_at < wanted.launch_timeout_s and now - h.asked_at >= ASK_AGAIN_S * 2 ** (h.asks - 1)]


def _act(action: Action, wanted: Wanted, ledger: Ledger, provider: Provider, boot: Callable[[str, Offer], Boot],
         now: float) -> list[Action]:
    match action:
        case Launch():
            return _launch(action, wanted, ledger, provider, boot, now)
        case Drain():
            ledger.append(HostDraining(now, action.request_id, action.why))
        case Terminate():
            ledger.append(TerminateIntended(now, action.request_id, action.why))
            provider.terminate(action.request_id)
    return [action]


def _launch(action: Launch, wanted: Wanted, ledger: Ledger, provider: Provider, boot: Callable[[str, Offer], Boot],
            now: float) -> list[Action]:
    if cooling_until(ledger.state(), action.offer) > now:
        return []  # it has refused another host of this tick; the next tick plans without it
    request = LaunchRequest(action.request_id, wanted.fleet, wanted.role, action.offer,
                            boot(action.request_id, action.offer), wanted.interruption_behavior, wanted.tags)
    ledger.append(LaunchIntended(now, action.request_id, wanted.role, action.offer, action.why))
    try:
        provider.launch(request)
    except NoCapacity as error:
        ledger.append(LaunchRefused(now, action.request_id, error.scope, str(error)))
        return [action, Wait(f"{action.request_id} refused: {error}")]
    except NeedsPerson as error:
        ledger.append(LaunchRefused(now, action.request_id, "account", str(error)))
        raise
    return [action]
