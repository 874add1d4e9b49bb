"""Ledgers -> everything that a cost report shows. Pure: the same books always give the same view."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.fleet.billing import PriceBook
from spotfleet.fleet.cost_facts import Host, hosts
from spotfleet.fleet.cost_groups import Books, Costs, Group, costs, grouped
from spotfleet.fleet.cost_series import Mark, Series, series, together
from spotfleet.fleet.events import PriceChanged
from spotfleet.model import Market, Role

POINTS = 160  # of a curve
NOTICE_S = 900.0  # a host that is taken so soon after a notice was meant by it


@dataclass(frozen=True)
class PoolPrices:
    """What an hour of a machine of a pool cost while machines of ours ran there; steps, in micro-dollars."""

    pool: str
    since: float
    until: float
    steps: tuple[tuple[float, int, int], ...]  # (from, paid, on demand; 0: not known)


@dataclass(frozen=True)
class CostView:
    at: float  # when it was made
    costs: Costs
    series: Series
    prices: tuple[PoolPrices, ...]  # of spot pools, where the most was spent first
    by_fleet: tuple[Group, ...]
    by_job: tuple[Group, ...]
    by_pool: tuple[Group, ...]
    by_day: tuple[Group, ...]
    by_host: tuple[Group, ...]

    @property
    def living(self) -> bool:
        """Does one of the fleets still run, and does the view reach up to now?"""
        return self.costs.until is None and any(f.living for f in self.costs.fleets)

    @property
    def empty(self) -> bool:
        return not any(f.report.lines or f.report.extras for f in self.costs.fleets)

    @property
    def interruptions(self) -> tuple[Mark, ...]:
        return interruptions(self.series.marks)


def view(books: Sequence[Books], at: float, since: float | None = None, until: float | None = None) -> CostView:
    """Of one fleet or many, whole or in [since, until)."""
    found = costs(books, since, until)
    by_pool = grouped(books, "pool", since, until)
    return CostView(
        at, found, together([series(b.events, b.now, since, until, POINTS) for b in books]), _prices(
            books, since, until, by_pool),
        *(grouped(books, by, since, until) for by in ("fleet", "job")), by_pool,
        *(grouped(books, by, since, until) for by in ("day", "host")))


def interruptions(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """One for each time that the cloud took a host, or announced it and the host left before: the earlier of both."""
    found: list[Mark] = []
    last: dict[str, Mark] = {}
    for mark in sorted(marks, key=lambda m: m.at):
        if mark.kind not in ("interruption", "notice"):
            continue
        before = last.get(mark.host)
        if before is None or before.kind == "interruption" or mark.at - before.at > NOTICE_S:
            found.append(mark)
        last[mark.host] = mark
    return tuple(found)


def _prices(books: Iterable[Books], since: float | None, until: float | None,
            by_pool: Iterable[Group]) -> tuple[PoolPrices, ...]:
    low, high = -math.inf if since is None else since, math.inf if until is None else until
    found: dict[str, PoolPrices] = {}
    for each in books:
        book = PriceBook(e for e in each.events if isinstance(e, PriceChanged))
        pools: dict[str, list[Host]] = {}
        for host in hosts(each.events).values():
            if host.offer.market is Market.SPOT and host.role is Role.WORKER and host.runs:
                pools.setdefault(host.offer.pool, []).append(host)
        for pool, there in pools.items():
            runs = [run for host in there for run in host.runs]
            first = max(low, min(run.started_at for run in runs))
            last = min(high, each.now, max(each.now if r.ended_at is None else r.ended_at for r in runs))
            if first >= last or (pool in found and found[pool].until - found[pool].since > last - first):
                continue  # where several fleets were in a pool, the one that was there longest tells
            steps = [(max(p.at, first), p.micros_h, p.on_demand_micros_h)
                     for p in book.history(there[0].offer, first) if p.at < last]
            found[pool] = PoolPrices(pool, first, last, tuple(steps))
    spent = {group.key: group.micros for group in by_pool}
    return tuple(sorted(found.values(), key=lambda p: (-spent.get(p.pool, 0), p.pool)))
