"""Tracker of the last copy: whether a job's progress is in a checkpoint before the last holders of its state are gone.
Pure.

    SAFE --all holders of the state leave--> DANGER --kept, and training stopped: reported as in time--+
      ^                                        '--no holder is left: reported, with the lost steps-----+
      '------some holder stays, or training continues from a checkpoint--------------------------------'

DANGER ends with the hosts, so their notices bound it. If all parts of a checkpoint are here, the tracker waits for the
join, at most JOIN_S. Each danger is reported once: its version is in the job's record, so that a
restart does not repeat it.

If a cloud only hints that it may take a host, the current progress is requested in a checkpoint, once for each host and
for at most HINT_S; training continues where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotfleet.fleet.domain.events import CheckpointInTime

JOIN_S = 60.0
HINT_S = 120.0


@dataclass(frozen=True)
class StateSnapshot:
    """State of a job at one step."""

    now: float  # monotonic
    leaves_s: float | None  # until the first holder of the state is gone, if all leave; None: some holder stays
    reached: int  # newest version of the live workers
    kept: int  # version of the newest checkpoint
    trains: bool  # some worker still makes steps
    held: bool  # some worker holds the state
    joining: bool = False  # all parts of a newer checkpoint are here
    hinted: frozenset[str] = frozenset()  # its hosts that the cloud may take soon


@dataclass(frozen=True)
class Risk:
    """State that may be lost: all of its holders leave."""

    reached: int
    left_s: float
    gone_at: float | None = None  # monotonic


class LastCopyTracker:
    """Risk of one job's state, the event about it, and the need for a checkpoint now."""

    def __init__(self, reported: int) -> None:
        """`reported`: the version of the last reported danger; 0: none."""
        self.reported, self.why = reported, ""
        self._risk: Risk | None = None
        self._last: tuple[int, float] | None = None  # for a cancelled job: the version to keep, and the deadline
        self._hint: tuple[int, float] | None = None  # the same at a hint
        self._hinted: frozenset[str] = frozenset()

    @property
    def wanted(self) -> bool:
        """True if a checkpoint is needed now, regardless of the interval."""
        return self._last is not None or self._hint is not None

    # ---- cancelled job

    def want(self, version: int, until: float) -> None:
        """Let the job continue until `version` is in a checkpoint, or `until` (monotonic)."""
        self._last = (version, until)

    def waits(self, kept: int, able: bool, now: float) -> bool:
        """Return whether to wait for that checkpoint. `able`: some worker could write it."""
        if self._last is not None and (kept >= self._last[0] or not able or now >= self._last[1]):
            self._last = None
        return self._last is not None

    # ---- job whose host may be taken

    def _update_hint(self, snapshot: StateSnapshot) -> None:
        """Request a checkpoint for each new hint."""
        if snapshot.hinted - self._hinted and snapshot.reached > snapshot.kept:
            self._hint = (snapshot.reached, snapshot.now + HINT_S)
        self._hinted = snapshot.hinted
        if self._hint is not None and (snapshot.kept >= self._hint[0] or snapshot.now >= self._hint[1]):
            self._hint = None

    # ---- job that loses all holders of its state

    def update(self, job: str, unix: float, snapshot: StateSnapshot) -> list[CheckpointInTime]:
        """Update the risk; return the events to report now."""
        self._update_hint(snapshot)
        before = self._risk
        if snapshot.leaves_s is not None:
            reached = max(snapshot.reached, before.reached if before else 0)
            self._risk = Risk(reached, max(0.0, snapshot.leaves_s))
            if snapshot.kept >= reached and not snapshot.trains:
                return self._report(job, unix, snapshot.kept, self._risk)
            if self.reported < reached or snapshot.kept < reached:
                self.why = (f"all hosts that hold its state go in {snapshot.leaves_s:.0f} s: version {reached} was "
                            f"reached, {_describe(snapshot.kept)} kept so far")
            return []
        if before is None or snapshot.held:
            self.why = "" if snapshot.held and snapshot.reached > self.reported else self.why
            self._risk = None
            return []
        self._risk = gone = before if before.gone_at is not None else replace(before, gone_at=snapshot.now, left_s=0.0)
        if snapshot.joining and snapshot.kept < gone.reached and snapshot.now - (gone.gone_at or 0.0) < JOIN_S:
            return []
        self._risk = None
        return self._report(job, unix, snapshot.kept, gone)

    def _report(self, job: str, unix: float, kept: int, risk: Risk) -> list[CheckpointInTime]:
        if self.reported == risk.reached:
            return []
        self.reported, lost = risk.reached, risk.reached - kept
        if lost <= 0:
            self.why = f"version {kept} was kept {risk.left_s:.1f} s before the hosts that held it go"
        else:
            self.why = (f"version {risk.reached} was reached, {_describe(kept)} kept: {lost} "
                        f"step{'' if lost == 1 else 's'} will be repeated")
        return [CheckpointInTime(unix, job, risk.reached, kept, risk.left_s, self.why)]


def _describe(kept: int) -> str:
    return f"{kept} is" if kept else "none is"
