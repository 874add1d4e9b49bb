"""Cost of a billed run, second by second. Pure; follows `model.BillingRules` exactly.

Money inside a sum is in *parts*: micro-dollars x seconds per hour, as whole numbers; 3600 parts are one micro-dollar.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf

from spotfleet.fleet.domain.events import PriceChanged
from spotfleet.model import BillingRules, Offer, Run

PARTS = 3600


@dataclass(frozen=True)
class PriceChangePoint:
    at: float
    micros_h: int
    on_demand_micros_h: int


@dataclass(frozen=True)
class BilledPiece:
    """Billed seconds `begin` to `end` of a run, counted from the run's start, at one price."""

    begin: int
    end: int
    micros_h: int
    on_demand_micros_h: int

    def cut(self, begin: int, end: int) -> BilledPiece:
        """Return the part within `begin` to `end`; its length is 0 if there is none."""
        low = min(max(self.begin, begin), self.end)
        return BilledPiece(low, max(low, min(self.end, end)), self.micros_h, self.on_demand_micros_h)

    @property
    def parts(self) -> int:
        return (self.end - self.begin) * self.micros_h

    @property
    def on_demand_parts(self) -> int:
        return (self.end - self.begin) * self.on_demand_micros_h


class PriceBook:
    """Price of every pool as a step function of time. Of two changes at the same instant the last one counts."""

    def __init__(self, changes: Iterable[PriceChanged]) -> None:
        pools: dict[str, dict[float, PriceChangePoint]] = {}
        for change in changes:
            price = PriceChangePoint(change.at, change.micros_h, change.on_demand_micros_h)
            pools.setdefault(change.pool, {})[change.at] = price
        self._steps = {pool: [prices[at] for at in sorted(prices)] for pool, prices in pools.items()}

    def history(self, offer: Offer, since: float, until: float = inf) -> list[PriceChangePoint]:
        """Return the price in force at `since`, and every later one before `until`.

        Before the first known price, the offer's price counts.
        """
        steps = self._steps.get(offer.pool, [])
        first = bisect_right(steps, since, key=lambda p: p.at)
        in_force = steps[first - 1] if first else PriceChangePoint(since, offer.price_micros_h,
                                                                   offer.on_demand_micros_h)
        return [in_force, *steps[first:max(first, bisect_left(steps, until, key=lambda p: p.at))]]

    def at(self, offer: Offer, at: float) -> PriceChangePoint:
        return self.history(offer, at, at)[0]


def seconds_until(run: Run, at: float) -> int:
    """Return how many seconds of `run` have begun before `at`. Exact: both instants are close to each other."""
    return max(0, ceil(at - run.started_at))


def pieces(run: Run, history: Sequence[PriceChangePoint], rules: BillingRules, now: float) -> list[BilledPiece]:
    """Return `run` as billed by `now`, cut where the price changes; a run that the cloud waived costs 0 micro-dollars.

    The on-demand price counts for the same seconds, also for free spot seconds.
    """
    end = now if run.ended_at is None else run.ended_at
    seconds = seconds_until(run, end)
    steps = [(min(seconds, seconds_until(run, p.at)), p) for p in history]
    starts = [0, *(begin for begin, _ in steps[1:])]
    ends = [*starts[1:], seconds]
    billed = [BilledPiece(b, e, p.micros_h, p.on_demand_micros_h)
              for b, e, (_, p) in zip(starts, ends, steps, strict=True) if e > b]
    last = billed[-1] if billed else BilledPiece(0, 0, history[0].micros_h, history[0].on_demand_micros_h)
    if run.taken and not run.paid and end - run.started_at <= rules.free_if_taken_within_s:
        return [BilledPiece(p.begin, p.end, 0, p.on_demand_micros_h) for p in billed]
    if seconds < rules.minimum_s:
        return [BilledPiece(0, rules.minimum_s, last.micros_h, last.on_demand_micros_h)]
    return billed


class Bill:
    """Cost of one run at every instant: the billed `pieces`, in the order in which they fell due.

    The seconds that a minimum adds to a short run fall due when the run ends, or now.
    """

    def __init__(self, run: Run, history: Sequence[PriceChangePoint], rules: BillingRules, now: float) -> None:
        self.run = run
        self.pieces = pieces(run, history, rules, now)
        end = now if run.ended_at is None else run.ended_at
        self.length = seconds_until(run, end)  # as used, without the seconds that a minimum adds
        self.seconds = self.pieces[-1].end if self.pieces else 0
        self._ends = [p.end for p in self.pieces]
        self._parts = [0, *accumulate(p.parts for p in self.pieces)]
        self._full = [0, *accumulate(p.on_demand_parts for p in self.pieces)]

    def due(self, at: float) -> int:
        """Return how many billed seconds had fallen due before `at`; all of them if `at` is infinite."""
        if at == inf:
            return self.seconds
        if at <= self.run.started_at:
            return 0
        begun = seconds_until(self.run, at)
        return self.seconds if begun >= self.length else begun

    def parts(self, seconds: int) -> tuple[int, int]:
        """Return the parts of the first `seconds` billed seconds, and of the same seconds on demand."""
        if seconds <= 0 or not self.pieces:
            return 0, 0
        if seconds >= self.seconds:
            return self._parts[-1], self._full[-1]
        i = bisect_right(self._ends, seconds)
        piece = self.pieces[i]
        return (self._parts[i] + (seconds - piece.begin) * piece.micros_h,
                self._full[i] + (seconds - piece.begin) * piece.on_demand_micros_h)

    def between(self, begin: int, end: int) -> tuple[int, int]:
        (a, full_a), (b, full_b) = self.parts(begin), self.parts(end)
        return b - a, full_b - full_a


def round_half_up(parts: int, per: int = PARTS) -> int:
    """Return `parts` in micro-dollars; `per` parts are one micro-dollar."""
    return (2 * parts + per) // (2 * per)
