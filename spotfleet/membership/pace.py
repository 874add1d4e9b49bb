"""Pace of the membership changes that we choose: their size, and the time between them. Pure.

We choose joins and drains. Deaths, failures and notices never wait. Workers that join in the same change still count
as a join, so that a death is no way around the limits.
"""

from __future__ import annotations

from dataclasses import dataclass

CHOSEN = ("join", "drain")  # causes of generations


@dataclass(frozen=True)
class Pace:
    """Limits on chosen changes."""

    max_join: int = 0  # workers added by one change; 0: any number
    max_leave: int = 0  # workers removed by one change; 0: any number
    every_s: float = 0.0  # between two changes

    def limit(self, size: int, wanted: int, since_s: float) -> int:
        """Return the most members after the next change, `since_s` after the last chosen one."""
        if since_s < self.every_s:
            return size
        if wanted > size:
            return min(wanted, size + self.max_join) if self.max_join else wanted
        return max(wanted, size - self.max_leave) if self.max_leave else wanted


class Pacer:
    """Limiter of chosen changes; holds the time of the last one."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self._now = 0.0
        self._chosen_at: float | None = None
        self._resumed = False

    def tick(self, now: float) -> None:
        """Set the current time."""
        self._now = now
        if self._resumed and self._chosen_at is None:
            self._chosen_at = now

    def ordered(self, cause: str) -> None:
        if cause in CHOSEN:
            self._chosen_at = self._now

    def resumed(self) -> None:
        """Record a restart of the dispatcher: the time of the last change is unknown, so it counts as just now."""
        self._resumed = True

    def limit(self, size: int, formed: bool, wanted: int) -> int:
        """Return the most members of the next generation.

        A generation that forms admits no further member. Without members there is no limit.
        """
        if size == 0 or self.pace == Pace():
            return wanted
        return self.pace.limit(size, wanted, self.since_s) if formed else size

    @property
    def since_s(self) -> float:
        return float("inf") if self._chosen_at is None else max(0.0, self._now - self._chosen_at)

    def why(self, ready: int) -> str:
        """Explain what `ready` workers that could train wait for; "" unless it is the pace."""
        left_s = self.pace.every_s - self.since_s
        return f"{ready} more may join in {left_s:.0f} s" if ready > 0 and left_s > 0 else ""
