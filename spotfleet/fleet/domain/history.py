"""Facts that the policy derives from the ledger: spot availability, boot times, stalls, job progress. Pure.

They are folded from the same events as the hosts, so a restarted dispatcher continues with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spotfleet.fleet.domain.availability import AvailabilityHistory, AvailabilityPeriod, is_available, observe
from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.domain.events import (
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
from spotfleet.fleet.domain.host import Host
from spotfleet.model import CloudState, HostState, Market, PolicySpec, Rates

KEPT = 20  # number of the newest boots and stalls
ENOUGH_S = 120.0  # training time that yields a step's time with everything between steps: progress comes each 10 s
RECENT_S = 4 * 3600.0  # training time that counts in full; older training counts ever less


@dataclass(frozen=True)
class TrainingMark:
    """Instant at which a job trained, with `version` as its newest step; its members are the same since."""

    at: float
    version: int


@dataclass(frozen=True)
class JobProgressSoFar:
    """Progress of a job. Repeated steps count once."""

    version: int = 0
    host_s: float = 0.0  # host-seconds of useful work
    step_s: float = 0.0
    hosts: int = 0  # that train it
    step_bytes: int = 0
    mark: TrainingMark | None = None  # None: no event shows that it trains
    trained_s: float = 0.0  # recently, by the clock, with evaluations, checkpoints and waits for data
    stepped_s: float = 0.0  # time of the same steps by their medians

    @property
    def pace_s(self) -> float:
        """Seconds per step with everything between steps; the median of steps alone while data is scarce."""
        return self.step_s * self.trained_s / self.stepped_s if self.trained_s >= ENOUGH_S else self.step_s


@dataclass(frozen=True)
class MarketHistory:
    availability: AvailabilityHistory = field(default_factory=AvailabilityHistory)
    boots: tuple[float, ...] = ()  # seconds from a launch until the agent joined, newest last
    boots_of: dict[str, tuple[float, ...]] = field(default_factory=dict)  # the same by `pool` and `kind` of the offer
    stalls: tuple[float, ...] = ()  # seconds for which all hosts of a job waited or repeated
    progress: dict[str, JobProgressSoFar] = field(default_factory=dict)  # by live job; never change it in place
    rates: dict[str, Rates] = field(default_factory=dict)  # by provider/region; never change it in place
    decided: PolicyDecided | None = None  # the newest
    reached: dict[str, BudgetReached] = field(default_factory=dict)  # by limit; never change it in place
    policy: PolicySpec | None = None  # as changed since the fleet was made
    # `availability` and `decided` of the named groups; never change them in place.
    availability_of: dict[str, AvailabilityHistory] = field(default_factory=dict)
    decided_of: dict[str, PolicyDecided] = field(default_factory=dict)


@dataclass(frozen=True)
class HostObservation:
    """Worker host that an event is about, as it was before, and the number of other spot hosts."""

    host: Host
    held: int
    target: int  # hosts wanted in all


def record(history: MarketHistory, event: Event, observation: HostObservation | None) -> MarketHistory:
    """Return the history after one more event."""
    host = observation.host if observation is not None else None
    match event:
        case FleetCreated():
            return MarketHistory()
        case HostJoined() if host is not None and host.state is HostState.LAUNCHING:
            booted_s = max(0.0, event.at - host.since)
            boots = (*history.boots, booted_s)[-KEPT:]
            of = {key: (*history.boots_of.get(key, ()), booted_s)[-KEPT:] for key in (host.offer.pool, host.offer.kind)}
            return replace(_spot(history, observation, event.at, available=True), boots=boots,
                           boots_of={**history.boots_of, **of})
        case LaunchRefused() if host is not None and not host.provider_id:
            return _spot(history, observation, event.at, available=False)
        case HostNoticed() if host is not None and event.notice == "interruption":
            return _spot(history, observation, event.at, available=False)
        case HostListed() if host is not None:
            return _listed(history, event, observation)
        case GenerationFormed():
            hosts = len({m.partition("/")[0] for m in event.members})
            was = _progress_at(history, event.job, event.version)
            return _put(history, event.job, replace(was, hosts=hosts or was.hosts, mark=None))
        case JobProgress():
            return _progressed(history, event)
        case JobResumed():
            was = _progress_at(history, event.job, event.version)
            lost_s = event.pause_s + event.after_pause * was.step_s
            was = replace(was, mark=TrainingMark(event.at, event.version))
            return _put(replace(history, stalls=(*history.stalls, lost_s)[-KEPT:]), event.job, was)
        case JobChanged() if event.state.ended and event.job in history.progress:
            return replace(history, progress={j: p for j, p in history.progress.items() if j != event.job})
        case RatesStamped():
            return replace(history, rates={**history.rates, f"{event.provider}/{event.region}": event.rates})
        case PolicyDecided() if event.group:
            return replace(history, decided_of={**history.decided_of, event.group: event})
        case PolicyDecided():
            return replace(history, decided=event)
        case PolicyChanged():
            return replace(history, policy=event.policy)
        case BudgetReached():
            return replace(history, reached={**history.reached, event.limit: event})
    return history


def set_back(history: MarketHistory, by_s: float) -> MarketHistory:
    """Return the history with all instants `by_s` earlier, because our clock was set."""
    def earlier(past: AvailabilityHistory) -> AvailabilityHistory:
        return AvailabilityHistory(tuple(AvailabilityPeriod(p.available, p.since - by_s, p.until - by_s)
                                         for p in past.periods))

    decided = history.decided and replace(history.decided, at=history.decided.at - by_s)
    progress = {job: replace(p, mark=p.mark and replace(p.mark, at=p.mark.at - by_s))
                for job, p in history.progress.items()}
    return replace(history, availability=earlier(history.availability), decided=decided, progress=progress,
                   availability_of={g: earlier(past) for g, past in history.availability_of.items()},
                   decided_of={g: replace(d, at=d.at - by_s) for g, d in history.decided_of.items()})


def _spot(history: MarketHistory, observation: HostObservation | None, at: float, *, available: bool) -> MarketHistory:
    """Record whether spot hosts are available: at least half of the target is held, see `is_available`.

    One accepted launch alone does not prove availability. One refusal or interruption does not disprove it while
    enough other hosts are held.
    """
    if observation is None or observation.host.offer.market is not Market.SPOT:
        return history
    enough = is_available(observation.held + available, 0, observation.target)
    if available and not enough:
        return history
    if group := observation.host.group:
        past = history.availability_of.get(group, AvailabilityHistory())
        return replace(history, availability_of={**history.availability_of, group: observe(past, at, enough)})
    return replace(history, availability=observe(history.availability, at, enough))


def _listed(history: MarketHistory, event: HostListed, observation: HostObservation | None) -> MarketHistory:
    if event.missing or observation is None:
        return history
    if sum(r.taken for r in event.runs) > sum(r.taken for r in observation.host.runs):
        return _spot(history, observation, event.at, available=False)
    fresh = not observation.host.provider_id and event.state is not CloudState.TERMINATED
    return _spot(history, observation, event.at, available=True) if fresh else history


def _put(history: MarketHistory, job: str, worked: JobProgressSoFar) -> MarketHistory:
    return replace(history, progress={**history.progress, job: worked})


def _progressed(history: MarketHistory, event: JobProgress) -> MarketHistory:
    """Record progress. The time between two reports gives the time per step, everything between steps included."""
    was = history.progress.get(event.job, JobProgressSoFar())
    step_s, mark = event.step_s or was.step_s, was.mark
    reported = replace(was, step_s=step_s, step_bytes=event.step_bytes or was.step_bytes)
    if mark is None or step_s <= 0 or event.version <= mark.version:
        return _put(history, event.job, _with_steps(reported, event.version, reported.pace_s))
    took_s, made = max(0.0, event.at - mark.at), event.version - mark.version
    reported = _with_steps(reported, event.version, took_s / made)
    trained_s, stepped_s = was.trained_s + took_s, was.stepped_s + made * step_s
    recent = min(1.0, RECENT_S / max(trained_s, 1.0))
    return _put(history, event.job, replace(
        reported, mark=TrainingMark(event.at, event.version), trained_s=trained_s * recent,
        stepped_s=stepped_s * recent))


def _progress_at(history: MarketHistory, job: str, version: int) -> JobProgressSoFar:
    """Return the progress of a job that is at `version`."""
    was = history.progress.get(job, JobProgressSoFar())
    return _with_steps(was, version, was.pace_s)


def _with_steps(was: JobProgressSoFar, version: int, each_s: float) -> JobProgressSoFar:
    """Add the steps since the last report, which the previous hosts made."""
    done = max(0, version - was.version)
    return replace(was, version=max(version, was.version), host_s=was.host_s + done * each_s * was.hosts)
