"""The only code that changes machines. One tick: observe, plan, write the intent, act. Safe to kill at any line.

A row is written before the provider is called, under an id that makes no second host however often it is asked for;
what the provider lists is written down when it differs from what the ledger says. Nothing is remembered elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from spotfleet.errors import DiskFull, NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.fleet.events import (
    ClockSetBack,
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
from spotfleet.model import CloudHost, CloudState, HostState, Market, Nodes, Notice, Offer, PricePoint, Role
from spotfleet.providers import Boot, LaunchRequest, Provider

ASK_AGAIN_S = 5.0  # an intended host that is not listed is asked for again after this; doubles with each time
MISSING_S = 10.0  # a listed host must be absent for this long, in two ticks, before it counts as GONE
NEVER_LISTED_S = 60.0  # a terminated host that was never listed is GONE after this
CLOCK_BACK_S = 60.0  # a clock that shows so much less than before was set; a tick that takes long looks a little late
PRICES_TOGETHER_S = 86400.0  # pools whose newest known prices lie no further apart are looked up in one call
NOTICE_MOVED_S = 2.0  # deadlines that differ by less are the same notice

__all__ = ["Action", "Calls", "Drain", "Launch", "Observed", "Terminate", "Wait", "Wanted", "create", "leftovers",
           "look", "tick"]


@dataclass(frozen=True)
class Unanswered(Wait):
    """The provider did not answer."""

    error: str = ""


@dataclass(frozen=True)
class Calls:
    """How a tick changes machines: up to `width` calls at once, by `map`; their intents are one write."""

    width: int = 1
    map: Callable[..., Iterable[Exception | None]] = map


def create(ledger: Ledger, provider: Provider, fleet: str, nodes: Nodes, now: float) -> None:
    """Stamp fleet and billing rules into an empty ledger; change nothing in one that has them and is not down."""
    state = ledger.state()
    if state.created is None or state.down is not None:
        ledger.append(FleetCreated(now, fleet, provider.name, nodes, provider.billing()))


def leftovers(provider: Provider, fleet: str, role: Role | None = None) -> list[CloudHost]:
    """What still exists of `fleet` by the cloud's word; a stopped host exists."""
    return [h for h in provider.hosts(fleet)
            if h.state is not CloudState.TERMINATED and role in (None, h.role)]


def look(wanted: Wanted, ledger: Ledger, provider: Provider, now: float) -> None:
    """Write down what the cloud lists and what it costs by now, and change nothing. What the provider raises goes on.

    For a report between the ticks of a caller that ticks seldom, such as the laptop about its dispatcher.
    """
    ledger.append(*_observe(wanted, ledger.state(), provider, Observed(), now))


def tick(wanted: Wanted, ledger: Ledger, provider: Provider, boot: Callable[[str, Offer], Boot],
         observed: Observed, now: float, calls: Calls = Calls()) -> list[Action]:
    """Move the fleet one step towards `wanted`; returns what was done and what is waited for.

    Raises NeedsPerson, after it is written down, when the provider cannot go on without a person. A provider that does
    not answer ends the tick with Unanswered: calling again is always safe.
    """
    back_s = ledger.state().clock - now
    if back_s > CLOCK_BACK_S:
        ledger.append(ClockSetBack(now, back_s))
    ledger.append(*_heard(wanted, ledger.state(), observed, now))
    done: list[Action] = []
    for drain in urgent(wanted, ledger.state(), observed):  # a notice waits for no provider
        ledger.append(HostDraining(now, drain.request_id, drain.why))
        done.append(drain)
    try:
        ledger.append(*_observe(wanted, ledger.state(), provider, observed, now))
        state = ledger.state()
        planned = _planned(wanted, state, provider, observed, now)
        hands = _Hands(wanted, ledger, provider, boot, calls, now)
        for alike in _batches([*_asked_again(wanted, state, planned, observed, now), *planned], calls.width):
            done += hands.do(alike)
    except (NeedsPerson, DiskFull):
        raise  # without its intent on disk no call is made
    except (OSError, SpotfleetError) as error:
        said = str(error) or type(error).__name__
        done.append(Unanswered(f"{provider.name}: {said}; the next tick asks again", said))
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
        elif host.state is HostState.UP and host.silent_since is None and now >= observed.settle_until:
            events.append(HostSilent(now, host.request_id))
        notice = observed.notices.get(host.request_id)
        if notice is not None and host.state is not HostState.STOPPED and _is_new(notice, host, now):
            events.append(HostNoticed(now, host.request_id, notice.seconds_left, notice.action, notice.kind))
    return events


def _is_new(notice: Notice, host: Host, now: float) -> bool:
    if notice.kind != "interruption":
        return not host.rebalance
    if host.notice_deadline is None or host.notice_action != notice.action:
        return True
    return abs(now + notice.seconds_left - host.notice_deadline) > NOTICE_MOVED_S


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
    if known is not None and known.missing_since is None:
        same = (known.provider_id, known.cloud, known.runs, known.address, known.port) == (
            line.provider_id, line.state, line.runs, line.address or known.address, line.port or known.port)
        if same or (known.provider_id and _progress(line) < _progress(known)):
            return []
    listed = HostListed(now, line.request_id, line.provider_id, line.state, line.runs, line.address, line.port,
                        line.why)
    if known is not None:
        return [listed]
    # The ledger was lost. As of now, for an agent has its whole time to report to whoever took over.
    return [LaunchIntended(now, line.request_id, line.role, line.offer, "adopted: the cloud lists it"), listed]


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
    """Every change in `pools` that the ledger lacks: after the newest it has, and before the oldest where a run began
    earlier than that."""
    wanted: dict[str, float] = {}  # pool -> since
    for pool in sorted(pools):
        first, last = state.priced_from.get(pool, math.inf), state.prices.get(pool)
        start = starts.get(pool, math.inf)
        since = start if last is None or start < first else last.at
        if since < math.inf:
            wanted[pool] = since
    changes: list[PriceChanged] = []
    for names in _asked_together(wanted):
        points: dict[str, list[PricePoint]] = {name: [] for name in names}
        for point in sorted(provider.prices(names, wanted[names[0]]), key=lambda p: p.at):
            points[point.pool].append(point)
        for name in names:
            changes += _changes(state, pools[name], _from(points[name], wanted[name]))
    return changes


def _asked_together(wanted: dict[str, float]) -> list[list[str]]:
    """The pools of one call each, the longest silent first: a call takes long, and one pool's very long silence must
    not fetch the others' history."""
    groups: list[list[str]] = []
    for name in sorted(wanted, key=lambda n: wanted[n]):
        if groups and wanted[name] - wanted[groups[-1][0]] <= PRICES_TOGETHER_S:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _from(points: list[PricePoint], since: float) -> list[PricePoint]:
    """The point in force at `since` and all later ones."""
    before = sum(p.at <= since for p in points)
    return points[max(0, before - 1):]


def _changes(state: FleetState, offer: Offer, points: Iterable[PricePoint]) -> list[PriceChanged]:
    """Those of one pool's `points` that the ledger lacks."""
    last, first = state.prices.get(offer.pool), state.priced_from.get(offer.pool, -math.inf)
    at, micros_h = (last.at, last.micros_h) if last else (-math.inf, None)
    changes = []
    for point in points:
        if point.at > at and point.micros_h != micros_h:
            at, micros_h = point.at, point.micros_h
        elif point.at >= first:
            continue
        on_demand = point.micros_h if offer.market is Market.ON_DEMAND else offer.on_demand_micros_h
        changes.append(PriceChanged(point.at, point.pool, point.micros_h, on_demand))
    return changes


def _asked_again(wanted: Wanted, state: FleetState, planned: list[Action], observed: Observed,
                 now: float) -> list[Launch]:
    """Launches that were written down and never listed: we died before the call, or its answer was lost."""
    if settling(wanted, state, observed, now):
        return []
    unwanted = {action.request_id for action in planned if isinstance(action, Terminate)}
    return [Launch(h.request_id, h.offer, f"asked again: not listed since {clock(h.asked_at)}") for h in state.hosts
            if h.role is wanted.role and h.state is HostState.LAUNCHING and not h.provider_id
            and h.request_id not in unwanted and now - h.asked_at >= ASK_AGAIN_S * 2 ** (h.asks - 1)]


def _batches(actions: list[Action], width: int) -> Iterator[list[Action]]:
    """Actions of one kind that stand side by side, at most `width` of them, in their order."""
    for _, alike in groupby(actions, key=type):
        same = list(alike)
        yield from (same[i:i + width] for i in range(0, len(same), width))


@dataclass(frozen=True)
class _Hands:
    """Does what was planned. Every call's intent is on disk before it."""

    wanted: Wanted
    ledger: Ledger
    provider: Provider
    boot: Callable[[str, Offer], Boot]
    calls: Calls
    now: float

    def do(self, alike: list[Action]) -> list[Action]:
        """What was done of these actions of one kind. Raises what the provider raised, once all have been tried."""
        match alike[0]:
            case Launch():
                return self._launch(alike)
            case Drain():
                self.ledger.append(*(HostDraining(self.now, a.request_id, a.why) for a in alike))
            case Terminate():
                self._terminate(alike)
        return alike

    def _terminate(self, ends: Sequence[Any]) -> None:
        self.ledger.append(*(TerminateIntended(self.now, a.request_id, a.why) for a in ends))
        _raise_first(self._call(self.provider.terminate, [a.request_id for a in ends]))

    def _launch(self, launches: Sequence[Any]) -> list[Action]:
        state = self.ledger.state()
        # a pool that has refused another host of this tick is left out; the next tick plans without it
        launches = [a for a in launches if cooling_until(state, a.offer) <= self.now]
        requests = [LaunchRequest(a.request_id, self.wanted.fleet, self.wanted.role, a.offer,
                                  self.boot(a.request_id, a.offer), self.wanted.interruption_behavior, self.wanted.tags)
                    for a in launches]
        self.ledger.append(*(LaunchIntended(self.now, a.request_id, self.wanted.role, a.offer, a.why)
                             for a in launches))
        errors = self._call(self.provider.launch, requests)
        done: list[Action] = []
        for action, error in zip(launches, errors, strict=True):
            if isinstance(error, (NoCapacity, NeedsPerson)):
                scope = error.scope if isinstance(error, NoCapacity) else "account"
                self.ledger.append(LaunchRefused(self.now, action.request_id, scope, str(error)))
            if isinstance(error, NoCapacity):
                done += [action, Wait(f"{action.request_id} refused: {error}")]
            elif error is None:
                done.append(action)
        _raise_first([e for e in errors if isinstance(e, NeedsPerson)])
        _raise_first([e for e in errors if not isinstance(e, NoCapacity)])
        return done

    def _call(self, method: Callable[[Any], None], each: list[Any]) -> list[Exception | None]:
        """What every call raised, if anything."""
        def attempt(argument: Any) -> Exception | None:
            try:
                method(argument)
            except (SpotfleetError, OSError) as error:
                return error
            return None

        return list(self.calls.map(attempt, each))


def _raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
