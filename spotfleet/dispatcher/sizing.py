"""How large a job is to be, by its growth schedule or its script's wish, and how fast it may come to that.

    worker of rank 0 --WorkerReport.wanted--> wish, within min and max --Pace--> the most members of the next generation

Until rank 0 has said something the growth schedule's first entry counts. What it said last is kept in the job's
record, so that a restarted dispatcher neither launches nor drains a host for want of news.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spotfleet.dispatcher.membership import Formed, Membership, Pace, Phase, Tuning
from spotfleet.dispatcher.workers import Crew
from spotfleet.fleet.events import Event, JobResized
from spotfleet.fleet.size import first_workers, hosts_wanted
from spotfleet.model import JobSpec, Nodes, ResizeSpec

if TYPE_CHECKING:
    from spotfleet.dispatcher.jobs import Job


NO_WISH = -1


class Sizing:
    """Of one job."""

    def __init__(self, job: str, spec: JobSpec, asked: int, size: int) -> None:
        self.job, self.spec = job, spec
        self.asked = asked  # by rank 0, last; 0: it has not spoken, NO_WISH: it takes all it can get
        self.size = size  # of the newest generation that has formed
        self._may_be = self.wish

    def membership(self) -> Membership:
        """A new one for this job."""
        resize = self.spec.resize
        pace = Pace(resize.max_join, resize.max_leave, resize.every_s)
        return Membership(self.job, self.spec.min_workers, self.wish, Tuning(pace=pace))

    @property
    def _limit(self) -> int | None:
        """The most workers that are asked for; None: as many as there are."""
        return None if self.asked == NO_WISH else self.asked or first_workers(self.spec.resize)

    @property
    def wish(self) -> int:
        """Workers that there should be."""
        limit = self.spec.max_workers if self._limit is None else self._limit
        return max(self.spec.min_workers, min(self.spec.max_workers, limit))

    @property
    def places(self) -> int:
        """Slots that the job can use now, those included that it lets go of slowly."""
        return self._may_be + self.spec.spares

    def look(self, membership: Membership, crew: Crew) -> None:
        """Before the membership is asked what to do: hear rank 0, and say how many may train."""
        first = crew.all.get(membership.members[0]) if membership.members else None
        if first is not None and first.report.generation == membership.generation:
            if first.report.wanted > 0:
                self.asked = first.report.wanted
            elif first.report.resumed >= membership.generation:  # else it has not spoken yet
                self.asked = NO_WISH
        membership.max_workers = self.wish
        self._may_be = max(self.wish, self._paced(membership, self.wish))

    def _paced(self, membership: Membership, wanted: int) -> int:
        return membership.pacer.limit(len(membership.members), membership.phase is Phase.RUNNING, wanted)

    def asked_of_fleet(self) -> int | None:
        return None if self._limit is None else self.wish + self.spec.spares

    def held(self, membership: Membership, room: int) -> int:
        """Workers whose hosts have to stay for now where the fleet is to have `room` for so many only."""
        resize = self.spec.resize
        if not (resize.max_leave or resize.every_s) or not membership.members:
            return 0
        wanted = max(self.spec.min_workers, min(self.wish, room))
        return self._paced(membership, wanted) if wanted < len(membership.members) else 0

    def formed(self, change: Formed, crew: Crew, at: float) -> list[Event]:
        """The event of this generation, if the policy had something to do."""
        before, self.size = self.size, len(change.members)
        first = crew.all.get(change.members[0])
        done = first.report.resize if first is not None else ""
        if before in (0, self.size) or not (done or self.spec.resize != ResizeSpec()):
            return []
        return [JobResized(at, self.job, change.generation, before, self.size, self.spec.resize.policy, done)]

    @property
    def why(self) -> str:
        """Why fewer workers than could be are used; empty where that is not wished."""
        growth, most = self.spec.resize.growth, self.spec.max_workers
        if self._limit is None or self.wish == most:
            return ""
        if self.asked in (0, *(workers for _, workers in growth)):
            later = [f"{workers} from epoch {epoch}" for epoch, workers in growth if workers > self.wish]
            return "; ".join([f"growth: {self.wish} of {most} workers", *later[:1]])
        return f"the script asks for {self.wish} of {most} workers"


def target(nodes: Nodes, slots: int, jobs: Sequence[Job], idle: ResizeSpec) -> int:
    """How many hosts there should be, for `jobs` that have not ended. `idle`: of the job that is expected next, while
    there is none."""
    if not jobs:
        return hosts_wanted(nodes, slots, [first_workers(idle)])
    held = [j.sizing.held(j.membership, nodes.target * slots) for j in jobs]
    return hosts_wanted(nodes, slots, [j.sizing.asked_of_fleet() for j in jobs], held)
