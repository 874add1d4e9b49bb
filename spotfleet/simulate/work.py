"""Training as host-seconds of work: who takes part, what a change costs, how far it is. Pure.

Weak scaling: each host that takes part adds a host-second of work per second. When who takes part changes, all wait;
how long, `measured.py` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from spotfleet.simulate import measured

EPSILON_S = 1e-3  # of work: less is done


@dataclass(frozen=True)
class Pauses:
    """Seconds for which all wait."""

    loss_s: float = measured.LOSS.seconds
    leave_s: float = measured.LEAVE.seconds
    join_s: float = measured.JOIN.seconds

    @classmethod
    def restarts(cls, seconds: float) -> Pauses:
        return cls(seconds, seconds, seconds)


@dataclass(frozen=True)
class Formed:
    """Who takes part from now on."""

    members: tuple[str, ...]
    cause: str  # as GenerationFormed.cause
    pause_s: float
    repeated_s: float  # host-seconds of work that must be done again


@dataclass
class Work:
    target: int
    left_s: float  # host-seconds; infinite: as much as there is time for
    now: float
    pauses: Pauses = field(default_factory=Pauses)
    gang: bool = False  # all `target` hosts or none
    checkpoint_s: float = 0.0  # of training, between two that are kept; 0: nothing is ever lost

    def __post_init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.useful_s = 0.0  # net of what was lost
        self.repeated_s = 0.0
        self._until = self.now  # all wait until then
        self._unkept_s = 0.0  # host-seconds since the last checkpoint
        self._trained_s = 0.0  # seconds since it

    @property
    def done(self) -> bool:
        return self.left_s <= EPSILON_S

    def advance(self, now: float) -> None:
        """Do what the members do until `now`; ends exactly with the work if `now` is `finish_at()`."""
        trained = max(0.0, now - max(self.now, self._until))
        done = min(trained * len(self.members), self.left_s)
        self.left_s -= done
        self.useful_s += done
        self.now = now
        if self.checkpoint_s and self.members and trained:
            self._trained_s += trained
            self._unkept_s += done
            if self._trained_s >= self.checkpoint_s:
                self._trained_s %= self.checkpoint_s
                self._unkept_s = self._trained_s * len(self.members)

    def left_at(self, when: float) -> float:
        """`left_s` at a later instant if nobody comes or goes."""
        return max(0.0, self.left_s - max(0.0, when - max(self.now, self._until)) * len(self.members))

    def finish_at(self) -> float:
        """When the work is done if nobody comes or goes."""
        if not self.members or math.isinf(self.left_s):
            return math.inf
        return max(self.now, self._until) + self.left_s / len(self.members)

    def regroup(self, ready: Iterable[str], lost: bool) -> Formed | None:
        """Take in those that are `ready`, the present members first, as many as there is use for. `lost`: some left
        without having been able to say so. None if nothing changes."""
        ready = tuple(ready)
        kept = [m for m in self.members if m in ready]
        members = tuple([*kept, *(r for r in ready if r not in kept)][:self.target])
        if self.gang and len(members) < self.target:
            members = ()
        if members == self.members:
            return None
        gone, came = set(self.members) - set(members), set(members) - set(self.members)
        cause = "start" if not self.members else "death" if gone and lost else "notice" if gone else "join"
        pause_s = max(self.pauses.loss_s if gone and lost else self.pauses.leave_s if gone else 0.0,
                      self.pauses.join_s if came else 0.0)
        repeated = self._unkept_s if gone else 0.0
        if gone:
            self._unkept_s = self._trained_s = 0.0
        self.left_s += repeated
        self.useful_s -= repeated
        self.repeated_s += repeated
        self.members = members
        self._until = max(self._until, self.now + pause_s)
        return Formed(members, cause, pause_s, repeated)
