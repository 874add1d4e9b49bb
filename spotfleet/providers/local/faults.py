"""Scripted faults between a caller and the emulated cloud: late, repeated, slow and lost answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from spotfleet.errors import UsageError


@dataclass
class Faults:
    """The faults in force."""

    listing_lag_s: float = 0.0  # repetitions of each line of a listing
    duplicates: int = 0  # extra time of each call
    latency_s: float = 0.0  # each call takes so much longer
    lost: dict[str, list[str]] = field(default_factory=dict)  # method -> the fates of its next calls

    def lose(self, method: str, when: str = "after", times: int = 1) -> None:
        """Lose the next `times` calls of `method`: "before" they take effect, or the answer "after" they did."""
        if when not in ("before", "after"):
            raise UsageError(f"when: '{when}' is neither", hint='use "before" or "after"')
        self.lost.setdefault(method, []).extend([when] * times)

    def fate(self, method: str) -> str:
        """Return and count the fate of this call: "before", "after", or "" if it is answered."""
        waiting = self.lost.get(method)
        return waiting.pop(0) if waiting else ""
