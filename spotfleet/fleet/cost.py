"""What a fleet has cost: a function of the ledger's events and nothing else. Pure.

Prices are those of the time, so a bill never changes afterwards. Each host is rounded once; the lines of its runs are
differences of rounded running sums and add up to it. Jobs share a host by the slots they hold in it; what no job holds
is idle, and so are the fractions of a micro-dollar that a split leaves over.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from spotfleet.fleet.billing import PARTS, Piece, PriceBook, pieces, round_half_up, seconds_until
from spotfleet.fleet.events import (
    CheckpointKept,
    Event,
    FleetCreated,
    GenerationFormed,
    HistoryLost,
    HostJoined,
    HostListed,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    LaunchIntended,
    PriceChanged,
    TakenOver,
)
from spotfleet.model import BillingRules, Offer, Role, Run

_ALL_SECONDS = 2**62


@dataclass(frozen=True)
class HostLine:
    """One billed run of one host."""

    host: str
    role: str
    pool: str
    market: str
    started_at: float
    ended_at: float | None  # None: still running
    taken: bool  # ended by the cloud
    seconds: int  # as billed: a minimum counts in full
    micros: int
    on_demand_micros: int  # the same seconds on demand


@dataclass(frozen=True)
class JobLine:
    job: str
    name: str
    micros: int  # its share of the hosts that its generations used
    on_demand_micros: int
    useful_steps: int
    micros_per_1000_steps: int | None  # None before the first step
    repeated_steps: int
    repeated_micros: int  # hosts kept busy with steps computed again
    pause_micros: int  # hosts kept waiting while a generation formed


@dataclass(frozen=True)
class CostReport:
    at: float
    fleet: str
    lines: tuple[HostLine, ...]
    jobs: tuple[JobLine, ...]
    micros: int
    on_demand_micros: int
    dispatcher_micros: int
    idle_micros: int  # worker hosts while no job held them
    boot_micros: int  # worker hosts from the start of a run until they joined; part of idle
    repeated_micros: int
    pause_micros: int
    useful_steps: int
    micros_per_1000_steps: int | None
    missing_before: float | None = None  # a ledger was lost then: of what had ended before, only what is listed here

    @property
    def savings_percent(self) -> float:
        """Against the same seconds on demand; 0 for a fleet that has cost nothing yet."""
        return 100 * (self.on_demand_micros - self.micros) / self.on_demand_micros if self.on_demand_micros else 0.0


@dataclass(frozen=True)
class _Host:
    """What the ledger says of one host, as far as money goes."""

    request_id: str
    role: Role
    offer: Offer
    runs: tuple[Run, ...]
    joined_at: tuple[float, ...]


@dataclass(frozen=True)
class _Stay:
    """`job` held `slots` slots of a host."""

    job: str
    slots: int
    since: float
    until: float


@dataclass(frozen=True)
class _Job:
    job: str
    name: str
    stays: dict[str, list[_Stay]]  # by host
    useful_steps: int
    resumed: tuple[JobResumed, ...]
    progress: tuple[JobProgress, ...]
    formed: dict[int, GenerationFormed]


def report(events: Iterable[Event], now: float) -> CostReport:
    """The bill by `now`. Give the events of all ledgers of the fleet one after the other: the dispatcher's, the
    laptop's. Runs that have not ended count up to `now`."""
    events = list(events)
    created = next((e for e in events if isinstance(e, FleetCreated)), None)
    rules = created.billing if created else BillingRules()
    book = PriceBook(e for e in events if isinstance(e, PriceChanged))
    hosts, jobs = _hosts(events), _jobs(events, now)
    lines: list[HostLine] = []
    shares: dict[str, Fraction] = dict.fromkeys(jobs, Fraction(0))
    full_shares = dict(shares)
    boot_parts = 0
    for host in hosts.values():
        bills = [(run, pieces(run, book.history(host.offer, run.started_at), rules, now)) for run in host.runs]
        lines += _lines(host, bills)
        if host.role is not Role.WORKER:
            continue
        stays = [s for job in jobs.values() for s in job.stays.get(host.request_id, [])]
        for run, bill in bills:
            boot_parts += sum(p.cut(0, _boot_seconds(run, host.joined_at)).parts for p in bill)
            for job, parts, full_parts in _split(run, bill, stays, host.offer.slots, now):
                shares[job] += parts
                full_shares[job] += full_parts
    job_lines = tuple(_job_line(job, int(shares[job.job] / PARTS), int(full_shares[job.job] / PARTS), hosts, book)
                      for job in jobs.values())
    lost = [e.at for e in events if isinstance(e, HistoryLost) or (isinstance(e, TakenOver) and not e.restored)]
    return _total(now, created, lines, job_lines, round_half_up(boot_parts), max(lost, default=None))


def _total(now: float, created: FleetCreated | None, lines: list[HostLine], jobs: tuple[JobLine, ...],
           boot_micros: int, missing_before: float | None) -> CostReport:
    micros = sum(line.micros for line in lines)
    dispatcher = sum(line.micros for line in lines if line.role == Role.DISPATCHER.value)
    steps = sum(job.useful_steps for job in jobs)
    return CostReport(
        at=now,
        fleet=created.fleet if created else "",
        lines=tuple(sorted(lines, key=lambda line: (line.started_at, line.host))),
        jobs=jobs,
        micros=micros,
        on_demand_micros=sum(line.on_demand_micros for line in lines),
        dispatcher_micros=dispatcher,
        idle_micros=micros - dispatcher - sum(job.micros for job in jobs),
        boot_micros=boot_micros,
        repeated_micros=sum(job.repeated_micros for job in jobs),
        pause_micros=sum(job.pause_micros for job in jobs),
        useful_steps=steps,
        micros_per_1000_steps=_per_1000(micros, steps),
        missing_before=missing_before,
    )


def _hosts(events: list[Event]) -> dict[str, _Host]:
    intents: dict[str, LaunchIntended] = {}
    runs: dict[str, tuple[Run, ...]] = {}
    joined: dict[str, list[float]] = {}
    for event in events:
        match event:
            case LaunchIntended():
                intents.setdefault(event.request_id, event)
            case HostListed():
                runs[event.request_id] = event.runs
            case HostJoined():
                joined.setdefault(event.request_id, []).append(event.at)
    return {name: _Host(name, e.role, e.offer, runs.get(name, ()), tuple(joined.get(name, ())))
            for name, e in intents.items()}


def _lines(host: _Host, bills: list[tuple[Run, list[Piece]]]) -> list[HostLine]:
    lines, parts, full_parts = [], 0, 0
    for run, bill in bills:
        before, full_before = round_half_up(parts), round_half_up(full_parts)
        parts += sum(p.parts for p in bill)
        full_parts += sum(p.on_demand_parts for p in bill)
        lines.append(HostLine(
            host.request_id, host.role.value, host.offer.pool, host.offer.market.value, run.started_at, run.ended_at,
            run.taken, sum(p.end - p.begin for p in bill), round_half_up(parts) - before,
            round_half_up(full_parts) - full_before))
    return lines


def _boot_seconds(run: Run, joined_at: tuple[float, ...]) -> int:
    """Seconds of `run` before its agent joined; all of them if it never did."""
    ended_at = math.inf if run.ended_at is None else run.ended_at
    first = next((at for at in joined_at if run.started_at <= at <= ended_at), None)
    return _ALL_SECONDS if first is None else seconds_until(run, first)


def _split(run: Run, bill: list[Piece], stays: list[_Stay], slots: int,
           now: float) -> Iterator[tuple[str, Fraction, Fraction]]:
    """(job, its parts, its parts on demand) for every stretch of `run` in which the slots held stay the same."""
    end = now if run.ended_at is None else run.ended_at
    length = seconds_until(run, end)  # what a minimum adds to a short run was used by nobody
    changes: list[tuple[int, str, int]] = []
    for stay in stays:
        since, until = seconds_until(run, stay.since), min(length, seconds_until(run, stay.until))
        if since < until:
            changes += [(since, stay.job, stay.slots), (until, stay.job, -stay.slots)]
    held: Counter[str] = Counter()
    changes.sort()
    for i, (begin, job, count) in enumerate(changes):
        held[job] += count
        until = changes[i + 1][0] if i + 1 < len(changes) else begin
        if until == begin:
            continue
        cut = [p.cut(begin, until) for p in bill]
        parts, full_parts = sum(p.parts for p in cut), sum(p.on_demand_parts for p in cut)
        whole = max(slots, held.total())
        for name, count in held.items():
            yield name, Fraction(parts * count, whole), Fraction(full_parts * count, whole)


def _jobs(events: list[Event], now: float) -> dict[str, _Job]:
    names: dict[str, str] = {}
    steps: Counter[str] = Counter()
    log: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event, JobSubmitted):
            names[event.job] = event.name
        elif isinstance(event, (JobChanged, GenerationFormed, JobResumed, JobProgress, CheckpointKept)):
            names.setdefault(event.job, "")
            steps[event.job] = max(steps[event.job], event.version)
            log.setdefault(event.job, []).append(event)
    return {job: _job(job, name, steps[job], log.get(job, []), now) for job, name in names.items()}


def _job(job: str, name: str, steps: int, log: list[Event], now: float) -> _Job:
    stays: dict[str, list[_Stay]] = {}
    held: Counter[str] = Counter()
    since = 0.0
    for event in [*log, None]:
        ended = event is None or (isinstance(event, JobChanged) and event.state.ended)
        if not ended and not isinstance(event, GenerationFormed):
            continue
        until = event.at if event else now
        for host, slots in held.items():
            stays.setdefault(host, []).append(_Stay(job, slots, since, until))
        held = Counter() if ended else _slots(event)
        since = until
    return _Job(job, name, stays, steps, tuple(e for e in log if isinstance(e, JobResumed)),
                tuple(e for e in log if isinstance(e, JobProgress)),
                {e.generation: e for e in log if isinstance(e, GenerationFormed)})


def _slots(formed: GenerationFormed) -> Counter[str]:
    """Host -> how many of its slots the generation holds; a worker's name is HOST/SLOT/INCARNATION."""
    return Counter(member.partition("/")[0] for member in formed.members)


def _job_line(job: _Job, micros: int, on_demand_micros: int, hosts: dict[str, _Host], book: PriceBook) -> JobLine:
    repeated, paused = Fraction(0), Fraction(0)
    for event in job.resumed:
        burn = _burn(job.formed.get(event.generation), event.at, hosts, book)
        repeated += burn * event.repeated * Fraction(_step_s(job, event.at))
        paused += burn * Fraction(event.pause_s)
    return JobLine(job.job, job.name, micros, on_demand_micros, job.useful_steps,
                   _per_1000(micros, job.useful_steps), sum(e.repeated for e in job.resumed),
                   int(repeated / PARTS + Fraction(1, 2)), int(paused / PARTS + Fraction(1, 2)))


def _burn(formed: GenerationFormed | None, at: float, hosts: dict[str, _Host], book: PriceBook) -> Fraction:
    """Micro-dollars per hour of the slots that a generation holds."""
    total = Fraction(0)
    for name, slots in (_slots(formed) if formed else Counter()).items():
        if name in hosts:
            offer = hosts[name].offer
            total += Fraction(book.at(offer, at).micros_h * slots, max(slots, offer.slots))
    return total


def _step_s(job: _Job, at: float) -> float:
    """How long a step took at about `at`."""
    before = [p.step_s for p in job.progress if p.at <= at and p.step_s > 0]
    after = [p.step_s for p in job.progress if p.at > at and p.step_s > 0]
    return before[-1] if before else after[0] if after else 0.0


def _per_1000(micros: int, steps: int) -> int | None:
    return (2 * micros * 1000 + steps) // (2 * steps) if steps else None
