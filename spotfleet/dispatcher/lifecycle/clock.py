"""Monotonic clock of the fleet, independent of changes of the wall clock. Pure: `unix` (the trusted time) and `mono`
(`TrustedTime.passed`) seconds are arguments.

The trusted time gives the times before the start of this process; afterwards only the monotonic clock counts. So a wall
clock that is set hours forward or back ends no fleet, and makes no host count as silent.
"""

from __future__ import annotations


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
