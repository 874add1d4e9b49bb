"""Time as it passes, whatever the wall clock is set to. Pure: `unix` and `mono` (monotonic) seconds come in.

The wall clock says what happened before this process began; from then on only the monotonic one counts. So a clock that
is set hours forward or back ends no fleet, and no host is taken for silent.
"""

from __future__ import annotations

JUMP_S = 30.0  # less is drift, or a busy machine


class Stopwatch:
    """How old a fleet is, and for how long it has had no job."""

    def __init__(self, unix: float, mono: float, created_at: float, ended_at: float) -> None:
        """`ended_at`: when it was last seen to have work or wanted to have some, 0 for never."""
        self._born = mono - max(0.0, unix - created_at)
        self._idle_from = mono - max(0.0, unix - max(created_at, ended_at))

    def age_s(self, mono: float) -> float:
        return mono - self._born

    def idle_s(self, mono: float, *, working: bool) -> float:
        """Since the last call with `working`; to be called often."""
        if working:
            self._idle_from = mono
        return mono - self._idle_from


class Jumps:
    """Notices when the wall clock is set."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def look(self, unix: float, mono: float) -> float:
        """By how much it was set since the last look: above 0 forward, 0 for not at all."""
        before, self._offset = self._offset, unix - mono
        by_s = self._offset - before if before is not None else 0.0
        return by_s if abs(by_s) >= JUMP_S else 0.0
