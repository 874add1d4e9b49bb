"""How many members the next change that we choose may leave a job with, and when it may be. Pure.

Changes that we choose are joins and drains. Deaths, failures and notices never wait; what they bring in at the same
time counts as a join, so that a death is no way around the limits.
"""

from __future__ import annotations

from dataclasses import dataclass

CHOSEN = ("join", "drain")  # causes of generations


@dataclass(frozen=True)
class Pace:
    max_join: int = 0  # workers more after one change; 0: any number
    max_leave: int = 0  # workers fewer after one change; 0: any number
    every_s: float = 0.0  # between two changes

    def limit(self, size: int, wanted: int, since_s: float) -> int:
        """The most members after the next change, `since_s` after the last one that we chose."""
        if since_s < self.every_s:
            return size
        if wanted > size:
            return min(wanted, size + self.max_join) if self.max_join else wanted
        return max(wanted, size - self.max_leave) if self.max_leave else wanted


class Pacer:
    """Keeps the time of the last change that we chose."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self._now = 0.0
        self._chosen_at: float | None = None
        self._resumed = False

    def tick(self, now: float) -> None:
        """It is `now` until the next call."""
        self._now = now
        if self._resumed and self._chosen_at is None:
            self._chosen_at = now

    def ordered(self, cause: str) -> None:
        if cause in CHOSEN:
            self._chosen_at = self._now

    def resumed(self) -> None:
        """A dispatcher has restarted: when the last change was is not known, so it may have been just now."""
        self._resumed = True

    def limit(self, size: int, formed: bool, wanted: int) -> int:
        """The most members of the next generation. While one forms nobody is taken in beyond it; where nobody
        trains there is nothing to change slowly."""
        if size == 0 or self.pace == Pace():
            return wanted
        return self.pace.limit(size, wanted, self.since_s) if formed else size

    @property
    def since_s(self) -> float:
        return float("inf") if self._chosen_at is None else max(0.0, self._now - self._chosen_at)

    def why(self, ready: int) -> str:
        """What `ready` workers that could train wait for, if it is for us."""
        left_s = self.pace.every_s - self.since_s
        return f"{ready} more may join in {left_s:.0f} s" if ready > 0 and left_s > 0 else ""
