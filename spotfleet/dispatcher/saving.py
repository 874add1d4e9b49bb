"""Whether what a job has reached is kept before the last that hold it are gone. Pure.

    SAFE --everybody who holds the state leaves--> DANGER --kept, and nobody trains on: told that it was in time--+
      ^                                              '--nobody holds it any more: told, with what is lost---------+
      '------somebody stays, or it goes on from a checkpoint-----------------------------------------------------'

DANGER ends with the hosts, whose notices bound it. Parts that are all here and still to be joined are waited for
JOIN_S at most. Each danger is told once: `told` is in the job's record, so that a restart does not tell it again.

Where a cloud only hints that it may take a host, what has been reached by then is wanted in a checkpoint, once for each
host, for HINT_S at most; training goes on where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotfleet.fleet.events import CheckpointInTime

JOIN_S = 60.0
HINT_S = 120.0


@dataclass(frozen=True)
class Sight:
    """What there is to see at a look."""

    now: float  # monotonic
    leaves_s: float | None  # until the first of those who hold the state is gone, where all go; None: somebody stays
    reached: int  # the newest version of those that live
    kept: int  # the newest checkpoint's
    trains: bool  # somebody goes on making steps
    held: bool  # somebody holds the state
    joining: bool = False  # parts of a newer checkpoint are all here
    hinted: frozenset[str] = frozenset()  # its hosts that the cloud may take soon


@dataclass(frozen=True)
class Danger:
    reached: int
    left_s: float
    gone_at: float | None = None  # monotonic


class Saving:
    def __init__(self, told: int) -> None:
        """`told`: the version that the last danger was told of; 0: none."""
        self.told, self.why = told, ""
        self._danger: Danger | None = None
        self._last: tuple[int, float] | None = None  # before a cancelled job ends: the version to keep, until when
        self._hint: tuple[int, float] | None = None  # the same at a hint
        self._hinted: frozenset[str] = frozenset()

    @property
    def wanted(self) -> bool:
        """Is a checkpoint wanted now, whatever the interval?"""
        return self._last is not None or self._hint is not None

    # ---- of a job that is cancelled

    def want(self, version: int, until: float) -> None:
        """Until then (monotonic) the job may train on, until `version` is in a checkpoint."""
        self._last = (version, until)

    def waits(self, kept: int, able: bool, now: float) -> bool:
        """Is that checkpoint still on its way? `able`: somebody could write it."""
        if self._last is not None and (kept >= self._last[0] or not able or now >= self._last[1]):
            self._last = None
        return self._last is not None

    # ---- of one whose host may be taken

    def _heed(self, sight: Sight) -> None:
        """A checkpoint for each hint that is new."""
        if sight.hinted - self._hinted and sight.reached > sight.kept:
            self._hint = (sight.reached, sight.now + HINT_S)
        self._hinted = sight.hinted
        if self._hint is not None and (sight.kept >= self._hint[0] or sight.now >= self._hint[1]):
            self._hint = None

    # ---- of one that loses all who hold its state

    def look(self, job: str, unix: float, sight: Sight) -> list[CheckpointInTime]:
        """What is to be told now."""
        self._heed(sight)
        before = self._danger
        if sight.leaves_s is not None:
            reached = max(sight.reached, before.reached if before else 0)
            self._danger = Danger(reached, max(0.0, sight.leaves_s))
            if sight.kept >= reached and not sight.trains:
                return self._tell(job, unix, sight.kept, self._danger)
            if self.told < reached or sight.kept < reached:
                self.why = (f"all hosts that hold its state go in {sight.leaves_s:.0f} s: version {reached} was "
                            f"reached, {_said(sight.kept)} kept so far")
            return []
        if before is None or sight.held:
            self.why = "" if sight.held and sight.reached > self.told else self.why
            self._danger = None
            return []
        self._danger = gone = before if before.gone_at is not None else replace(before, gone_at=sight.now, left_s=0.0)
        if sight.joining and sight.kept < gone.reached and sight.now - (gone.gone_at or 0.0) < JOIN_S:
            return []
        self._danger = None
        return self._tell(job, unix, sight.kept, gone)

    def _tell(self, job: str, unix: float, kept: int, danger: Danger) -> list[CheckpointInTime]:
        if self.told == danger.reached:
            return []
        self.told, lost = danger.reached, danger.reached - kept
        if lost <= 0:
            self.why = f"version {kept} was kept {danger.left_s:.1f} s before the hosts that held it go"
        else:
            self.why = (f"version {danger.reached} was reached, {_said(kept)} kept: {lost} "
                        f"step{'' if lost == 1 else 's'} will be repeated")
        return [CheckpointInTime(unix, job, danger.reached, kept, danger.left_s, self.why)]


def _said(kept: int) -> str:
    return f"{kept} is" if kept else "none is"
