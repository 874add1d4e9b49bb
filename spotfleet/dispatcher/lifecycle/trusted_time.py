"""Trusted time: Unix time for the fleet's money, limits and events, which no wrong wall clock moves. Pure: `unix` (the
wall clock) and `mono` (monotonic) are arguments.

The time is known when the process begins: from the record of the process before it, from the ledger, or, where there is
neither, from the wall clock. From then on it passes by the monotonic clock. The wall clock is followed while it stays
within BOUND_S of that. An outside time, that of the cloud or of two hosts that agree, decides about any other.

                  further off than BOUND_S
    FOLLOWED ----------------------------------> DOUBTED (time passes by the monotonic clock)
       ^  ^                                         | |
       |  '--- it is back, or an outside time ------' | an outside time differs from it: the time becomes that one
       |       agrees with it                         v
       '------------ the same -------------------- WRONG (time passes by the monotonic clock)

An outside time also decides in FOLLOWED, once, if none has yet: a wall clock can be wrong from the beginning.

DOUBTED is left by an outside time or by the wall clock itself. Without either it lasts. The age of the fleet then lacks
the time for which no dispatcher ran, and is never too long: a limit fires late, at the latest after as much running
time of dispatchers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from statistics import median

from spotfleet.words import about

BOUND_S = 30.0  # less is drift, a slow answer, or a busy machine
HOSTS = 2  # fewer hosts confirm no time: any of them may have a wrong clock
SET_CLOCK = "set the clock of the dispatcher's machine, for instance with `sudo timedatectl set-ntp true`"


class ClockState(Enum):
    """Standing of the wall clock."""

    FOLLOWED = "followed"
    DOUBTED = "doubted"
    WRONG = "wrong"


@dataclass(frozen=True)
class KnownTime:
    """The time that is known when a process begins."""

    at: float
    exact: bool  # it is this moment's, by a clock that ran all the while; False: it is now at least `at`
    confirmed: bool = False  # by an outside time


class TrustedTime:
    """State machine of the module's docstring."""

    def __init__(self, unix: float, mono: float, known: KnownTime | None = None) -> None:
        self.state = ClockState.FOLLOWED
        self.confirmed = known is not None and known.confirmed
        self.since = mono  # monotonic: an outside time must be newer than this
        self._base = self._anchor = unix - mono  # the time is base + mono; the wall clock is compared with the anchor
        self._was_down = False  # it is unknown how much time passed before this process
        self._counted_s = 0.0
        self._shift_s = 0.0
        self._other = ""  # the outside time that shows the wall clock to be wrong
        if known is None:
            return
        if known.exact:
            self._anchor = known.at - mono
        if abs(unix - known.at) > BOUND_S:
            self.state, self._was_down = ClockState.DOUBTED, not known.exact
            self._base = self._anchor = known.at - mono

    def unix(self, mono: float) -> float:
        """Return the time."""
        return self._base + mono

    def passed(self, mono: float) -> float:
        """Return the monotonic clock, plus the time that passed while it stood still or no process ran."""
        return mono + self._counted_s

    @property
    def asks(self) -> bool:
        """Return whether an outside time is needed."""
        return not self.confirmed or self.state is not ClockState.FOLLOWED

    def update(self, unix: float, mono: float) -> None:
        """Compare the wall clock."""
        if abs(unix - mono - self._anchor) <= BOUND_S:
            self._base, self.state, self._was_down = unix - mono, ClockState.FOLLOWED, False
        elif self.state is ClockState.FOLLOWED:
            self.state, self.since = ClockState.DOUBTED, mono

    def confirm(self, outside: float, unix: float, mono: float, *, by_cloud: bool) -> None:
        """Decide by an outside time, as of `mono`, if one is needed. Hosts never move a confirmed time back: those that
        lost their power together may all have the clock of a new machine."""
        right = abs(unix - outside) <= BOUND_S
        base = unix - mono if right else outside - mono
        step = base - self._base
        if not self.asks or (step < -BOUND_S and self.confirmed and not by_cloud):
            return
        if right or abs(step) > BOUND_S:
            self._step(step)
        self.confirmed, self._was_down = True, False
        self.state, self._other = (ClockState.FOLLOWED, "") if right else (
            ClockState.WRONG, "the cloud's" if by_cloud else "its hosts'")

    def _step(self, step: float) -> None:
        """Move the time. It has passed if the monotonic clock missed it; else the time has been wrong so far."""
        self._base += step
        self._anchor = self._base
        if abs(step) <= BOUND_S:
            return
        if step > 0 and (self._was_down or self.confirmed):
            self._counted_s += step
        else:
            self._shift_s += step

    def take_shift(self) -> float:
        """Return by how much the time was wrong and has been moved since the last call: above 0 forward. Instants from
        before count as moved with it."""
        shift, self._shift_s = self._shift_s, 0.0
        return shift

    def why(self, unix: float, mono: float) -> str:
        """Return why the wall clock is not used, with the next step; empty while it is."""
        if self.state is ClockState.FOLLOWED:
            return ""
        lead = unix - self.unix(mono)
        off = f"the dispatcher's clock is {about(abs(lead))} {'ahead of' if lead > 0 else 'behind'}"
        if self.state is ClockState.WRONG:
            return f"{off} {self._other} time, and is not used: {SET_CLOCK}"
        return (f"{off} the time that is known to have passed, and is not used until the cloud or {HOSTS} hosts "
                f"confirm it: if it is wrong, {SET_CLOCK}")


def hosts_time(times: Collection[float]) -> float | None:
    """Return the time on which more than half of the hosts, and at least HOSTS, agree; None without such a majority.
    `times`: each host's clock, all as of one moment."""
    if len(times) < HOSTS:
        return None
    middle = median(times)
    agreed = [t for t in times if abs(t - middle) <= BOUND_S]
    return median(agreed) if len(agreed) >= HOSTS and 2 * len(agreed) > len(times) else None
