"""What a billed run costs, second by second. Pure; follows `model.BillingRules` to the letter.

Money inside a sum is in *parts*: micro-dollars x seconds per hour, which are whole numbers; 3600 parts are one
micro-dollar.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, inf

from spotfleet.fleet.events import PriceChanged
from spotfleet.model import BillingRules, Offer, Run

PARTS = 3600


@dataclass(frozen=True)
class Price:
    at: float
    micros_h: int
    on_demand_micros_h: int


@dataclass(frozen=True)
class Piece:
    """Billed seconds `begin` to `end` of a run, counted from its start, at one price."""

    begin: int
    end: int
    micros_h: int
    on_demand_micros_h: int

    def cut(self, begin: int, end: int) -> Piece:
        """The part of it that lies in `begin` to `end`; of no length when none does."""
        low = min(max(self.begin, begin), self.end)
        return Piece(low, max(low, min(self.end, end)), self.micros_h, self.on_demand_micros_h)

    @property
    def parts(self) -> int:
        return (self.end - self.begin) * self.micros_h

    @property
    def on_demand_parts(self) -> int:
        return (self.end - self.begin) * self.on_demand_micros_h


class PriceBook:
    """The price of every pool as a step function of time; the last word counts where two give the same instant."""

    def __init__(self, changes: Iterable[PriceChanged]) -> None:
        pools: dict[str, dict[float, Price]] = {}
        for change in changes:
            price = Price(change.at, change.micros_h, change.on_demand_micros_h)
            pools.setdefault(change.pool, {})[change.at] = price
        self._steps = {pool: [prices[at] for at in sorted(prices)] for pool, prices in pools.items()}

    def history(self, offer: Offer, since: float, until: float = inf) -> list[Price]:
        """The price in force at `since`, and every later one before `until`. Before the first known price the offer's
        counts."""
        steps = self._steps.get(offer.pool, [])
        first = bisect_right(steps, since, key=lambda p: p.at)
        in_force = steps[first - 1] if first else Price(since, offer.price_micros_h, offer.on_demand_micros_h)
        return [in_force, *steps[first:max(first, bisect_left(steps, until, key=lambda p: p.at))]]

    def at(self, offer: Offer, at: float) -> Price:
        return self.history(offer, at, at)[0]


def seconds_until(run: Run, at: float) -> int:
    """How many seconds of `run` have begun before `at`. Exact: both instants are close to each other."""
    return max(0, ceil(at - run.started_at))


def pieces(run: Run, history: Sequence[Price], rules: BillingRules, now: float) -> list[Piece]:
    """`run` as billed by `now`, cut where the price changes; a run the cloud gave away costs 0 micro-dollars.

    The on-demand price counts for the same seconds, also where the spot seconds were free.
    """
    end = now if run.ended_at is None else run.ended_at
    seconds = seconds_until(run, end)
    steps = [(min(seconds, seconds_until(run, p.at)), p) for p in history]
    starts = [0, *(begin for begin, _ in steps[1:])]
    ends = [*starts[1:], seconds]
    billed = [Piece(b, e, p.micros_h, p.on_demand_micros_h)
              for b, e, (_, p) in zip(starts, ends, steps, strict=True) if e > b]
    last = billed[-1] if billed else Piece(0, 0, history[0].micros_h, history[0].on_demand_micros_h)
    if run.taken and end - run.started_at <= rules.free_if_taken_within_s:
        return [Piece(p.begin, p.end, 0, p.on_demand_micros_h) for p in billed]
    if seconds < rules.minimum_s:
        return [Piece(0, rules.minimum_s, last.micros_h, last.on_demand_micros_h)]
    return billed


class Bill:
    """What one run costs, readable at every instant of it: what `pieces` bills, in the order in which it fell due.

    What a minimum adds to a short run falls due when the run ends, or now.
    """

    def __init__(self, run: Run, history: Sequence[Price], rules: BillingRules, now: float) -> None:
        self.run = run
        self.pieces = pieces(run, history, rules, now)
        end = now if run.ended_at is None else run.ended_at
        self.length = seconds_until(run, end)  # as used: what a minimum adds was used by nobody
        self.seconds = self.pieces[-1].end if self.pieces else 0
        self._ends = [p.end for p in self.pieces]
        self._parts = [0, *accumulate(p.parts for p in self.pieces)]
        self._full = [0, *accumulate(p.on_demand_parts for p in self.pieces)]

    def due(self, at: float) -> int:
        """How many of the billed seconds had fallen due before `at`; an infinite one is the end of all."""
        if at == inf:
            return self.seconds
        if at <= self.run.started_at:
            return 0
        begun = seconds_until(self.run, at)
        return self.seconds if begun >= self.length else begun

    def parts(self, seconds: int) -> tuple[int, int]:
        """Of the first `seconds` billed ones, and of the same on demand."""
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
    """Micro-dollars of `parts`, of which `per` are one."""
    return (2 * parts + per) // (2 * per)
