"""Fleet state, folded from the ledger's events. Pure: `fold(events)` is the reconciler's only memory.

                    HostJoined                 HostDraining, TerminateIntended
        LAUNCHING -------------> UP ---------------------------------------------> DRAINING
            ^                    |  \\__ HostListed(STOPPED), from any state           |
            |                    v                                                     v
            '---------------- STOPPED                          HostListed(TERMINATED): GONE
              HostListed(RUNNING)

`planner/plan.py` lists what frees a host from each state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import ClassVar

from spotfleet.fleet.domain.availability import AvailabilityHistory
from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.domain.events import (
    ClockSetBack,
    Event,
    FleetCreated,
    FleetDown,
    HostDraining,
    HostFailed,
    HostJoined,
    HostListed,
    HostNoticed,
    HostPlaced,
    HostSilent,
    JobResumed,
    JobSubmitted,
    LaunchIntended,
    LaunchRefused,
    NodesChanged,
    PriceChanged,
    RatesStamped,
    ResultsLost,
    TakenOver,
    TerminateIntended,
    TokenRevoked,
)
from spotfleet.fleet.domain.history import HostObservation, MarketHistory, record, set_back
from spotfleet.fleet.domain.host import Host
from spotfleet.model import SECOND, CloudState, HostState, Market, Nodes, Offer, Role, all_nodes
from spotfleet.retry import growing_s
from spotfleet.words import clock_utc

COOLDOWN_S = 15.0  # after the first refusal of a scope; doubles with each further one
COOLDOWN_MAX_S = 600.0
QUOTA = "quota "  # prefix of the keys of quotas
QUOTA_TRIES = 20  # refusals by a quota before the time doubles: an ending host counts for minutes, then there is room
MACHINE = "machines "  # prefix of the keys of a machine type in a zone, whose machines fail before they are hosts
FAILED_HOSTS = 3  # failures in a row; then no more of them are launched for FAILED_S
FAILED_S = 86400.0
MOST_LOST = 1000

# Events with the writer's own clock as `at`; the other kinds also carry times of clouds and of files.
TIMED = (LaunchIntended, LaunchRefused, HostListed, HostJoined, HostSilent, HostFailed, HostNoticed, HostDraining,
         TerminateIntended)
INSTANTS = ("since", "launched_at", "asked_at", "first_step_from", "silent_since", "missing_since",
            "notice_deadline", "terminate_at")


@dataclass(frozen=True)
class Refusals:
    count: int
    last_at: float
    why: str = ""  # reason of the last one
    first_at: float = 0.0


@dataclass(frozen=True)
class FleetState:
    """Never change the dicts in place: states share them."""

    created: FleetCreated | None = None
    nodes: Nodes | None = None  # range of all groups together
    groups: dict[str, Nodes] = field(default_factory=dict)  # range of each named group
    down: FleetDown | None = None
    taken_over: TakenOver | None = None  # the newest replacement of a lost dispatcher machine
    hosts: tuple[Host, ...] = ()  # not GONE, in the order of their launches
    ended: dict[str, Host] = field(default_factory=dict)  # GONE or refused, by request_id
    launches: int = 0  # numbers the next request_id; never falls
    last_job: int = 0  # the highest number in a job's name; never falls
    cooldown_until: dict[str, float] = field(default_factory=dict)  # scope key -> when launches may be tried again
    refusals: dict[str, Refusals] = field(default_factory=dict)  # scope key -> refusals in a row
    reclaimed_at: dict[str, float] = field(default_factory=dict)  # pool -> newest notice or loss in it
    prices: dict[str, PriceChanged] = field(default_factory=dict)  # pool -> newest price
    priced_from: dict[str, float] = field(default_factory=dict)  # pool -> start of its known prices
    rates: dict[str, RatesStamped] = field(default_factory=dict)  # PROVIDER/REGION -> newest
    first_rates: dict[str, RatesStamped] = field(default_factory=dict)  # PROVIDER/REGION -> oldest
    lost: tuple[ResultsLost, ...] = ()  # the newest MOST_LOST
    clock: float = -math.inf  # the latest time of our own clock
    history: MarketHistory = field(default_factory=MarketHistory)  # input of the policy
    DERIVED: ClassVar = {"places": ("hosts",), "lives": ("ended",)}

    def host(self, request_id: str) -> Host | None:
        """Return the host of that name, also if it is GONE."""
        place = self.places.get(request_id)
        return self.ended.get(request_id) if place is None else self.hosts[place]

    @cached_property
    def places(self) -> dict[str, int]:
        """Request_id -> index in `hosts`."""
        return {host.request_id: place for place, host in enumerate(self.hosts)}

    @cached_property
    def lives(self) -> dict[str, tuple[float, int]]:
        """Pool -> the seconds for which its ended spot hosts ran, and how often they were taken."""
        return _lives(self.ended.values(), {})


def fold(events: Iterable[Event]) -> FleetState:
    """Replay a ledger from its beginning."""
    state = FleetState()
    for event in events:
        state = apply(state, event)
    return state


def apply(state: FleetState, event: Event) -> FleetState:
    """Return the state after one more event. Events about hosts that no ledger row introduced change nothing."""
    if isinstance(event, TIMED) and event.at > state.clock:
        state = replace(state, clock=event.at)
    history = record(state.history, event, _observed_host(state, event))
    if history is not state.history:
        state = replace(state, history=history)
    match event:
        case ClockSetBack():
            return _set_back(state, event.by_s)
        case FleetCreated():
            return replace(state, created=event, nodes=event.nodes, groups=event.groups, down=None, lost=())
        case NodesChanged() if event.group:
            groups = {**state.groups, event.group: event.nodes}
            return replace(state, groups=groups, nodes=all_nodes(groups.values()))
        case NodesChanged():
            return replace(state, nodes=event.nodes)
        case FleetDown():
            return replace(state, down=event)
        case ResultsLost():
            return replace(state, lost=(*state.lost, event)[-MOST_LOST:])
        case TakenOver():
            return replace(state, taken_over=event)
        case PriceChanged():
            return _priced(state, event)
        case RatesStamped():
            return _rated(state, event)
        case LaunchIntended():
            return _intended(state, event)
        case LaunchRefused():
            return _refused(state, event)
        case HostListed():
            return _listed(state, event)
        case HostPlaced():
            return _placed(state, event)
        case HostNoticed():
            return _noticed(state, event)
        case HostJoined():
            return _change(_works(state, event.request_id), event.request_id, lambda h: _joined(h, event))
        case HostFailed():
            return _failed(state, event)
        case HostSilent():
            return _change(state, event.request_id, lambda h: replace(h, silent_since=event.at))
        case HostDraining():
            return _change(state, event.request_id, lambda h: _draining(h, event))
        case TerminateIntended():
            return _change(state, event.request_id, lambda h: _terminating(h, event))
        case TokenRevoked():
            return _revoked(state, event)
        case JobResumed() if event.first_steps:
            return _stepped(state, event)
        case JobSubmitted():
            return replace(state, last_job=max(state.last_job, _number(event.job)))
    return state


def _observed_host(state: FleetState, event: Event) -> HostObservation | None:
    """Return the worker host that the event is about, as it was before, for the policy's history."""
    about = isinstance(event, (HostJoined, HostListed, HostNoticed, LaunchRefused))
    host = state.host(event.request_id) if about else None
    if host is None or host.role is not Role.WORKER:
        return None
    beside = [h for h in state.hosts if h.group == host.group and h is not host and h.counts
              and h.notice_deadline is None]
    held = sum(h.offer.market is Market.SPOT and (bool(h.provider_id) or h.state is HostState.UP) for h in beside)
    nodes = state.groups.get(host.group, state.nodes)
    if nodes is not None and nodes.min == 0:  # as many as there are were wanted
        return HostObservation(host, held, sum(h.role is Role.WORKER for h in beside) + 1)
    return HostObservation(host, held, nodes.target if nodes else 1)


def of_group(state: FleetState, group: str) -> FleetState:
    """Return the state as the hosts of one group see it: without hosts and decisions of the others. Refusals and prices
    are of pools, so they stay."""
    if not group:
        return state
    history = replace(state.history, availability=state.history.availability_of.get(group, AvailabilityHistory()),
                      decided=state.history.decided_of.get(group))
    return replace(state, hosts=tuple(h for h in state.hosts if h.group == group), history=history)


def _set_back(state: FleetState, by_s: float) -> FleetState:
    """Return the state with every instant of our clock `by_s` earlier. Runs and prices have the cloud's time."""
    created, taken_over = state.created, state.taken_over

    def earlier(host: Host) -> Host:
        return replace(host, **{f: at - by_s for f in INSTANTS if (at := getattr(host, f)) is not None})

    def refused(past: Refusals) -> Refusals:
        return replace(past, last_at=past.last_at - by_s, first_at=past.first_at - by_s)

    return replace(
        state, clock=state.clock - by_s, history=set_back(state.history, by_s), hosts=tuple(map(earlier, state.hosts)),
        ended={name: earlier(host) for name, host in state.ended.items()},  # the cloud may bring one back
        cooldown_until={k: at - by_s for k, at in state.cooldown_until.items()},
        refusals={k: refused(r) for k, r in state.refusals.items()},
        reclaimed_at={k: at - by_s for k, at in state.reclaimed_at.items()},
        created=created and replace(created, at=created.at - by_s),  # else the age at the next start is wrong by it
        taken_over=taken_over and replace(taken_over, at=taken_over.at - by_s))


@lru_cache(maxsize=4096)
def scope_keys(offer: Offer) -> Mapping[str, str]:
    """Return scope -> key of the cooldown that applies to `offer`."""
    place = f"{offer.provider}/{offer.region}"
    return {
        "pool": f"pool {offer.pool}",
        "machine": f"{MACHINE}{offer.provider}/{offer.zone}/{offer.instance_type}",
        "type": f"type {place}/{offer.instance_type}/{offer.sold}",
        **({"quota": f"{QUOTA}{place} {offer.quota}"} if offer.quota else {}),
        "region": f"region {place}/{offer.sold}",
        "account": f"account {offer.provider}/{offer.sold}",
    }


def cooling_until(state: FleetState, offer: Offer) -> float:
    """Return when `offer` may be requested again; 0 if it was never refused."""
    return max(state.cooldown_until.get(key, 0.0) for key in scope_keys(offer).values())


def _change(state: FleetState, request_id: str, change: Callable[[Host], Host]) -> FleetState:
    place = state.places.get(request_id)
    if place is None:
        return state
    return replace(state, hosts=(*state.hosts[:place], change(state.hosts[place]), *state.hosts[place + 1:]))


def _priced(state: FleetState, event: PriceChanged) -> FleetState:
    known = state.prices.get(event.pool)
    if known is None:
        return replace(state, prices={**state.prices, event.pool: event},
                       priced_from={**state.priced_from, event.pool: event.at})
    if event.at < known.at:
        first = min(event.at, state.priced_from[event.pool])
        return replace(state, priced_from={**state.priced_from, event.pool: first})
    return replace(state, prices={**state.prices, event.pool: event})


def _rated(state: FleetState, event: RatesStamped) -> FleetState:
    place = f"{event.provider}/{event.region}"
    first, last = state.first_rates.get(place, event), state.rates.get(place, event)
    return replace(state, rates={**state.rates, place: event if event.at >= last.at else last},
                   first_rates={**state.first_rates, place: event if event.at < first.at else first})


def _put(state: FleetState, host: Host) -> FleetState:
    """Store `host` among the live or the ended hosts, according to its state."""
    ended = state.ended
    if host.state is HostState.GONE:
        hosts = tuple(h for h in state.hosts if h.request_id != host.request_id)
        after = replace(state, hosts=hosts, ended={**ended, host.request_id: host})
        if host.request_id not in ended:  # a new sum over thousands at each end takes long
            vars(after)["lives"] = _lives([host], state.lives)
        return after
    if host.request_id in state.places:
        return _change(state, host.request_id, lambda _: host)
    if host.request_id in ended:
        ended = {k: v for k, v in ended.items() if k != host.request_id}
        return replace(state, hosts=(*state.hosts, host), ended=ended)
    return replace(state, hosts=(*state.hosts, host))


def _lives(hosts: Iterable[Host], before: dict[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
    """Add the run times and losses of these hosts to `before`."""
    lives = before
    for host in hosts:
        if host.has_run_on_spot:
            seconds, taken = lives.get(host.offer.pool, (0.0, 0))
            lives = {**lives, host.offer.pool: (seconds + host.ran_s(host.since), taken + host.times_taken)}
    return lives


def _intended(state: FleetState, event: LaunchIntended) -> FleetState:
    launches = max(state.launches, _number(event.request_id.partition(SECOND)[0], -1) + 1)
    known = state.host(event.request_id)
    if known is not None:
        again = replace(known, asked_at=event.at, asks=known.asks + 1)
        return replace(_put(state, again), launches=launches)
    host = Host(event.request_id, event.role, event.offer, HostState.LAUNCHING, event.at, event.at, event.at,
                why=event.why, alternatives=event.alternatives, together=event.together, group=event.group)
    return replace(_put(state, host), launches=launches)


def _number(name: str, default: int = 0) -> int:
    """Return the number at the end of a name; `default` if it has none."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else default


def _placed(state: FleetState, event: HostPlaced) -> FleetState:
    host = state.host(event.request_id)
    return state if host is None else _put(state, replace(host, offer=event.offer))


def _refused(state: FleetState, event: LaunchRefused) -> FleetState:
    host = state.host(event.request_id)
    if host is None or host.provider_id:
        return state  # a host that the cloud has listed was not refused
    state = _put(state, replace(host, state=HostState.GONE, since=event.at, why=event.why))
    for key in _refused_keys(host, event):
        state = _cool(state, key, event)
    return state


def _refused_keys(host: Host, event: LaunchRefused) -> list[str]:
    """Return the keys of every pool that refused; if none is named, of the pool that was requested first."""
    named = {o.pool: o for o in (host.offer, *host.alternatives)}
    keys = [scope_keys(named[p]) if p in named else {"pool": f"pool {p}"} for p in event.pools or (host.offer.pool,)]
    return list(dict.fromkeys(k.get(event.scope, k["pool"]) for k in keys))


def _cool(state: FleetState, key: str, event: LaunchRefused) -> FleetState:
    past, at = state.refusals.get(key), event.at
    count, first_at = 1, at
    if past and at - past.last_at <= 2 * COOLDOWN_MAX_S:
        count, first_at = past.count + (at != past.last_at), past.first_at  # refusals of one tick count once
    doubling = max(1, count - QUOTA_TRIES) if key.startswith(QUOTA) else count
    until = at + growing_s(doubling, COOLDOWN_S, COOLDOWN_MAX_S)
    return replace(state, cooldown_until={**state.cooldown_until, key: until},
                   refusals={**state.refusals, key: Refusals(count, at, event.why, first_at)})


def _listed(state: FleetState, event: HostListed) -> FleetState:
    host = state.host(event.request_id)
    if host is None:
        return state
    after = _with_listing(host, event)
    if not event.missing and not host.provider_id and event.state is not CloudState.TERMINATED:
        state = _forget_refusals(state, host)
    taken = [r.ended_at for r in event.runs if r.taken and r.ended_at is not None]
    if taken and not any(r.taken and r.ended_at == taken[-1] for r in host.runs):
        state = _reclaimed(state, host.offer.pool, taken[-1])
    return _put(state, after)


def _with_listing(host: Host, event: HostListed) -> Host:
    taken_and_back = host.notice_deadline is not None and _runs_anew(host, event)  # and no listing showed it stopped
    host = replace(host, provider_id=event.provider_id or host.provider_id, cloud=event.state, runs=event.runs,
                   address=event.address or host.address, port=event.port or host.port,
                   disk_gib=host.disk_gib if event.missing else event.disk_gib,
                   addresses=max(host.addresses, event.addresses))
    if event.missing and event.state is not CloudState.TERMINATED:
        return replace(host, missing_since=event.at)
    host = replace(host, missing_since=event.at if event.missing else None)
    match event.state:
        case CloudState.TERMINATED:
            # a host that we gave up may reappear with the same agent
            incarnation = "" if event.missing else host.incarnation
            return _enter(replace(host, incarnation=incarnation, silent_since=None), HostState.GONE, event)
        case CloudState.STOPPED:
            return _enter(replace(host, notice_deadline=None, notice_action="", hint="", silent_since=None, failed="",
                                  broken=False), HostState.STOPPED, event)
    if host.terminate_at is not None:
        revived = host.revived or host.state is HostState.GONE
        return _enter(replace(host, revived=revived), HostState.DRAINING, event)
    if taken_and_back:
        host = replace(host, notice_deadline=None, notice_action="", hint="", why="")
    if host.state in (HostState.STOPPED, HostState.GONE) or taken_and_back:
        return _enter(host, HostState.LAUNCHING, event)
    return host


def _runs_anew(host: Host, event: HostListed) -> bool:
    return bool(host.runs and event.runs) and event.runs[-1].started_at > host.runs[-1].started_at


def _enter(host: Host, state: HostState, event: HostListed) -> Host:
    if host.state is state:
        return host
    return replace(host, state=state, since=event.at, why=event.why or host.why)


def _forget_refusals(state: FleetState, host: Host) -> FleetState:
    """Drop the refusals before a launch that the cloud accepted: there is room again."""
    over = {key for key in scope_keys(host.offer).values()
            if key in state.refusals and state.refusals[key].last_at < host.asked_at and not key.startswith(MACHINE)}
    return _without(state, over)


def _without(state: FleetState, over: Iterable[str]) -> FleetState:
    if not over:
        return state
    return replace(state, refusals={k: v for k, v in state.refusals.items() if k not in over},
                   cooldown_until={k: v for k, v in state.cooldown_until.items() if k not in over})


def _failed(state: FleetState, event: HostFailed) -> FleetState:
    host = state.host(event.request_id)
    if host is None or host.failed or host.state is HostState.GONE:
        return state
    key = scope_keys(host.offer)["machine"]
    past = Refusals(failures(state, host.offer, event.at) + 1, event.at, event.why)
    until = event.at + FAILED_S if past.count >= FAILED_HOSTS else 0.0
    state = replace(state, refusals={**state.refusals, key: past},
                    cooldown_until={**state.cooldown_until, key: until})
    return _put(state, replace(host, failed=event.why, broken=event.broken, why=f"it failed: {event.why}"))


def failures(state: FleetState, offer: Offer, now: float) -> int:
    """Return how many machines of this type in this zone failed in a row before they were hosts."""
    past = state.refusals.get(scope_keys(offer)["machine"])
    return past.count if past is not None and now - past.last_at <= FAILED_S else 0


def after_failure(state: FleetState, host: Host, broken: bool, now: float) -> str:
    """Return what happens after the failure of this host's machine, and what a person can do."""
    if failures(state, host.offer, now) + 1 >= FAILED_HOSTS:
        return (f"{FAILED_HOSTS} machines in a row of {host.offer.instance_type} in {host.offer.zone} failed: no more "
                f"are launched there for a day, until {clock_utc(now + FAILED_S)}; name another type, zone or image")
    if broken:
        return "nothing to do: the machine is ended, and another one is launched"
    return (f"its machine stays on for a while: `spotfleet ssh {host.request_id}`, the log is bootstrap.log in "
            f"~/.spotfleet-host/{host.request_id}")


def failing(state: FleetState, now: float) -> dict[str, str]:
    """Return each machine type in a zone that is not launched because its machines failed, with the sentence."""
    return {key: f"{key}: {past.count} in a row failed, the last one because {past.why.rstrip(';. ')}; no more are "
                 f"launched there for a day, until {clock_utc(state.cooldown_until[key])}: another type, zone or image "
                 "helps"
            for key, past in state.refusals.items()
            if key.startswith(MACHINE) and state.cooldown_until.get(key, 0.0) > now}


def _works(state: FleetState, request_id: str) -> FleetState:
    """Drop the failures of the machine type in this host's zone: one that works has joined."""
    host = state.host(request_id)
    key = scope_keys(host.offer)["machine"] if host is not None else ""
    return _without(state, {key} if key in state.refusals else ())


def _reclaimed(state: FleetState, pool: str, at: float) -> FleetState:
    return replace(state, reclaimed_at={**state.reclaimed_at, pool: max(at, state.reclaimed_at.get(pool, 0.0))})


def hint_of(kind: str, why: str) -> str:
    return why or f"the cloud hints that it may take it ({kind})"


def _noticed(state: FleetState, event: HostNoticed) -> FleetState:
    place = state.places.get(event.request_id)
    if place is None:
        return state
    host = state.hosts[place]
    if event.notice != "interruption":
        return _put(state, replace(host, hint=hint_of(event.notice, event.why)))
    state = _reclaimed(state, host.offer.pool, event.at)
    return _put(state, replace(host, notice_deadline=event.at + event.seconds_left, notice_action=event.action))


def _joined(host: Host, event: HostJoined) -> Host:
    launched_at = host.since if event.boot is not None else host.first_step_from
    host = replace(host, incarnation=event.incarnation, silent_since=None, first_step_from=launched_at, failed="",
                   broken=False)
    if host.terminate_at is None and host.state in (HostState.LAUNCHING, HostState.STOPPED):
        return replace(host, state=HostState.UP, since=event.at, why="")
    return host


def _stepped(state: FleetState, event: JobResumed) -> FleetState:
    for name in event.first_steps:
        state = _change(state, name, lambda h: replace(h, first_step_from=None))
    return state


def _draining(host: Host, event: HostDraining) -> Host:
    if not host.counts:
        return host
    return replace(host, state=HostState.DRAINING, since=event.at, why=event.why)


def _terminating(host: Host, event: TerminateIntended) -> Host:
    host = replace(host, terminate_at=event.at)
    if host.state not in (HostState.LAUNCHING, HostState.UP):
        return host
    return replace(host, state=HostState.DRAINING, since=event.at, why=event.why)


def _revoked(state: FleetState, event: TokenRevoked) -> FleetState:
    host = state.host(event.request_id)
    return state if host is None else _put(state, replace(host, revoked=event.why or "no reason given"))
