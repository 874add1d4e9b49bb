"""Prices as clouds give them, converted to ours: millionths of a dollar, histories per pool. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

from spotfleet.model import Market, PricePoint

History = Sequence[tuple[float, int]]  # (since, micro-dollars an hour), oldest first


def micros(dollars: str) -> int:
    """Convert a decimal number of dollars to millionths, half up. Raises ValueError."""
    try:
        return int((Decimal(dollars) * 1_000_000).to_integral_value(ROUND_HALF_UP))
    except (InvalidOperation, OverflowError, ValueError) as error:
        raise ValueError(f"{dollars!r} is no price") from error


def in_force(points: History, since: float) -> list[tuple[float, int]]:
    """Return the last of one pool's points at or before `since`, and all later ones that differ."""
    before = sum(at <= since for at, _ in points)
    found: list[tuple[float, int]] = []
    for at, price in points[max(0, before - 1):]:
        if not found or found[-1][1] != price:
            found.append((at, price))
    return found


def price_points(pools: Sequence[str], since: float, region_of: Callable[[str], str],
                 spot: Callable[[str, tuple[str, ...]], Mapping[tuple[str, str], History]],
                 on_demand: Callable[[str, tuple[str, ...]], Mapping[str, int]]) -> list[PricePoint]:
    """Answer `Provider.prices`: the price in force at `since` and every later change, per pool; none for unsold pools.

    `spot(region, types)` returns (zone, type) -> history, `on_demand(region, types)` type -> price: one call for all
    pools of a region and market.
    """
    points: list[PricePoint] = []
    groups: dict[tuple[str, Market], list[tuple[str, str, str]]] = {}
    for pool in dict.fromkeys(pools):
        _, zone, kind, market = pool.split("/")
        sold = Market.SPOT if market == Market.SPOT.value else Market.ON_DEMAND  # a reservation costs as on demand
        groups.setdefault((region_of(zone), sold), []).append((pool, zone, kind))
    for (region, market), members in groups.items():
        types = tuple(sorted({kind for _, _, kind in members}))
        if market is Market.SPOT:
            found = spot(region, types)
            for pool, zone, kind in members:
                points += [PricePoint(pool, at, price) for at, price in in_force(found.get((zone, kind), ()), since)]
        else:
            known = on_demand(region, types)
            points += [PricePoint(pool, since, known[kind]) for pool, _, kind in members if kind in known]
    return points
