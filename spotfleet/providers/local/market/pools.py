"""Pools of the emulated cloud, and their price movements. Pure.

A price is a step function of absolute time, made of integers only, so that every process and every rerun computes
the same one: a triangle wave of `cycle` steps plus a little noise from a hash, both within `swing_permille`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from spotfleet import model
from spotfleet.model import BillingRules, Need, Offer, PricePoint, Rates

PROVIDER = "local"
REGION = "local"
ZONES = ("local-a", "local-b", "local-c")


@dataclass(frozen=True)
class LocalPool:
    """Machines that are sold, refused and reclaimed together."""

    zone: str
    instance_type: str
    market: model.Market
    base_micros_h: int
    capacity: int
    slots: int = 1
    accelerator: str = ""
    swing_permille: int = 0  # maximum deviation of the price from its base
    period_s: int = 20  # time between two prices

    @property
    def name(self) -> str:
        """Return the text of `Offer.pool`."""
        return f"{PROVIDER}/{self.zone}/{self.instance_type}/{self.market.value}"


@dataclass(frozen=True)
class MarketRules:
    """Settings that are fixed when a market opens."""

    pools: tuple[LocalPool, ...]
    billing: BillingRules = field(default_factory=lambda: BillingRules(minimum_s=1))
    seed: str = "spotfleet"
    boot_s: float = 0.0  # unbilled time in PENDING before a host runs
    reclaim_s: float = 30.0  # how long the capacity of a taken host is withheld from its pool
    shutdown_s: float = 0.0  # how long a host ended by its user is listed as running, unbilled
    listed_after_end_s: float = 7 * 86400.0
    rates: Rates = field(default_factory=Rates)  # for disks and addresses; traffic is not billed: none crosses zones
    disk_gib: int = 0  # per machine
    addresses: int = 0  # public ones per machine, billed while it runs


def default_rules() -> MarketRules:
    """Return a small region: V100-like prices, spot at about a third of them, each zone a little different."""
    types = (  # name, slots, accelerator, on demand, spot, capacity per zone
        ("cpu.small", 1, "", 85_000, 31_000, 6),
        ("gpu.small", 1, "EMU", 3_060_000, 970_000, 6),
        ("gpu.large", 2, "EMU", 6_120_000, 1_960_000, 3),
    )
    pools = []
    for name, slots, accelerator, on_demand, spot, capacity in types:
        for i, zone in enumerate(ZONES):
            pools.append(LocalPool(zone, name, model.Market.ON_DEMAND, on_demand, capacity, slots, accelerator))
            pools.append(LocalPool(zone, name, model.Market.SPOT, spot * (100 + 4 * i) // 100, capacity, slots,
                                   accelerator,
                              swing_permille=80, period_s=10 + 5 * i))
    return MarketRules(tuple(pools))


def scheduled_price(pool: LocalPool, seed: str, step: int) -> int:
    """Return the price of `pool` in its `step`-th period since 1970."""
    if not pool.swing_permille:
        return pool.base_micros_h
    cycle = 16
    at = (step + _hash(seed, pool.name) % cycle) % cycle
    triangle = 4 * min(at, cycle - at) - cycle  # -cycle .. cycle
    noise = _hash(seed, pool.name, str(step)) % (cycle + 1) - cycle // 2  # -cycle/2 .. cycle/2
    tilt = max(-cycle, min(cycle, triangle + noise))
    return pool.base_micros_h + pool.base_micros_h * pool.swing_permille * tilt // (1000 * cycle)


def price_points(
    pool: LocalPool, seed: str, scripted: tuple[PricePoint, ...], opened_at: float, since: float, until: float
) -> list[PricePoint]:
    """Return the price in force at `since` (or at the market's opening) and every change up to `until`, oldest first.

    The schedule ends at the first scripted point.
    """
    own = sorted((p for p in scripted if p.pool == pool.name), key=lambda p: p.at)
    since = max(since, opened_at)
    script_at = own[0].at if own else float("inf")
    points = [p for p in own if p.at <= until]
    if since < script_at:
        points = [p for p in _scheduled(pool, seed, opened_at, since, until) if p.at < script_at] + points
    in_force = max((i for i, p in enumerate(points) if p.at <= since), default=0)
    points = points[in_force:]
    return points[:1] + [b for a, b in pairwise(points) if b.micros_h != a.micros_h]


def satisfies(offer: Offer, need: Need) -> bool:
    """Return whether the offer meets the need. An accelerator count is exact, as in SkyPilot; empty fields fit all."""
    return (
        (offer.market is model.Market.SPOT) == need.use_spot
        and need.region in ("", offer.region)
        and need.zone in ("", offer.zone)
        and need.instance_type in ("", offer.instance_type)
        and need.accelerator.lower() in ("", offer.accelerator.lower())
        and (not need.accelerator_count or (offer.accelerator != "" and offer.slots == need.accelerator_count))
        and (not need.max_micros_h or offer.price_micros_h <= need.max_micros_h)
    )


def _scheduled(pool: LocalPool, seed: str, opened_at: float, since: float, until: float) -> list[PricePoint]:
    """Return the schedule's points: the one in force at `since` and those after it, before or at `until`."""
    first, last = int(since // pool.period_s), int(until // pool.period_s)
    if not pool.swing_permille:
        return [PricePoint(pool.name, opened_at, pool.base_micros_h)]
    return [
        PricePoint(pool.name, max(opened_at, float(step * pool.period_s)), scheduled_price(pool, seed, step))
        for step in range(first, last + 1)
    ]


def _hash(*parts: str) -> int:
    return int.from_bytes(blake2b("/".join(parts).encode(), digest_size=6).digest(), "big")
