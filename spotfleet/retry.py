"""Pauses between tries, each twice as long as the one before. Pure."""

from __future__ import annotations


def growing_s(failures: int, first_s: float, last_s: float) -> float:
    """Return the seconds to wait after `failures` in a row, 1 or more: `first_s` after the first, at most `last_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 30), last_s)


class Backoff:
    """Pauses of one loop that tries until it succeeds."""

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s, self._last_s = first_s, last_s
        self._failures = 0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has failed since the start or the last reset."""
        return not self._failures

    def next_s(self) -> float:
        """Count a failure and return the seconds to wait."""
        self._failures += 1
        return growing_s(self._failures, self._first_s, self._last_s)

    def reset(self) -> None:
        """Begin with the first pause again."""
        self._failures = 0
