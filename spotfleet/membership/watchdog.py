"""Watchdog: finds the workers that hang when a generation makes no more steps. Pure.

All ranks stop when one does, so time alone does not show which one hangs: it is the one that does not wait for its
peers. If all wait, the network between two of them fails, and the same members form again. If none waits, all are in
the user's own code (an evaluation, a first compilation), and none is to blame.

One rank may work long while the others wait (an evaluation on rank 0). It is evicted after the limit like one that
hangs. If its successor takes as long at the same step, the limit doubles and stays doubled, so that such work
completes, then and at every repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from spotfleet.membership.views import Tuning, WorkerView


@dataclass(frozen=True)
class Stall:
    """Finding of the watchdog."""

    why: str = ""  # for people; empty while steps are made
    over: bool = False  # the limit has passed: form again
    guilty: tuple[str, ...] = ()  # workers to leave out


class Watchdog:
    """Watchdog of one job."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._factor = 1.0
        self._version = -1  # version at the last eviction, while it has not helped yet

    def check(self, members: Sequence[WorkerView]) -> Stall:
        """Judge members that hold one formed generation and all answer."""
        tuning, quiet_s = self._tuning, min((v.quiet_s for v in members), default=0.0)
        usual_s = tuning.hang_steps * median(v.step_s for v in members) if members else 0.0
        if quiet_s < max(tuning.hang_s, usual_s):
            return Stall()
        why, busy = f"no step for {quiet_s:.0f} s", tuple(v.worker for v in members if not v.waits)
        if len(busy) == len(members):
            return Stall(why)
        why += f": the others wait for {', '.join(busy)}" if busy else ": every rank waits for the others"
        first = any(v.resumed < v.generation for v in members)
        version = max(v.version for v in members)
        if quiet_s < self._factor * max(tuning.hang_s, usual_s):
            return Stall(why)
        if version == self._version:  # the successor takes as long: it is work, and will be again
            self._factor, self._version = 2 * self._factor, -1
        if quiet_s < self._factor * max(tuning.hang_first_s if first else 0.0, tuning.hang_s, usual_s):
            return Stall(why)
        self._version = version
        return Stall(why, True, busy)
