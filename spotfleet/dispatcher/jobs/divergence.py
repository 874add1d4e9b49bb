"""Reaction to ranks that differ where they should be equal: none of their states is trained on. Pure.

Workers find it (`train/state/divergence.py`), report it and end. The job goes on from its newest checkpoint. It fails
without one, and after LIMIT times from the same checkpoint: then the difference comes again by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotfleet.dispatcher.jobs.workers import JobWorker

LIMIT = 3


@dataclass(frozen=True)
class Divergence:
    """A new report of ranks that differ, and the decision."""

    why: str
    error: str  # the workers' description
    version: int  # the newest that they had
    checkpoint: int  # version of the checkpoint to go on from; 0: none
    fails: bool


class DivergenceTracker:
    """Reports of one job, and how often it went on from the same checkpoint."""

    def __init__(self) -> None:
        self.remark = ""  # for the status
        self._version = 0  # highest one reported by workers that did not differ yet
        self._from = -1
        self._times = 0

    def update(self, workers: Iterable[JobWorker], newest: int) -> Divergence | None:
        """Return the divergence that a worker of the present run reports; `newest` is the newest checkpoint's version,
        0 without one."""
        present = [w for w in workers if not w.past]
        self._version = max([self._version, *(w.report.version for w in present)])
        error = next((w.report.diverged for w in present if w.report.diverged), "")
        if not error:
            return None
        version, self._version = self._version, 0
        self._times = self._times + 1 if newest == self._from else 1
        self._from = newest
        if newest == 0:
            why = "the ranks' states differ, and there is no checkpoint to go on from"
        elif self._times > LIMIT:
            why = f"the ranks' states differ for the {self._times}th time since checkpoint {newest}"
        else:
            why = f"the ranks' states differed; goes on from checkpoint {newest}"
        self.remark = f"{why}: {error}"
        return Divergence(why, error, version, newest, newest == 0 or self._times > LIMIT)
