"""The emulated cloud's own bill. Pure, and shares no code with `fleet/cost.py`, whose results it checks.

All instants are multiples of 1/1024 s, which floats add and subtract exactly, so counting seconds is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

from spotfleet.model import BillingRules, PricePoint, Run

Prices = Callable[[float, float], Sequence[PricePoint]]


@dataclass(frozen=True)
class Invoice:
    """Micro-dollars by request_id, each host rounded once; `micros` is their sum."""

    at: float
    hosts: dict[str, int] = field(default_factory=dict)

    @property
    def micros(self) -> int:
        return sum(self.hosts.values())


def host_micros(runs: Sequence[Run], prices: Prices, rules: BillingRules, now: float) -> int:
    """What one host costs by `now`; `prices(since, until)` is the history of its pool."""
    hour_parts = sum(_run_parts(run, prices, rules, now) for run in runs)  # micro-dollars x seconds per hour
    return (2 * hour_parts + 3600) // 7200


def _run_parts(run: Run, prices: Prices, rules: BillingRules, now: float) -> int:
    end = now if run.ended_at is None else run.ended_at
    length = end - run.started_at
    if run.taken and length <= rules.free_if_taken_within_s:
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
