"""Training as host-seconds of work: members, cost of a change, progress. Pure.

Weak scaling: each member adds a host-second of work per second. When the members change, all of them pause;
`constants.py` has the duration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from spotfleet.simulate import constants

EPSILON_S = 1e-3  # unit of work; smaller rests count as done


@dataclass(frozen=True)
class Pauses:
    """Pauses of all members, in seconds."""

    loss_s: float = constants.LOSS.seconds
    leave_s: float = constants.LEAVE.seconds
    join_s: float = constants.JOIN.seconds

    @classmethod
    def restarts(cls, seconds: float) -> Pauses:
        return cls(seconds, seconds, seconds)


@dataclass(frozen=True)
class MembersChanged:
    """New membership."""

    members: tuple[str, ...]
    cause: str  # as GenerationFormed.cause
    pause_s: float
    repeated_s: float  # host-seconds of work that must be done again


@dataclass
class Work:
    target: int
    left_s: float  # host-seconds; infinite: as much as the time allows
    now: float
    pauses: Pauses = field(default_factory=Pauses)
    gang: bool = False  # all `target` hosts or none
    checkpoint_s: float = 0.0  # seconds of training between two checkpoints; 0: no work is ever lost

    def __post_init__(self) -> None:
        self.members: tuple[str, ...] = ()
        self.useful_s = 0.0  # without lost work
        self.repeated_s = 0.0
        self._until = self.now  # end of the pause of all members
        self._unkept_s = 0.0  # host-seconds since the last checkpoint
        self._trained_s = 0.0  # seconds since the last checkpoint

    @property
    def done(self) -> bool:
        return self.left_s <= EPSILON_S

    def advance(self, now: float) -> None:
        """Do the members' work until `now`; ends exactly with the work if `now` is `finish_at()`."""
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
        """Return `left_s` at a later instant if the membership stays."""
        return max(0.0, self.left_s - max(0.0, when - max(self.now, self._until)) * len(self.members))

    def finish_at(self) -> float:
        """Return the instant at which the work is done if the membership stays."""
        if not self.members or math.isinf(self.left_s):
            return math.inf
        return max(self.now, self._until) + self.left_s / len(self.members)

    def regroup(self, ready: Iterable[str], lost: bool) -> MembersChanged | None:
        """Admit the `ready` hosts, the present members first, as many as can be used. `lost`: some members left without
        notice. Returns None if nothing changes."""
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
        return MembersChanged(members, cause, pause_s, repeated)
