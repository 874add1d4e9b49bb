"""Cost reports of one fleet or many by host, group of hosts, pool, day, job or fleet, and broken down by use. Pure.

Every grouping adds up to the report's total, to the micro-dollar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotfleet.errors import UsageError
from spotfleet.fleet.cost.boots import BootLine
from spotfleet.fleet.cost.meter import CostReport, Meter
from spotfleet.fleet.domain.events import Event, RatesStamped
from spotfleet.model import Market, Role

DAY_S = 86400.0
WAYS = ("host", "group", "pool", "day", "job", "fleet")


@dataclass(frozen=True)
class Breakdown:
    """Cost by use, in micro-dollars; no part is negative."""

    useful: int = 0  # worker hosts, while a job trained
    unknown: int = 0  # worker hosts, while a job's script or command ran outside training
    boot: int = 0  # worker hosts, until their agent joined
    repeated: int = 0  # steps computed again
    pause: int = 0  # hosts of jobs that waited for a generation to form
    idle: int = 0  # worker hosts that no job held
    dispatcher: int = 0
    disks: int = 0
    addresses: int = 0
    traffic: int = 0

    def parts(self) -> tuple[tuple[str, int], ...]:
        return tuple(vars(self).items())

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(**{name: value + getattr(other, name) for name, value in self.parts()})


def breakdown(report: CostReport) -> Breakdown:
    """Break a report down by use; the breakdown's `total` is the report's `micros`.

    Repeats and pauses are computed from step times and prices, and are at most the cost of the jobs' hosts. In a narrow
    window, rounding may make a part a few micro-dollars negative: these are taken from the largest part.
    """
    held = max(0, sum(job.micros for job in report.jobs))
    unknown = min(report.unknown_micros, held)
    repeated = min(report.repeated_micros, held - unknown)
    pause = min(report.pause_micros, held - unknown - repeated)
    unheld = max(0, report.idle_micros)
    boot = min(report.boot_micros, unheld)
    found = Breakdown(held - unknown - repeated - pause, unknown, boot, repeated, pause, unheld - boot,
                      report.dispatcher_micros, report.disk_micros, report.address_micros, report.traffic_micros)
    rounding = found.total - report.micros
    most = max(found.parts(), key=lambda part: part[1])[0]
    return replace(found, **{most: getattr(found, most) - rounding})


@dataclass(frozen=True)
class CostGroup:
    key: str
    micros: int
    on_demand_micros: int  # the same on demand
    spot_micros: int | None = 0  # the share of spot machines; None: not counted, because jobs share machines
    seconds: int | None = 0  # billed machine seconds; None as above
    detail: str = ""  # role and pool of a host, name of a job

    def __add__(self, other: CostGroup) -> CostGroup:
        return CostGroup(self.key, self.micros + other.micros, self.on_demand_micros + other.on_demand_micros,
                     _both(self.spot_micros, other.spot_micros), _both(self.seconds, other.seconds),
                     self.detail or other.detail)


@dataclass(frozen=True)
class FleetLedgers:
    """Ledgers of one fleet, as far as they could be read."""

    fleet: str
    events: tuple[Event, ...] = field(repr=False)
    now: float  # until when unended runs count; the end of a fleet that is down
    living: bool = False
    missing: str = ""  # the part of the ledgers that could not be read; empty: none
    provider: str = ""

    @property
    def rated(self) -> bool:
        """Whether rates of disks, addresses and traffic are known; otherwise the bill lacks all of these."""
        return any(isinstance(event, RatesStamped) for event in self.events)

    def report(self, since: float | None = None, until: float | None = None) -> CostReport:
        return Meter(self.events, self.now).report(since, until)


@dataclass(frozen=True)
class FleetCost:
    fleet: str
    living: bool
    missing: str
    report: CostReport
    rated: bool = True  # as in FleetLedgers


@dataclass(frozen=True)
class Costs:
    """Costs of one fleet or many."""

    fleets: tuple[FleetCost, ...] = ()
    since: float | None = None
    until: float | None = None

    @property
    def micros(self) -> int:
        return sum(f.report.micros for f in self.fleets)

    @property
    def on_demand_micros(self) -> int:
        return sum(f.report.on_demand_micros for f in self.fleets)

    @property
    def unpriced(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(pool for f in self.fleets for pool in f.report.unpriced))

    @property
    def savings_percent(self) -> float:
        """Savings as in a report: 0 if unknown."""
        if not self.on_demand_micros or self.unpriced:
            return 0.0
        return 100 * (self.on_demand_micros - self.micros) / self.on_demand_micros

    @property
    def breakdown(self) -> Breakdown:
        return sum((breakdown(f.report) for f in self.fleets), Breakdown())

    @property
    def boots(self) -> tuple[BootLine, ...]:
        return tuple(boot for f in self.fleets for boot in f.report.boots)

    @property
    def unrated(self) -> tuple[str, ...]:
        """Fleets with machines whose bill lacks disks, addresses and traffic, because no rate is known."""
        return tuple(f.fleet for f in self.fleets if f.report.lines and not f.rated)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"{f.fleet}: {f.missing}" for f in self.fleets if f.missing)


def costs(ledgers: Iterable[FleetLedgers], since: float | None = None, until: float | None = None) -> Costs:
    return Costs(tuple(FleetCost(b.fleet, b.living, b.missing, b.report(since, until), b.rated) for b in ledgers),
                 since, until)


def by_host(report: CostReport) -> tuple[CostGroup, ...]:
    """Group by host. Disks and addresses belong to their host; traffic belongs to none and has a row for each job."""
    rows = [CostGroup(line.host, line.micros, line.on_demand_micros, _spot(line.market, line.micros), line.seconds,
                  f"{line.role}, {line.pool}") for line in report.lines]
    rows += [CostGroup(f"(traffic of {e.name})" if e.kind == "traffic" else e.name, e.micros, e.micros,
                   detail="" if e.kind == "traffic" else f"{e.role}, {e.pool}") for e in report.extras if e.micros]
    return added_up(rows)


def by_group(report: CostReport, groups: Mapping[str, str]) -> tuple[CostGroup, ...]:
    """Group by the fleet's named groups of hosts; `groups`: the group of each host. Traffic belongs to no group."""
    def key(host: str, role: str) -> str:
        return "(dispatcher)" if role == Role.DISPATCHER.value else groups.get(host) or "(no group)"

    rows = [CostGroup(key(line.host, line.role), line.micros, line.on_demand_micros, _spot(line.market, line.micros),
                      line.seconds) for line in report.lines]
    rows += [CostGroup("(traffic)" if e.kind == "traffic" else key(e.name, e.role), e.micros, e.micros)
             for e in report.extras if e.micros]
    return added_up(rows)


def by_pool(report: CostReport) -> tuple[CostGroup, ...]:
    """Group by pool. Disks and addresses belong to the pool of their host."""
    rows = [CostGroup(line.pool, line.micros, line.on_demand_micros, _spot(line.market, line.micros), line.seconds)
            for line in report.lines]
    rows += [CostGroup(e.pool or "(traffic)", e.micros, e.micros) for e in report.extras if e.micros]
    return added_up(rows)


def by_job(report: CostReport) -> tuple[CostGroup, ...]:
    """Group by job: each job's share of its hosts, with its traffic; then the costs that belong to no job."""
    rows = [CostGroup(job.job, job.micros + job.traffic_micros, job.on_demand_micros + job.traffic_micros, None, None,
                  job.name) for job in report.jobs]
    listed = {job.job for job in report.jobs}
    rows += [CostGroup(e.name, e.micros, e.micros) for e in report.extras
             if e.kind == "traffic" and e.name not in listed]
    dispatcher = [line for line in report.lines if line.role == "dispatcher"]
    full = sum(line.on_demand_micros for line in dispatcher)
    machines_full = sum(line.on_demand_micros for line in report.lines)
    idle_full = machines_full - full - sum(job.on_demand_micros for job in report.jobs)
    rows.append(CostGroup("(no job)", report.idle_micros, idle_full, None, None, "worker hosts that boot or wait"))
    spot = sum(_spot(line.market, line.micros) for line in dispatcher)
    rows.append(CostGroup("(dispatcher)", report.dispatcher_micros, full, spot,
                          sum(line.seconds for line in dispatcher)))
    rows.append(CostGroup("(disks)", report.disk_micros, report.disk_micros))
    rows.append(CostGroup("(addresses)", report.address_micros, report.address_micros))
    return tuple(row for row in added_up(rows) if row.micros or row.on_demand_micros or row.key in listed)


def by_day(meter: Meter, since: float | None = None, until: float | None = None) -> tuple[CostGroup, ...]:
    """Group by days of UTC, with the days in between that cost nothing."""
    starts = [b.since for host in meter.hosts.values() for b in host.disks]
    starts += [run.started_at for host in meter.hosts.values() for run in host.runs]
    starts += [e.at for job in meter.jobs.values() for e in job.log]
    if not starts:
        return ()
    first = min(starts) if since is None else max(since, min(starts))
    last = meter.now if until is None else min(until, meter.now)
    rows, at = [], math.floor(first / DAY_S) * DAY_S
    while at <= last:
        low = since if not rows else at  # the first day includes all that fell due before it, by any clock
        over = at + DAY_S > last  # the seconds that a minimum adds to a run at the very end fall due at once
        high = until if over else at + DAY_S
        if until is None or low is None or low < until:
            rows.append(_window(meter, day(at), low, high))
        at += DAY_S
    return tuple(rows)


def _window(meter: Meter, key: str, since: float | None, until: float | None) -> CostGroup:
    low, high = -math.inf if since is None else since, math.inf if until is None else until
    lines, extras = meter.lines(low, high), sum(e.micros for e in meter.extras(low, high))
    return CostGroup(key, sum(x.micros for x in lines) + extras, sum(x.on_demand_micros for x in lines) + extras,
                 sum(_spot(x.market, x.micros) for x in lines), sum(x.seconds for x in lines))


def grouped(ledgers: Sequence[FleetLedgers], by: str, since: float | None = None,
            until: float | None = None) -> tuple[CostGroup, ...]:
    """Return one table over many fleets. With several fleets, rows of hosts, groups and jobs start with the fleet's
    name.

    Raises UsageError if `by` is not in WAYS.
    """
    if by not in WAYS:
        raise UsageError(f"--by: '{by}' is none", hint=f"use one of: {', '.join(WAYS)}")
    rows: list[CostGroup] = []
    for each in ledgers:
        meter = Meter(each.events, each.now)
        if by == "day":
            rows += by_day(meter, since, until)
            continue
        report = meter.report(since, until)
        if by == "fleet":
            rows.append(_window(meter, each.fleet, since, until))
        elif by == "pool":
            rows += by_pool(report)
        else:
            found = by_host(report) if by == "host" else by_job(report) if by == "job" else \
                by_group(report, {name: host.group for name, host in meter.hosts.items()})
            own = len(ledgers) > 1
            rows += [replace(g, key=f"{each.fleet}: {g.key}") if own else g for g in found]
    rows = list(added_up(rows))
    return tuple(sorted(rows, key=lambda g: g.key)) if by == "day" else tuple(rows)


def added_up(rows: Iterable[CostGroup]) -> tuple[CostGroup, ...]:
    """Add up rows with the same key, in the order of their first occurrence."""
    found: dict[str, CostGroup] = {}
    for row in rows:
        found[row.key] = found[row.key] + row if row.key in found else row
    return tuple(found.values())


def day(at: float) -> str:
    """Return YYYY-MM-DD in UTC. Source: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days."""
    days = math.floor(at / DAY_S) + 719468
    era, of_era = divmod(days, 146097)
    year = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    return f"{year + era * 400 + (month <= 2):04d}-{month:02d}-{of_year - (153 * shifted + 2) // 5 + 1:02d}"


def _both(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def _spot(market: str, micros: int) -> int:
    return micros if market == Market.SPOT.value else 0
