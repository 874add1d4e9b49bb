"""Monotonic clock of the fleet, independent of changes of the wall clock. Pure: `unix` and `mono` (monotonic) seconds
are arguments.

The wall clock gives the times before the start of this process; afterwards only the monotonic clock counts. So a wall
clock that is set hours forward or back ends no fleet, and makes no host count as silent.
"""

from __future__ import annotations

JUMP_S = 30.0  # less is drift, or a busy machine


class MonotonicClock:
    """Age of a fleet, and time since its last job."""

    def __init__(self, unix: float, mono: float, created_at: float, ended_at: float) -> None:
        """`ended_at`: the last time with work, or with a request for work; 0 for never."""
        self._born = mono - max(0.0, unix - created_at)
        self._idle_from = mono - max(0.0, unix - max(created_at, ended_at))

    def age_s(self, mono: float) -> float:
        return mono - self._born

    def idle_s(self, mono: float, *, working: bool) -> float:
        """Return the time since the last call with `working`; must be called often."""
        if working:
            self._idle_from = mono
        return mono - self._idle_from


class ClockJumps:
    """Detector of changes of the wall clock."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def update(self, unix: float, mono: float) -> float:
        """Return by how many seconds the clock was set since the last call: above 0 forward, below 0 back."""
        before, self._offset = self._offset, unix - mono
        by_s = self._offset - before if before is not None else 0.0
        return by_s if abs(by_s) >= JUMP_S else 0.0
