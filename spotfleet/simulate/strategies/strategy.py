"""Interface of a strategy: it decides how many hosts of each market a simulated fleet should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotfleet.fleet.policy.values import DecisionInput, MarketTarget

Choose = Callable[[DecisionInput], MarketTarget]


@dataclass(frozen=True)
class WindowJob:
    """Demand of one simulated window."""

    hosts: int
    work_s: float  # at `hosts`; infinite: as much as the time allows
    deadline_s: float  # infinite: none


@dataclass(frozen=True)
class Strategy:
    """Strategy by name. `make` returns a fresh decider for each window, so that no memory is carried from one to the
    next."""

    name: str
    make: Callable[[WindowJob], Choose]
    ours: bool = False
    gang: bool = False  # trains only while all hosts are there, and begins anew at each change
    restart_s: float | None = None  # pause of all hosts at each change; None: as measured for this release
    timeless: bool = False  # makes sense without a deadline
    # interval between checkpoints: a loss repeats the work since the last one; 0: each step is kept
    checkpoint_s: float = 0.0
