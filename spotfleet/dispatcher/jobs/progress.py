"""Training progress of a job as events: steps, their duration and its reason, repeated steps, pauses."""

from __future__ import annotations

from collections.abc import Iterable

from spotfleet.addresses import host_of
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.fleet.domain.events import Event, JobProgress, JobResumed
from spotfleet.fleet.domain.step_cost import Explainer, RankStepCost
from spotfleet.membership import Formed, Membership, Phase

PROGRESS_S = 10.0
EXPLAIN_S = 1.0  # shortest interval between two evaluations of the workers' measurements


class ProgressTracker:
    """Progress of one job, derived from its workers' reports."""

    def __init__(self, job: str, repeated: int, recomputed: int = 0) -> None:
        self.job, self.repeated, self.recomputed = job, repeated, recomputed
        self.step_s = 0.0
        self._step_bytes = 0  # per worker, sent into the reductions of a step, as last reported
        self._resuming: Formed | None = None  # formed; some member has made no step in it yet
        self._counted: dict[str, tuple[int, int]] = {}  # worker -> its part of `repeated` and `recomputed`
        self._written_at: float | None = None
        self._reached = 0  # newest version that any worker has reported
        self._trained_at: float | None = None  # monotonic: all members of the newest generation trained then
        self._members: tuple[str, ...] = ()  # members of the newest generation that was formed or adopted
        self._explainer = Explainer(job)
        self._explained_at = 0.0  # monotonic
        self._lost = 0  # steps after the checkpoint that `_resuming` starts from, where no member survived

    def adopt(self, workers: JobWorkers, trained: tuple[str, ...], reached: int) -> None:
        """Continue after a restart: the workers' repeats so far are counted already. `trained`: the members that made
        the last known steps, up to version `reached`."""
        self._members, self._reached = trained, reached
        self._counted = {w.name: (w.report.repeated, w.report.recomputed) for w in workers.all.values()}

    def formed(self, change: Formed, restored: int) -> None:
        """Record a new generation. `restored`: version of the newest checkpoint, used if no member survived."""
        survivors = not self._members or bool(set(self._members) & set(change.members))
        if not survivors:
            self._lost = max(0, self._reached - restored)
        elif self._resuming is None:  # else no step was made since, and the loss is still to be reported
            self._lost = 0
        self._members, self._resuming = change.members, change

    def update(self, workers: JobWorkers, membership: Membership, context: JobContext) -> list[Event]:
        times = sorted(w.report.step_s for w in workers.live() if w.report.step_s > 0)
        self.step_s = times[len(times) // 2] if times else self.step_s
        moved = sorted(w.report.cost.bytes for w in workers.live() if w.report.cost.bytes > 0)
        self._step_bytes = moved[len(moved) // 2] if moved else self._step_bytes
        if membership.phase is Phase.RUNNING and self._resuming is None:
            self._trained_at = context.now
        events = self._resumed(workers, context)
        due = self._written_at is None or context.now - self._written_at >= PROGRESS_S
        if due and membership.phase is Phase.RUNNING and membership.version > 0:
            self._written_at = context.now
            events.append(JobProgress(context.unix, self.job, membership.version, self.step_s, self._step_bytes))
        events += self._explain(workers, membership, context)
        self._reached = max(self._reached, workers.version())
        return events

    @property
    def step_why(self) -> str:
        """The reason for the duration of a step in the current generation; empty while unknown."""
        return self._explainer.newest.why if self._explainer.newest else ""

    def _explain(self, workers: JobWorkers, membership: Membership, context: JobContext) -> list[Event]:
        if context.now - self._explained_at < EXPLAIN_S or membership.phase is not Phase.RUNNING:
            return []
        self._explained_at, generation = context.now, membership.generation
        reports = [workers.all[m].report for m in membership.members if m in workers.all]
        if any(r.resumed != generation for r in reports):
            return []
        ranks = [RankStepCost(r.worker, host_of(r.store), r.step_s, r.cost) for r in reports]
        found = self._explainer.update(generation, ranks, context.now, context.unix)
        return [found] if found is not None else []

    def last(self, version: int, context: JobContext) -> list[Event]:
        if version <= 0:
            return []
        return [JobProgress(context.unix, self.job, version, self.step_s, self._step_bytes)]

    def _resumed(self, workers: JobWorkers, context: JobContext) -> list[Event]:
        if self._resuming is None:
            return []
        members = [workers.all[m].report for m in self._resuming.members if m in workers.all]
        if not members or any(m.resumed < self._resuming.generation for m in members):
            return []  # all may have ended without a step, or, in a job that starts anew, without reporting any
        before = [self._counted.get(m.worker, (0, 0)) for m in members]
        again = max([0, *(m.repeated - b[0] for m, b in zip(members, before, strict=True))]) + self._lost
        gradients = max([0, *(m.recomputed - b[1] for m, b in zip(members, before, strict=True))])
        self._counted |= {m.worker: (m.repeated, m.recomputed) for m in members}
        self.repeated, self.recomputed = self.repeated + again, self.recomputed + gradients
        version = max((m.version for m in members), default=0)
        pause_s = max((m.pause_s for m in members), default=0.0)
        if self._lost and self._trained_at is not None:
            pause_s = max(pause_s, context.now - self._trained_at)  # no survivor is left to report it
        event = JobResumed(context.unix, self.job, self._resuming.generation, version, again, pause_s, gradients,
                           self._lost, _first_steps(self._resuming.members, context))
        self._resuming, self._lost = None, 0
        return [event]


def _first_steps(members: Iterable[str], context: JobContext) -> dict[str, float]:
    """Return the hosts that have made their first step since their boot -> seconds since its launch request."""
    views = {host: context.hosts.get(host) for host in (member.partition("/")[0] for member in members)}
    asked = {host: view.host.first_step_from for host, view in views.items() if view is not None}
    return {host: round(max(0.0, context.unix - at), 2) for host, at in asked.items() if at is not None}
