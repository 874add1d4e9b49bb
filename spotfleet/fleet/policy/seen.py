"""What a fleet's ledger tells its policy: when spot hosts were to be had, how long things take, how far jobs are. Pure.

It is folded from the same events as the hosts, so that a dispatcher which restarts goes on with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spotfleet.fleet.copies import replace
from spotfleet.fleet.events import (
    BudgetReached,
    Event,
    FleetCreated,
    GenerationFormed,
    HostJoined,
    HostListed,
    HostNoticed,
    JobChanged,
    JobProgress,
    JobResumed,
    LaunchRefused,
    PolicyChanged,
    PolicyDecided,
    RatesStamped,
)
from spotfleet.fleet.host import Host
from spotfleet.fleet.policy.memory import plenty, remember
from spotfleet.fleet.policy.values import Memory, Spell
from spotfleet.model import CloudState, HostState, Market, PolicySpec, Rates

KEPT = 20  # of the newest boots and stalls
ENOUGH_S = 120.0  # of training tell how long a step takes with all that is between steps: progress is told each 10 s
RECENT_S = 4 * 3600.0  # of training count, older ones ever less


@dataclass(frozen=True)
class Mark:
    """A job trained at `at`, its newest step `version`, and has not changed its members since."""

    at: float
    version: int


@dataclass(frozen=True)
class Worked:
    """How far a job is. Steps that were repeated count once."""

    version: int = 0
    host_s: float = 0.0  # host-seconds of useful work
    step_s: float = 0.0
    hosts: int = 0  # that train it
    step_bytes: int = 0
    ended: bool = False
    mark: Mark | None = None  # None: nothing says that it trains
    trained_s: float = 0.0  # of late, by the clock, with evaluations, checkpoints and waits for data
    stepped_s: float = 0.0  # what the same steps take by the medians

    @property
    def pace_s(self) -> float:
        """What a step takes with all that is between steps; the median of steps alone while little is known."""
        return self.step_s * self.trained_s / self.stepped_s if self.trained_s >= ENOUGH_S else self.step_s


@dataclass(frozen=True)
class Seen:
    memory: Memory = field(default_factory=Memory)
    boots: tuple[float, ...] = ()  # seconds from a launch until the agent joined, newest last
    stalls: tuple[float, ...] = ()  # seconds for which all hosts of a job waited or repeated
    works: dict[str, Worked] = field(default_factory=dict)  # by job; never change it in place
    rates: dict[str, Rates] = field(default_factory=dict)  # by provider/region; never change it in place
    decided: PolicyDecided | None = None  # the newest
    reached: dict[str, BudgetReached] = field(default_factory=dict)  # by limit; never change it in place
    policy: PolicySpec | None = None  # as changed since the fleet was made


@dataclass(frozen=True)
class Sight:
    """The worker host that an event is about, as it was before, and how many spot hosts there are besides."""

    host: Host
    held: int
    target: int  # hosts wanted in all


def see(seen: Seen, event: Event, sight: Sight | None) -> Seen:
    """What is known after one more event."""
    host = sight.host if sight is not None else None
    match event:
        case FleetCreated():
            return Seen()
        case HostJoined() if host is not None and host.state is HostState.LAUNCHING:
            booted_s = max(0.0, event.at - host.since)
            return replace(_spot(seen, sight, event.at, available=True), boots=(*seen.boots, booted_s)[-KEPT:])
        case LaunchRefused() if host is not None and not host.provider_id:
            return _spot(seen, sight, event.at, available=False)
        case HostNoticed() if host is not None and event.notice == "interruption":
            return _spot(seen, sight, event.at, available=False)
        case HostListed() if host is not None:
            return _listed(seen, event, sight)
        case GenerationFormed():
            hosts = len({m.partition("/")[0] for m in event.members})
            was = _worked(seen, event.job, event.version)
            return _put(seen, event.job, replace(was, hosts=hosts or was.hosts, mark=None))
        case JobProgress():
            return _progressed(seen, event)
        case JobResumed():
            was = _worked(seen, event.job, event.version)
            lost_s = event.pause_s + event.repeated * was.step_s
            was = replace(was, mark=Mark(event.at, event.version))
            return _put(replace(seen, stalls=(*seen.stalls, lost_s)[-KEPT:]), event.job, was)
        case JobChanged() if event.state.ended and event.job in seen.works:
            works = {**seen.works, event.job: replace(seen.works[event.job], ended=True)}
            return replace(seen, works=works)
        case RatesStamped():
            return replace(seen, rates={**seen.rates, f"{event.provider}/{event.region}": event.rates})
        case PolicyDecided():
            return replace(seen, decided=event)
        case PolicyChanged():
            return replace(seen, policy=event.policy)
        case BudgetReached():
            return replace(seen, reached={**seen.reached, event.limit: event})
    return seen


def set_back(seen: Seen, by_s: float) -> Seen:
    """All instants `by_s` earlier: our clock was set."""
    spells = tuple(Spell(s.available, s.since - by_s, s.until - by_s) for s in seen.memory.spells)
    decided = seen.decided and replace(seen.decided, at=seen.decided.at - by_s)
    works = {j: replace(w, mark=w.mark and replace(w.mark, at=w.mark.at - by_s)) for j, w in seen.works.items()}
    return replace(seen, memory=Memory(spells), decided=decided, works=works)


def _spot(seen: Seen, sight: Sight | None, at: float, *, available: bool) -> Seen:
    """Spot hosts can be had while at least half of the target is held, see `memory.plenty`. One that was accepted is a
    good sign, but not enough for that; one that was refused or is taken means little while there are enough others."""
    if sight is None or sight.host.offer.market is not Market.SPOT:
        return seen
    enough = plenty(sight.held + available, 0, sight.target)
    if available and not enough:
        return seen
    return replace(seen, memory=remember(seen.memory, at, enough))


def _listed(seen: Seen, event: HostListed, sight: Sight | None) -> Seen:
    if event.missing or sight is None:
        return seen
    if sum(r.taken for r in event.runs) > sum(r.taken for r in sight.host.runs):
        return _spot(seen, sight, event.at, available=False)
    fresh = not sight.host.provider_id and event.state is not CloudState.TERMINATED
    return _spot(seen, sight, event.at, available=True) if fresh else seen


def _put(seen: Seen, job: str, worked: Worked) -> Seen:
    return replace(seen, works={**seen.works, job: worked})


def _progressed(seen: Seen, event: JobProgress) -> Seen:
    """From one step that was seen first to another the clock tells what steps took, whatever was between them."""
    was = seen.works.get(event.job, Worked())
    step_s, mark = event.step_s or was.step_s, was.mark
    told = replace(was, step_s=step_s, step_bytes=event.step_bytes or was.step_bytes)
    if mark is None or step_s <= 0 or event.version <= mark.version:
        return _put(seen, event.job, _made(told, event.version, told.pace_s))
    took_s, made = max(0.0, event.at - mark.at), event.version - mark.version
    told = _made(told, event.version, took_s / made)
    trained_s, stepped_s = was.trained_s + took_s, was.stepped_s + made * step_s
    recent = min(1.0, RECENT_S / max(trained_s, 1.0))
    return _put(seen, event.job, replace(told, mark=Mark(event.at, event.version), trained_s=trained_s * recent,
                                         stepped_s=stepped_s * recent))


def _worked(seen: Seen, job: str, version: int) -> Worked:
    """What is known of a job that is at `version`."""
    was = seen.works.get(job, Worked())
    return _made(was, version, was.pace_s)


def _made(was: Worked, version: int, each_s: float) -> Worked:
    """The steps since the last time were made by the hosts of before."""
    done = max(0, version - was.version)
    return replace(was, version=max(version, was.version), host_s=was.host_s + done * each_s * was.hosts)
