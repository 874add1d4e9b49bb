"""What a job's training has come to: steps, repeats and pauses, as events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfleet.dispatcher.membership import Formed, Membership, Phase
from spotfleet.dispatcher.workers import Crew
from spotfleet.fleet.events import Event, JobProgress, JobResumed

if TYPE_CHECKING:
    from spotfleet.dispatcher.jobs import Surroundings

PROGRESS_S = 10.0


class Progress:
    """Of one job."""

    def __init__(self, job: str, repeated: int) -> None:
        self.job, self.repeated = job, repeated
        self.step_s = 0.0
        self._resuming: Formed | None = None  # formed; not every member has made a step in it
        self._counted: dict[str, int] = {}  # worker -> repeats that are in `repeated` already
        self._written_at: float | None = None

    def formed(self, change: Formed) -> None:
        self._resuming = change

    def look(self, crew: Crew, membership: Membership, around: Surroundings) -> list[Event]:
        times = sorted(w.report.step_s for w in crew.live() if w.report.step_s > 0)
        self.step_s = times[len(times) // 2] if times else self.step_s
        events = self._resumed(crew, around)
        due = self._written_at is None or around.now - self._written_at >= PROGRESS_S
        if due and membership.phase is Phase.RUNNING and membership.version > 0:
            self._written_at = around.now
            events.append(JobProgress(around.unix, self.job, membership.version, self.step_s))
        return events

    def last(self, membership: Membership, around: Surroundings) -> list[Event]:
        if membership.version <= 0:
            return []
        return [JobProgress(around.unix, self.job, membership.version, self.step_s)]

    def _resumed(self, crew: Crew, around: Surroundings) -> list[Event]:
        if self._resuming is None:
            return []
        members = [crew.all[m].report for m in self._resuming.members if m in crew.all]
        if any(m.resumed < self._resuming.generation for m in members):
            return []
        again = max((m.repeated - self._counted.get(m.worker, 0) for m in members), default=0)
        self._counted |= {m.worker: m.repeated for m in members}
        self.repeated += max(0, again)
        version = max((m.version for m in members), default=0)
        pause_s = max((m.pause_s for m in members), default=0.0)
        event = JobResumed(around.unix, self.job, self._resuming.generation, version, max(0, again), pause_s)
        self._resuming = None
        return [event]
