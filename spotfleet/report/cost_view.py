"""Data of a cost report, computed from ledgers. Pure: the same books always give the same view."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.fleet.cost.billing import PriceBook
from spotfleet.fleet.cost.facts import CostHost, hosts
from spotfleet.fleet.cost.groups import CostGroup, Costs, FleetLedgers, costs, grouped
from spotfleet.fleet.cost.series import CostMark, Series, combined, series
from spotfleet.fleet.domain.events import PriceChanged
from spotfleet.model import Market, Role

POINTS = 160  # points of a curve
NOTICE_S = 900.0  # a loss this soon after a notice belongs to that notice


@dataclass(frozen=True)
class PoolPrices:
    """Price of a machine-hour in a pool while our machines ran there; steps, in micro-dollars."""

    pool: str
    since: float
    until: float
    steps: tuple[tuple[float, int, int], ...]  # (from, paid, on demand; 0: unknown)


@dataclass(frozen=True)
class CostView:
    at: float  # creation time of the view
    costs: Costs
    series: Series
    prices: tuple[PoolPrices, ...]  # spot pools, ordered by spending
    by_fleet: tuple[CostGroup, ...]
    by_pool: tuple[CostGroup, ...]
    by_day: tuple[CostGroup, ...]
    by_host: tuple[CostGroup, ...]

    @property
    def living(self) -> bool:
        """Return whether one of the fleets still runs, and the view reaches up to now."""
        return self.costs.until is None and any(f.living for f in self.costs.fleets)

    @property
    def empty(self) -> bool:
        return not any(f.report.lines or f.report.extras for f in self.costs.fleets)

    @property
    def interruptions(self) -> tuple[CostMark, ...]:
        return interruptions(self.series.marks)


def view(books: Sequence[FleetLedgers], at: float, since: float | None = None, until: float | None = None) -> CostView:
    """Return the view of one fleet or many, whole or in [since, until)."""
    found = costs(books, since, until)
    by_pool = grouped(books, "pool", since, until)
    return CostView(
        at, found, combined([series(b.events, b.now, since, until, POINTS) for b in books]), _prices(
            books, since, until, by_pool),
        grouped(books, "fleet", since, until), by_pool,
        *(grouped(books, by, since, until) for by in ("day", "host")))


def interruptions(marks: Iterable[CostMark]) -> tuple[CostMark, ...]:
    """Return one mark for each time that the cloud took a host, or announced it and the host left before: the earlier
    of both."""
    found: list[CostMark] = []
    last: dict[str, CostMark] = {}
    for mark in sorted(marks, key=lambda m: m.at):
        if mark.kind not in ("interruption", "notice"):
            continue
        before = last.get(mark.host)
        if before is None or before.kind == "interruption" or mark.at - before.at > NOTICE_S:
            found.append(mark)
        last[mark.host] = mark
    return tuple(found)


def _prices(books: Iterable[FleetLedgers], since: float | None, until: float | None,
            by_pool: Iterable[CostGroup]) -> tuple[PoolPrices, ...]:
    low, high = -math.inf if since is None else since, math.inf if until is None else until
    found: dict[str, PoolPrices] = {}
    for each in books:
        book = PriceBook(e for e in each.events if isinstance(e, PriceChanged))
        pools: dict[str, list[CostHost]] = {}
        for host in hosts(each.events).values():
            if host.offer.market is Market.SPOT and host.role is Role.WORKER and host.runs:
                pools.setdefault(host.offer.pool, []).append(host)
        for pool, there in pools.items():
            runs = [run for host in there for run in host.runs]
            first = max(low, min(run.started_at for run in runs))
            last = min(high, each.now, max(each.now if r.ended_at is None else r.ended_at for r in runs))
            if first >= last or (pool in found and found[pool].until - found[pool].since > last - first):
                continue  # if several fleets were in a pool, the one that was there longest counts
            steps = [(max(p.at, first), p.micros_h, p.on_demand_micros_h)
                     for p in book.history(there[0].offer, first) if p.at < last]
            found[pool] = PoolPrices(pool, first, last, tuple(steps))
    spent = {group.key: group.micros for group in by_pool}
    return tuple(sorted(found.values(), key=lambda p: (-spent.get(p.pool, 0), p.pool)))
