"""What decides, in a simulation, how many hosts of either market there should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spotfleet.fleet.policy.values import Choice, Moment

Choose = Callable[[Moment], Choice]


@dataclass(frozen=True)
class Job:
    """What one simulated window asks for."""

    hosts: int
    work_s: float  # at `hosts`; infinite: as much as there is time for
    deadline_s: float  # infinite: none


@dataclass(frozen=True)
class Strategy:
    """`make` gives a fresh decider for each window, so that nothing is remembered from one to the next."""

    name: str
    make: Callable[[Job], Choose]
    ours: bool = False
    gang: bool = False  # trains only while all hosts are there, and begins anew at each change
    restart_s: float | None = None  # for which all hosts wait at each change; None: as measured of this release
    timeless: bool = False  # makes sense without a deadline
    checkpoint_s: float = 0.0  # so often progress is kept: what came after is done again after a loss; 0: each step is
