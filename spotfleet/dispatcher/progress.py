"""What a job's training has come to: steps, what they take and why, repeats and pauses, as events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfleet.addresses import host_of
from spotfleet.dispatcher.explain import Explainer, Rank
from spotfleet.dispatcher.membership import Formed, Membership, Phase
from spotfleet.dispatcher.workers import Crew
from spotfleet.fleet.events import Event, JobProgress, JobResumed

if TYPE_CHECKING:
    from spotfleet.dispatcher.surroundings import Surroundings

PROGRESS_S = 10.0
EXPLAIN_S = 1.0  # what workers have measured is looked at no more often


class Progress:
    """Of one job."""

    def __init__(self, job: str, repeated: int) -> None:
        self.job, self.repeated = job, repeated
        self.step_s = 0.0
        self._step_bytes = 0  # that each worker hands to the reductions of a step, as last heard
        self._resuming: Formed | None = None  # formed; not every member has made a step in it
        self._counted: dict[str, int] = {}  # worker -> repeats that are in `repeated` already
        self._written_at: float | None = None
        self._reached = 0  # newest version that any worker has reported
        self._trained_at: float | None = None  # when the newest generation was last seen whole
        self._members: tuple[str, ...] = ()  # of the generation before `_resuming`
        self._explainer = Explainer(job)
        self._explained_at = 0.0  # looked at; monotonic
        self._lost = 0  # steps since the checkpoint from which `_resuming` goes on, all others being lost

    def adopt(self, crew: Crew, trained: tuple[str, ...], reached: int) -> None:
        """After a restart: what workers have repeated so far was counted before. `trained`: who made the last steps
        that are known, up to version `reached`."""
        self._members, self._reached = trained, reached
        self._counted = {w.name: w.report.repeated for w in crew.all.values()}

    def formed(self, change: Formed, restored: int) -> None:
        """`restored`: the newest checkpoint's version, where all who knew more are gone."""
        survivors = not self._members or bool(set(self._members) & set(change.members))
        if not survivors:
            self._lost = max(0, self._reached - restored)
        elif self._resuming is None:  # else nobody has made a step since, and what was lost is still to be told
            self._lost = 0
        self._members, self._resuming = change.members, change

    def look(self, crew: Crew, membership: Membership, around: Surroundings) -> list[Event]:
        times = sorted(w.report.step_s for w in crew.live() if w.report.step_s > 0)
        self.step_s = times[len(times) // 2] if times else self.step_s
        moved = sorted(w.report.cost.bytes for w in crew.live() if w.report.cost.bytes > 0)
        self._step_bytes = moved[len(moved) // 2] if moved else self._step_bytes
        if membership.phase is Phase.RUNNING and self._resuming is None:
            self._trained_at = around.now
        events = self._resumed(crew, around)
        due = self._written_at is None or around.now - self._written_at >= PROGRESS_S
        if due and membership.phase is Phase.RUNNING and membership.version > 0:
            self._written_at = around.now
            events.append(JobProgress(around.unix, self.job, membership.version, self.step_s, self._step_bytes))
        events += self._explain(crew, membership, around)
        self._reached = max(self._reached, crew.version())
        return events

    @property
    def step_why(self) -> str:
        """Why a step takes as long as it does in the generation that trains; empty while that is not known."""
        return self._explainer.newest.why if self._explainer.newest else ""

    def _explain(self, crew: Crew, membership: Membership, around: Surroundings) -> list[Event]:
        if around.now - self._explained_at < EXPLAIN_S or membership.phase is not Phase.RUNNING:
            return []
        self._explained_at, generation = around.now, membership.generation
        reports = [crew.all[m].report for m in membership.members if m in crew.all]
        if any(r.resumed != generation for r in reports):
            return []
        ranks = [Rank(r.worker, host_of(r.store), r.step_s, r.cost) for r in reports]
        found = self._explainer.look(generation, ranks, around.now, around.unix)
        return [found] if found is not None else []

    def last(self, membership: Membership, around: Surroundings) -> list[Event]:
        if membership.version <= 0:
            return []
        return [JobProgress(around.unix, self.job, membership.version, self.step_s, self._step_bytes)]

    def _resumed(self, crew: Crew, around: Surroundings) -> list[Event]:
        if self._resuming is None:
            return []
        members = [crew.all[m].report for m in self._resuming.members if m in crew.all]
        if any(m.resumed < self._resuming.generation for m in members):
            return []
        again = max((m.repeated - self._counted.get(m.worker, 0) for m in members), default=0)
        self._counted |= {m.worker: m.repeated for m in members}
        again = max(0, again) + self._lost
        self.repeated += again
        version = max((m.version for m in members), default=0)
        pause_s = max((m.pause_s for m in members), default=0.0)
        if self._lost and self._trained_at is not None:
            pause_s = max(pause_s, around.now - self._trained_at)  # nobody is left who could tell
        event = JobResumed(around.unix, self.job, self._resuming.generation, version, again, pause_s)
        self._resuming, self._lost = None, 0
        return [event]
