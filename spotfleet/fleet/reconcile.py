"""Reconciler, the only code that changes machines. One tick: observe, plan, write the intent, act.

It is safe to kill at any line. A row is written before the provider is called, under an id that makes no second host
however often it is requested. The provider's listing is written down where it differs from the ledger. There is no
other memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from spotfleet.errors import DiskFull, NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.fleet.domain.boots import boot_stages
from spotfleet.fleet.domain.events import (
    ClockSetBack,
    Event,
    FleetCreated,
    HostDraining,
    HostJoined,
    HostNoticed,
    HostSilent,
    LaunchIntended,
    LaunchRefused,
    PriceChanged,
    RatesStamped,
    TerminateIntended,
)
from spotfleet.fleet.domain.state import FleetState, Host, cooling_until, hint_of
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.planner import listing_diff
from spotfleet.fleet.planner.listing_diff import MISSING_S
from spotfleet.fleet.planner.plan import (
    Action,
    Drain,
    Launch,
    Observed,
    Terminate,
    Wait,
    Wanted,
    missing_needs,
    plan,
    settling,
    urgent,
)
from spotfleet.model import CloudHost, CloudState, HostState, Market, Nodes, Notice, Offer, PricePoint, Rates, Role
from spotfleet.providers import Boot, GroupLaunch, LaunchRequest, Provider, RateSource
from spotfleet.words import clock_utc

ASK_AGAIN_S = 5.0  # an intended host that is not listed is requested again after this; doubles with each time
CLOCK_BACK_S = 60.0  # a clock that is so much behind its last value was set; a long tick has a slightly late `now`
PRICES_TOGETHER_S = 86400.0  # pools whose newest known prices are no further apart share one request
RATES_S = 86400.0  # shortest interval between two requests for the rates of a region
NOTICE_MOVED_S = 2.0  # deadlines that differ by less are the same notice
EMPTY: Mapping[str, Nodes] = MappingProxyType({})

__all__ = ["MISSING_S", "Action", "Calls", "Drain", "Launch", "Observed", "Terminate", "Wait", "Wanted", "create",
           "leftovers", "record_listing", "tick"]


@dataclass(frozen=True)
class NoAnswer(Wait):
    """The provider did not answer."""

    error: str = ""


@dataclass(frozen=True)
class Calls:
    """Concurrency of a tick's calls: up to `width` at once, by `map`; their intents are one write.

    `scout`: the first launch of a quota goes alone, so that an exhausted quota causes one refusal.
    """

    width: int = 1
    map: Callable[..., Iterable[Exception | None]] = map
    scout: bool = False


def create(ledger: Ledger, provider: Provider, fleet: str, nodes: Nodes, now: float,
           groups: Mapping[str, Nodes] = EMPTY) -> None:
    """Write fleet and billing rules into an empty ledger. Change nothing in one that has them and is not down.

    `groups`: the range of each named group; `nodes` is that of all together.
    """
    state = ledger.state()
    if state.created is None or state.down is not None:
        ledger.append(FleetCreated(now, fleet, provider.name, nodes, provider.billing(), dict(groups)))


def leftovers(provider: Provider, fleet: str, role: Role | None = None) -> list[CloudHost]:
    """Return the hosts of `fleet` that the cloud lists as existing; a stopped host exists."""
    return [h for h in provider.hosts(fleet)
            if h.state is not CloudState.TERMINATED and role in (None, h.role)]


def record_listing(wanted: Wanted, ledger: Ledger, provider: Provider, now: float) -> None:
    """Write the cloud's listing and prices into the ledger; change no machine. The provider's errors are passed on.

    For a report between the ticks of a caller that ticks seldom, such as the laptop for its dispatcher.
    """
    ledger.append(*_observe(wanted, ledger.state(), provider, Observed(), now))


def tick(wanted: Wanted, ledger: Ledger, provider: Provider, boot: Callable[[str, Offer], Boot],
         observed: Observed, now: float, calls: Calls = Calls()) -> list[Action]:
    """Move the fleet one step towards `wanted`. Returns the actions done and the waits.

    Raises NeedsPerson, after writing it down, when the provider cannot go on without a person. A provider that does
    not answer ends the tick with a NoAnswer: calling again is always safe.
    """
    back_s = ledger.state().clock - now
    if back_s > CLOCK_BACK_S:
        ledger.append(ClockSetBack(now, back_s))
    ledger.append(*_observation_events(wanted, ledger.state(), observed, now))
    done: list[Action] = []
    for drain in urgent(wanted, ledger.state(), observed):  # a notice waits for no provider
        ledger.append(HostDraining(now, drain.request_id, drain.why))
        done.append(drain)
    try:
        ledger.append(*_observe(wanted, ledger.state(), provider, observed, now))
        state = ledger.state()
        planned = _planned(wanted, state, provider, observed, now)
        executor = _Executor(wanted, ledger, provider, boot, calls, now)
        for alike in _batches([*_repeated_launches(wanted, state, planned, observed, now), *planned], calls.width):
            done += executor.do(alike)
    except (NeedsPerson, DiskFull):
        raise  # no call is made without its intent on disk
    except (OSError, SpotfleetError) as error:
        message = str(error) or type(error).__name__
        done.append(NoAnswer(f"{provider.name}: {message}; the next tick asks again", message))
    return done


def _planned(wanted: Wanted, state: FleetState, provider: Provider, observed: Observed, now: float) -> list[Action]:
    offers: dict[str, Offer] = {}
    for need in missing_needs(wanted, state, observed, now):  # no limit: the plan reports how far off the price is
        offers.update((o.pool, o) for o in provider.offers(replace(need, max_micros_h=0)))
    return plan(wanted, state, list(offers.values()), observed, now)


def _observation_events(wanted: Wanted, state: FleetState, observed: Observed, now: float) -> list[Event]:
    """Return events that the ledger lacks: joins and silences of agents; notices of agents and of the cloud."""
    events: list[Event] = []
    for host in state.hosts:
        if host.role is not wanted.role:
            continue
        incarnation = observed.joined.get(host.request_id)
        if incarnation is not None:
            back = host.state is HostState.LAUNCHING  # also with the same agent: its machine was merely disconnected
            if incarnation != host.incarnation or host.silent_since is not None or back:
                boot = boot_stages(host, observed.boots.get(host.request_id), now) if back else None
                events.append(HostJoined(now, host.request_id, incarnation, boot))
        elif host.state is HostState.UP and host.silent_since is None and now >= observed.settle_until:
            events.append(HostSilent(now, host.request_id))
        notice = observed.notices.get(host.request_id)
        if notice is not None and host.state is not HostState.STOPPED and _is_new(notice, host, now):
            events.append(HostNoticed(now, host.request_id, notice.seconds_left, notice.action, notice.kind,
                                      notice.why))
    return events


def _is_new(notice: Notice, host: Host, now: float) -> bool:
    if notice.kind != "interruption":
        return host.hint != hint_of(notice.kind, notice.why)
    deadline = now + notice.seconds_left
    if len(host.runs) > 1 and deadline < host.runs[-1].started_at + NOTICE_MOVED_S:
        return False  # this notice ended the run before
    if host.notice_deadline is None or host.notice_action != notice.action:
        return True
    return abs(deadline - host.notice_deadline) > NOTICE_MOVED_S


def _observe(wanted: Wanted, state: FleetState, provider: Provider, observed: Observed, now: float) -> list[Event]:
    """Return events for the cloud's listing, and for the prices and rates of every pool concerned.

    They are written together, because the last price of an ended host is not requested again once its end is written.
    """
    lines = (h for h in provider.hosts(wanted.fleet) if h.role is wanted.role)
    listed = listing_diff.merge_lines(lines, state, observed, now)
    events: list[Event] = []
    fresh: set[str] = set()
    for line in listed.values():
        if found := listing_diff.new_events(state.host(line.request_id), line, now):
            events += found
            fresh.add(line.request_id)
    own = [h for h in state.hosts if h.role is wanted.role]
    for host in own:
        if host.request_id not in listed:
            events += listing_diff.absence_events(host, observed, now)
    events += _rates(state, provider, listed, fresh, now)
    return events + _prices(state, provider, *listing_diff.priced_pools(state, listed, fresh, own, now))


def _rates(state: FleetState, provider: Provider, listed: dict[str, CloudHost], fresh: set[str],
           now: float) -> list[RatesStamped]:
    """Return the charges of regions besides machines that the ledger lacks.

    They count from the first run of a host in the region. Changes are requested every RATES_S.
    """
    regions = listing_diff.metered_regions(state, listed, fresh, now)
    if not regions or not isinstance(provider, RateSource):
        return []
    stamps: list[RatesStamped] = []
    for place, name, since in regions:
        first, last = state.first_rates.get(place), state.rates.get(place)
        if last is None or first is None:
            if (rates := provider.rates(name)) != Rates():
                stamps.append(RatesStamped(since, place.partition("/")[0], name, rates))
        elif since < first.at:
            stamps.append(replace(first, at=since))
        elif now - last.at >= RATES_S and not _same_rates(rates := provider.rates(name), last.rates):
            stamps.append(RatesStamped(now, place.partition("/")[0], name, rates))
    return stamps


def _same_rates(one: Rates, other: Rates) -> bool:
    """Return whether the rates are equal, whatever the date on which they were read."""
    return replace(one, source="", as_of="") == replace(other, source="", as_of="")


def _prices(state: FleetState, provider: Provider, pools: dict[str, Offer],
            starts: dict[str, float]) -> list[PriceChanged]:
    """Return every price change in `pools` that the ledger lacks.

    These are changes after the newest known one, and before the oldest known one if a run began earlier.
    """
    wanted: dict[str, float] = {}  # pool -> since
    for pool in sorted(pools):
        first, last = state.priced_from.get(pool, math.inf), state.prices.get(pool)
        start = starts.get(pool, math.inf)
        since = start if last is None or start < first else last.at
        if since < math.inf:
            wanted[pool] = since
    changes: list[PriceChanged] = []
    for names in _price_requests(wanted):
        points: dict[str, list[PricePoint]] = {name: [] for name in names}
        for point in sorted(provider.prices(names, wanted[names[0]]), key=lambda p: p.at):
            points[point.pool].append(point)
        for name in names:
            changes += _changes(state, pools[name], _from(points[name], wanted[name]))
    return changes


def _price_requests(wanted: dict[str, float]) -> list[list[str]]:
    """Group pools into requests, the one without news for longest first.

    A request takes long, and a pool without news for very long must not cause the others' whole history to be fetched.
    """
    groups: list[list[str]] = []
    for name in sorted(wanted, key=lambda n: wanted[n]):
        if groups and wanted[name] - wanted[groups[-1][0]] <= PRICES_TOGETHER_S:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _from(points: list[PricePoint], since: float) -> list[PricePoint]:
    """Return the point in force at `since` and all later ones."""
    before = sum(p.at <= since for p in points)
    return points[max(0, before - 1):]


def _changes(state: FleetState, offer: Offer, points: Iterable[PricePoint]) -> list[PriceChanged]:
    """Return the changes of one pool's `points` that the ledger lacks."""
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


def _repeated_launches(wanted: Wanted, state: FleetState, planned: list[Action], observed: Observed,
                 now: float) -> list[Launch]:
    """Return intended launches that were never listed: we died before the call, or its answer was lost."""
    if settling(wanted, state, observed, now):
        return []
    unwanted = {action.request_id for action in planned if isinstance(action, Terminate)}
    due = [h for h in state.hosts
           if h.role is wanted.role and h.state is HostState.LAUNCHING and not h.provider_id
           and h.request_id not in unwanted and now - h.asked_at >= ASK_AGAIN_S * 2 ** (h.asks - 1)]
    names = dict.fromkeys(name for h in due for name in (h.together or (h.request_id,)))  # a gang is requested whole
    known = [h for name in names if (h := state.host(name)) is not None]
    return [Launch(h.request_id, h.offer, f"asked again: not listed since {clock_utc(h.asked_at)}", h.alternatives,
                   h.together, h.group) for h in known]


def _batches(actions: list[Action], width: int) -> Iterator[list[Action]]:
    """Yield adjacent actions of one kind in their order, at most `width` at once; a gang whole."""
    for (_, together), alike in groupby(actions, key=lambda a: (type(a), getattr(a, "together", ()))):
        same = list(alike)
        step = len(same) if together else width
        yield from (same[i:i + step] for i in range(0, len(same), step))


@dataclass(frozen=True)
class _Executor:
    """Executor of planned actions. Every call's intent is on disk before the call."""

    wanted: Wanted
    ledger: Ledger
    provider: Provider
    boot: Callable[[str, Offer], Boot]
    calls: Calls
    now: float

    def do(self, alike: list[Action]) -> list[Action]:
        """Carry out actions of one kind; return those done. Raises the provider's error once all have been tried."""
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
        done: list[Action] = []
        for wave in self._waves(launches):
            state = self.ledger.state()
            # a pool that has refused another host in this tick is skipped; the next tick plans without it
            done += self._launch_wave([a for a in wave if cooling_until(state, a.offer) <= self.now])
        return done

    def _waves(self, launches: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the launches in waves: with `scout` the first of each quota, then the rest."""
        if not self.calls.scout or launches[0].together:
            return [launches]
        by_quota: dict[tuple, list[Launch]] = defaultdict(list)
        for action in launches:
            by_quota[action.offer.region, action.offer.market, action.offer.quota].append(action)
        first = [same[0] for same in by_quota.values()]
        return [first, [a for a in launches if a not in first]]

    def _launch_wave(self, launches: Sequence[Any]) -> list[Action]:
        if not launches:
            return []
        requests = [LaunchRequest(a.request_id, self.wanted.fleet, self.wanted.role, a.offer,
                                  self.boot(a.request_id, a.offer), self.wanted.interruption_behavior, self.wanted.tags,
                                  a.alternatives) for a in launches]
        self.ledger.append(*(LaunchIntended(self.now, a.request_id, self.wanted.role, a.offer, a.why, a.alternatives,
                                            a.together, a.group) for a in launches))
        errors = self._call_launch(launches, requests)
        done: list[Action] = []
        for action, error in zip(launches, errors, strict=True):
            if isinstance(error, (NoCapacity, NeedsPerson)):
                scope, pools = (error.scope, error.pools) if isinstance(error, NoCapacity) else ("account", ())
                message = _with_hint(error) if scope in ("quota", "region", "account") else str(error)
                self.ledger.append(LaunchRefused(self.now, action.request_id, scope, message, pools))
                if isinstance(error, NoCapacity):
                    done += [action, Wait(f"{action.request_id} refused: {message}")]
            elif error is None:
                done.append(action)
        _raise_first([e for e in errors if isinstance(e, NeedsPerson)])
        _raise_first([e for e in errors if not isinstance(e, NoCapacity)])
        return done

    def _call_launch(self, launches: Sequence[Any], requests: list[LaunchRequest]) -> list[Exception | None]:
        """Launch; return the error of each launch, None for a success.

        A gang's hosts share one answer if the provider launches them together. Otherwise the plan ends the launched
        part of a gang with a refusal.
        """
        if launches and launches[0].together and isinstance(self.provider, GroupLaunch):
            return self._call(self.provider.launch_together, [requests]) * len(requests)
        return self._call(self.provider.launch, requests)

    def _call(self, method: Callable[[Any], None], each: list[Any]) -> list[Exception | None]:
        """Call `method` for each argument; return the error of each call, None for a success."""
        def attempt(argument: Any) -> Exception | None:
            try:
                method(argument)
            except (SpotfleetError, OSError) as error:
                return error
            return None

        return list(self.calls.map(attempt, each))


def _with_hint(error: SpotfleetError) -> str:
    """Return the error with its hint: a person may be able to help where whole regions refuse, such as a quota."""
    return f"{error} ({error.hint})" if error.hint else str(error)


def _raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
