"""Results of a simulation: plain values for table, JSON and page; money in micro-dollars, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PoolResult:
    """Record that took part, with the price of its hosts."""

    name: str
    path: str
    provider: str
    zone: str
    instance_type: str
    length_s: float
    most: int | None  # most hosts ever available; None: the record has only prices
    available: float | None  # share of the time in which at least one host was available
    spot_micros_h: int  # mean over the record
    on_demand_micros_h: int
    priced_by: str  # "the record", "the catalog of 2026-07-30", "--price"


@dataclass(frozen=True)
class Window:
    """Run of the work under one strategy."""

    pool: str  # the record's name; "" if several records are pools of one fleet
    start_s: float  # since the record began
    micros: int
    spot_micros: int
    on_demand_micros: int
    done: bool  # the work was done in time
    finished_s: float | None  # after the start; None: the window ended first
    lasted_s: float
    useful_s: float  # host-seconds of work that counts
    paid_s: float  # host-seconds
    spot_s: float
    on_demand_s: float
    losses: int  # hosts that the cloud took, or that left because it was going to
    launches: int
    refusals: int
    parts: tuple[tuple[str, int], ...]  # uses of the money: PARTS, adding up to `micros`


PARTS = ("useful", "boot", "pause", "repeated", "idle")


@dataclass(frozen=True)
class SimulatedDecision:
    at_s: float  # since the window began
    spot: int
    on_demand: int
    why: str
    rule: str = ""


@dataclass(frozen=True)
class Action:
    at_s: float
    what: str  # "launch", "refused", "joined", "notice", "lost", "drain", "end", "finished"
    host: str
    why: str
    market: str = ""  # "spot" or "on-demand"


@dataclass(frozen=True)
class Story:
    """Window in detail. Steps hold until the next one; the last is at the window's end."""

    strategy: str
    window: Window
    decisions: tuple[SimulatedDecision, ...]
    actions: tuple[Action, ...]
    hosts: tuple[tuple[float, int, int, int], ...]  # (at_s, spot, on_demand, working)
    offered: tuple[tuple[float, int], ...]  # (at_s, spot hosts available in all pools), capped at the target
    spent: tuple[tuple[float, int], ...]  # (at_s, micros by then), linear between
    work: tuple[tuple[float, float], ...]  # (at_s, share of the work that is done), linear between


@dataclass(frozen=True)
class StrategyOutcome:
    """Result of one strategy over all windows."""

    strategy: str
    ours: bool
    windows: tuple[Window, ...]
    # mean cost relative to the work on demand without waste; without a deadline and work, to the work that was done
    percent: float
    goodput: float  # mean of useful / (target hosts x time); if the work was finished, until then

    @cached_property
    def mean_micros(self) -> int:
        return round(sum(w.micros for w in self.windows) / max(1, len(self.windows)))

    @cached_property
    def least_micros(self) -> int:
        return min((w.micros for w in self.windows), default=0)

    @cached_property
    def most_micros(self) -> int:
        return max((w.micros for w in self.windows), default=0)

    @cached_property
    def misses(self) -> int:
        return sum(not w.done for w in self.windows)

    @cached_property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Return the mean per window."""
        sums = dict.fromkeys(PARTS, 0)
        for window in self.windows:
            for name, micros in window.parts:
                sums[name] += micros
        return tuple((name, round(micros / max(1, len(self.windows)))) for name, micros in sums.items())


@dataclass(frozen=True)
class SimulationReport:
    fleet: str
    pools: tuple[PoolResult, ...]
    # the records are pools of one fleet; else each is a market of its own, and their windows are pooled here
    together: bool
    hosts: int
    work_s: float | None  # at all hosts
    deadline_s: float | None
    window_s: float
    every_s: float
    boot_s: float
    notice_s: float
    full_micros: int  # cost of the work on demand without any waste: 100 %; 0 if no price is known
    outcomes: tuple[StrategyOutcome, ...]  # ours first
    stories: tuple[Story, ...]  # one for each strategy, of the window in which our cost was closest to its mean
    measured: tuple[tuple[str, float, str], ...]  # (what, seconds, source)
    notes: tuple[str, ...]  # facts for the reader: substitutions and assumptions
    boot_from: str = ""  # the source of `boot_s`

    @property
    def ours(self) -> StrategyOutcome:
        return self.outcomes[0]
