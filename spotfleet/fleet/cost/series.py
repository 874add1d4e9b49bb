"""History of a fleet as points for charts: money, hosts, interruptions. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.fleet.cost.meter import Meter
from spotfleet.fleet.domain.events import BudgetReached, Event, HostNoticed, JobChanged
from spotfleet.model import Market, Role


@dataclass(frozen=True)
class CostPoint:
    """Money spent by `at`, since the beginning of the series."""

    at: float
    micros: int  # total
    spot_micros: int  # worker hosts on spot
    on_demand_micros: int  # worker hosts on demand
    other_micros: int  # dispatcher, disks, addresses, traffic
    all_on_demand_micros: int  # total if every machine had been on demand


@dataclass(frozen=True)
class HostCountPoint:
    """Number of worker hosts that run from `at` until the next point."""

    at: float
    spot: int
    on_demand: int


@dataclass(frozen=True)
class CostMark:
    at: float
    kind: str  # "interruption" (the cloud took a host), "notice", "job" or "budget"
    host: str  # or the job
    pool: str
    why: str


@dataclass(frozen=True)
class Series:
    fleet: str
    since: float
    until: float
    spend: tuple[CostPoint, ...] = ()
    hosts: tuple[HostCountPoint, ...] = ()
    marks: tuple[CostMark, ...] = ()


def series(events: Iterable[Event], now: float, since: float | None = None, until: float | None = None,
           points: int = 120) -> Series:
    """Return the series from the first run, or `since`, to `now`, or `until`. It is empty without any run."""
    meter = Meter(events, now)
    fleet = meter.created.fleet if meter.created else ""
    runs = [run for host in meter.hosts.values() for run in host.runs]
    last = now if until is None else min(until, now)
    first = min((r.started_at for r in runs), default=last) if since is None else since
    if not runs:
        return Series(fleet, first, first)
    last = max(first, last)
    steps = [first + (last - first) * i / max(1, points - 1) for i in range(points - 1)]
    spend = [_spent(meter, at, first, at) for at in steps]
    spend.append(_spent(meter, last, first, math.inf if until is None else until))
    return Series(fleet, first, last, tuple(spend), _hosts(meter, first, last), _marks(meter, first, last))


def _spent(meter: Meter, at: float, since: float, until: float) -> CostPoint:
    low = -math.inf if since <= min(r.started_at for h in meter.hosts.values() for r in h.runs) else since
    lines = meter.lines(low, until)
    workers = [line for line in lines if line.role == Role.WORKER.value]
    extras = sum(e.micros for e in meter.extras(low, until))
    spot = sum(line.micros for line in workers if line.market == Market.SPOT.value)
    on_demand = sum(line.micros for line in workers) - spot
    micros = sum(line.micros for line in lines) + extras
    return CostPoint(at, micros, spot, on_demand, micros - spot - on_demand,
                 sum(line.on_demand_micros for line in lines) + extras)


def _hosts(meter: Meter, since: float, until: float) -> tuple[HostCountPoint, ...]:
    changes: list[tuple[float, int, int]] = []
    for host in meter.hosts.values():
        if host.role is not Role.WORKER:
            continue
        spot = host.offer.sold == Market.SPOT.value
        for run in host.runs:
            ended = math.inf if run.ended_at is None else run.ended_at
            changes += [(run.started_at, spot, not spot), (ended, -spot, -(not spot))]
    points: dict[float, HostCountPoint] = {}
    now_spot = now_full = 0
    for at, more_spot, more_full in sorted(changes):
        if at > until:
            break
        now_spot, now_full = now_spot + more_spot, now_full + more_full
        points[max(at, since)] = HostCountPoint(max(at, since), now_spot, now_full)
    points.setdefault(since, HostCountPoint(since, 0, 0))
    found = [points[at] for at in sorted(points)]
    return (*found,
            HostCountPoint(until, found[-1].spot, found[-1].on_demand)) if found[-1].at < until else tuple(found)


def _marks(meter: Meter, since: float, until: float) -> tuple[CostMark, ...]:
    marks = [CostMark(run.ended_at, "interruption", host.request_id, host.offer.pool, "taken by the cloud")
             for host in meter.hosts.values() for run in host.runs if run.taken and run.ended_at is not None]
    for event in meter.events:
        match event:
            case HostNoticed(notice="interruption") if event.request_id in meter.hosts:
                pool = meter.hosts[event.request_id].offer.pool
                marks.append(CostMark(event.at, "notice", event.request_id, pool, event.why or event.action))
            case JobChanged():
                marks.append(CostMark(event.at, "job", event.job, "", f"{event.state.value}: {event.why}".rstrip(": ")))
            case BudgetReached():
                marks.append(CostMark(event.at, "budget", "", "", event.why))
    return tuple(sorted((m for m in marks if since <= m.at <= until), key=lambda m: (m.at, m.kind, m.host)))


def combined(each: Sequence[Series], points: int = 120) -> Series:
    """Return the sum of many fleets' series, of money and hosts."""
    each = [s for s in each if s.spend]
    if not each:
        return Series("", 0.0, 0.0)
    first, last = min(s.since for s in each), max(s.until for s in each)
    names = [s.fleet for s in each]
    spend = tuple(_sum_at(each, first + (last - first) * i / max(1, points - 1), at_end=i == points - 1, last=last)
                  for i in range(points))
    hosts = []
    for at in sorted({p.at for s in each for p in s.hosts}):
        held = [p for s in each if at < s.until or s.until == last for p in [_in_force(s.hosts, at)] if p is not None]
        hosts.append(HostCountPoint(at, sum(p.spot for p in held), sum(p.on_demand for p in held)))
    marks = sorted((m for s in each for m in s.marks), key=lambda m: (m.at, m.kind, m.host))
    return Series(", ".join(names), first, last, spend, tuple(hosts), tuple(marks))


def _in_force(points: Sequence[HostCountPoint], at: float) -> HostCountPoint | None:
    i = bisect_right(points, at, key=lambda p: p.at)
    return points[i - 1] if i else None


def _sum_at(each: Sequence[Series], at: float, at_end: bool, last: float) -> CostPoint:
    """Return the sum of the newest point of each series by `at`."""
    found = []
    for one in each:
        i = len(one.spend) if at_end else bisect_right(one.spend, at, key=lambda p: p.at)
        if i:
            found.append(one.spend[i - 1])
    return CostPoint(last if at_end else at, *(sum(getattr(p, name) for p in found) for name in (
        "micros", "spot_micros", "on_demand_micros", "other_micros", "all_on_demand_micros")))
