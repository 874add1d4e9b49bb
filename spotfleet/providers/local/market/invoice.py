"""The emulated cloud's own bill. Pure, and shares no code with `fleet/cost/meter.py`, whose results it checks.

All instants are multiples of 1/1024 s, which floats add and subtract exactly, so counting seconds is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor

from spotfleet.model import BillingRules, PricePoint, Rates, Run

Prices = Callable[[float, float], Sequence[PricePoint]]


@dataclass(frozen=True)
class Invoice:
    """Micro-dollars by request_id, each host, disk and address rounded once; `micros` is their sum."""

    at: float
    hosts: dict[str, int] = field(default_factory=dict)
    disks: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    @property
    def micros(self) -> int:
        return sum(self.hosts.values()) + sum(self.disks.values()) + sum(self.addresses.values())


def host_micros(runs: Sequence[Run], prices: Prices, rules: BillingRules, now: float) -> int:
    """Return the cost of one host by `now`; `prices(since, until)` is the history of its pool."""
    hour_parts = sum(_run_parts(run, prices, rules, now) for run in runs)  # micro-dollars x seconds per hour
    return (2 * hour_parts + 3600) // 7200


def disk_micros(lives: Sequence[Run], gib: int, rates: Rates, least_s: int, now: float) -> int:
    """Return the cost of one host's disks, each billed for its machine's life, stopped or not."""
    seconds = _seconds(lives, least_s, now)
    return _nearest(Fraction(seconds * gib * rates.disk_micros_gib_month, 730 * 3600))


def address_micros(runs: Sequence[Run], count: int, rates: Rates, least_s: int, now: float) -> int:
    """Return the cost of one host's public addresses while it runs."""
    seconds = _seconds(runs, least_s, now)
    return _nearest(Fraction(seconds * count * rates.address_micros_h, 3600))


def _seconds(runs: Sequence[Run], least_s: int, now: float) -> int:
    return sum(max(least_s, ceil((now if r.ended_at is None else r.ended_at) - r.started_at)) for r in runs)


def _nearest(micros: Fraction) -> int:
    """Round half up."""
    return floor(micros * 2 + 1) // 2


def _run_parts(run: Run, prices: Prices, rules: BillingRules, now: float) -> int:
    end = now if run.ended_at is None else run.ended_at
    length = end - run.started_at
    if run.taken and not run.paid and length <= rules.free_if_taken_within_s:
        return 0
    seconds = ceil(length)
    history = list(prices(run.started_at, end))
    if seconds < rules.minimum_s:
        return rules.minimum_s * _price_of_second(run.started_at, max(seconds - 1, 0), history)
    parts, counted = 0, 0
    for i, point in enumerate(history):
        begun = seconds if i + 1 == len(history) else min(seconds, ceil(history[i + 1].at - run.started_at))
        parts += (begun - counted) * point.micros_h
        counted = begun
    return parts


def _price_of_second(start: float, second: int, history: Sequence[PricePoint]) -> int:
    in_force = [p.micros_h for p in history if p.at <= start + second]
    return in_force[-1] if in_force else history[0].micros_h
