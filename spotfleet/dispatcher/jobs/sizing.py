"""Sizing of a job: its number of workers, from its growth schedule or its script's request, and the pace of change.

    worker of rank 0 --WorkerReport.wanted--> request, within min and max --Pace--> most members of the next generation

Until rank 0 has sent a request, the growth schedule's first entry counts. The last request is in the job's record, so
that a restarted dispatcher launches and drains no host only because it has no report yet.
"""

from __future__ import annotations

from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.fleet.domain.events import Event, JobResized
from spotfleet.fleet.planner.size import first_workers
from spotfleet.membership import Formed, Membership, Pace, Phase, Tuning
from spotfleet.model import JobSpec, ResizeSpec

UNLIMITED = -1
SETTLE_S = 10.0  # a join restarts all processes of such a job, so that joins wait until no other comes for this time
SAVE_S = 10.0  # for the host's last files to arrive, after the time that processes get to end


class Sizing:
    """Target size of one job."""

    def __init__(self, job: str, spec: JobSpec, asked: int, size: int) -> None:
        self.job, self.spec = job, spec
        self.asked = asked  # rank 0's last request; 0: none yet, NO_WISH: as many as possible
        self.size = size  # size of the newest formed generation
        self.least = spec.min_workers  # workers without which it does not begin; fewer for Ray while nothing waits
        self._may_be = self.target

    def membership(self, after: int = 0) -> Membership:
        """Create a membership for this job, whose generations have numbers above `after`."""
        resize = self.spec.resize
        pace = Pace(resize.max_join, resize.max_leave, resize.every_s)
        tuning = Tuning(pace=pace)
        if self.spec.restarts:
            lead_s = self.spec.grace_s + SAVE_S
            tuning = Tuning(pace=pace, join_settle_s=SETTLE_S, leave_lead_s=lead_s, short_lead_s=lead_s)
        return Membership(self.job, self.spec.min_workers, self.target, tuning, after)

    @property
    def _limit(self) -> int | None:
        """Largest requested number of workers; None: as many as there are."""
        return None if self.asked == UNLIMITED else self.asked or first_workers(self.spec.resize)

    @property
    def target(self) -> int:
        """Number of workers that should exist."""
        limit = self.spec.max_workers if self._limit is None else self._limit
        return max(self.spec.min_workers, min(self.spec.max_workers, limit))

    @property
    def places(self) -> int:
        """Number of slots that the job can use now, including those that it releases gradually."""
        return self._may_be + self.spec.spares

    def update(self, membership: Membership, workers: JobWorkers) -> None:
        """Read rank 0's request and set the membership's limit; called before the membership decides."""
        first = workers.all.get(membership.members[0]) if membership.members else None
        if first is not None and first.report.generation == membership.generation:
            if first.report.wanted > 0:
                self.asked = first.report.wanted
            elif first.report.resumed >= membership.generation:  # else its request may still come
                self.asked = UNLIMITED
        membership.max_workers = self.target
        if self.spec.gang and self.spec.kind == "command" and membership.members:
            membership.max_workers = len(membership.members)  # a command is not restarted for a host more
        self._may_be = max(self.target, self._paced(membership, self.target))

    def _paced(self, membership: Membership, wanted: int) -> int:
        return membership.pacer.limit(len(membership.members), membership.phase is Phase.RUNNING, wanted)

    def asked_of_fleet(self) -> int | None:
        return None if self._limit is None else self.target + self.spec.spares

    def held(self, membership: Membership, room: int) -> int:
        """Return the number of workers whose hosts must stay for now, if the fleet shrinks to `room` workers."""
        resize = self.spec.resize
        if not (resize.max_leave or resize.every_s) or not membership.members:
            return 0
        wanted = max(self.spec.min_workers, min(self.target, room))
        return self._paced(membership, wanted) if wanted < len(membership.members) else 0

    def formed(self, change: Formed, workers: JobWorkers, at: float) -> list[Event]:
        """Return the event of this generation, if the resize policy had an effect."""
        before, self.size = self.size, len(change.members)
        first = workers.all.get(change.members[0])
        done = first.report.resize if first is not None else ""
        if before in (0, self.size) or not (done or self.spec.resize != ResizeSpec()):
            return []
        return [JobResized(at, self.job, change.generation, before, self.size, self.spec.resize.policy, done)]

    @property
    def why(self) -> str:
        """The reason to use fewer workers than possible; empty if as many as possible are requested."""
        growth, most = self.spec.resize.growth, self.spec.max_workers
        if self._limit is None or self.target == most:
            return ""
        if self.asked in (0, *(workers for _, workers in growth)):
            later = [f"{workers} from epoch {epoch}" for epoch, workers in growth if workers > self.target]
            return "; ".join([f"growth: {self.target} of {most} workers", *later[:1]])
        return f"the script asks for {self.target} of {most} workers"
