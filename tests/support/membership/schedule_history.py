"""Random histories of jobs with priorities that share a fleet, by the schedule alone: trouble, then calm.

`python -m tests.sim.many_histories schedule COUNT` runs many; a failure prints its seed and the command that repeats
it. At every moment: no host is held twice, no job starts below its min, and a job loses hosts only for one of a higher
priority, which has lacked hosts for long enough, with a reason that names it. In the calm every job that fits comes to
its turn, also behind an endless stream of small jobs of its priority.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from spotfleet.membership.schedule import Allocation, HostRoom, JobNeed, allocate, by_priority

TAKES, OVERDUE = 2, 12  # steps for which a job lacks hosts
TROUBLE = 30  # steps


@dataclass
class _Job:
    need: JobNeed
    work: int  # steps with its min until it ends
    lacks: int = 0
    ran: bool = False


@dataclass
class _Fleet:
    rng: random.Random
    rooms: list[HostRoom] = field(default_factory=list)
    jobs: list[_Job] = field(default_factory=list)
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    names: int = 0
    preempted: int = 0

    def number(self) -> int:
        self.names += 1
        return self.names

    def submit(self, least: int, most: int, priority: int, work: int, kind: str) -> _Job:
        number = self.number()
        job = _Job(JobNeed(f"j{number}", least, most, number, self.rng.random() < 0.3 or kind == "ray",
                           yields=kind in ("restart", "ray"), shrinks=kind in ("elastic", "ray")), work)
        self.priorities[job.need.job] = priority
        self.jobs.append(job)
        return job

    def step(self) -> None:
        needs = [replace(j.need, takes=j.lacks >= TAKES, overdue=j.lacks >= OVERDUE) for j in self.jobs]
        needs = by_priority(needs, self.priorities)
        before, now = self.held, allocate(needs, self.rooms, self.held)
        self.check({n.job: n for n in needs}, before, now)
        self.held = now.held
        for job in self.jobs:
            job.lacks = job.lacks + 1 if job.need.job in now.lacking else 0
            job.ran = job.ran or job.lacks == 0
            job.work -= job.lacks == 0
        self.jobs = [j for j in self.jobs if j.work > 0]

    def room(self, names: tuple[str, ...], need: JobNeed) -> int:
        rooms = [r for r in self.rooms if r.host in names and r.ready and not r.leaving]
        return len(rooms) if need.per_host else sum(r.slots for r in rooms)

    def check(self, needs: dict[str, JobNeed], before: dict[str, tuple[str, ...]], now: Allocation) -> None:
        given = [host for names in now.held.values() for host in names]
        assert len(given) == len(set(given)), f"held twice: {now.held}"
        assert set(now.why) == set(needs) and all(now.why.values())
        for job, need in needs.items():
            old, new = before.get(job), now.held.get(job, ())
            if old is None:
                assert not new or self.room(new, need) >= need.min_workers, f"{job} starts below its min"
                continue
            reason = now.preempted.get(job) or now.shrunk.get(job, "")
            if reason:
                taker = needs[reason.partition(",")[0]]
                assert taker.priority > need.priority and taker.takes and taker.job not in now.lacking, reason
                assert f"priority {taker.priority} over {need.priority}" in reason
            assert job not in now.preempted or need.yields, f"{job} cannot start again"
            assert job not in now.shrunk or (need.shrinks and job not in now.lacking), f"{job} is below its min"
            lost = [h for h in old if h not in new and self.room((h,), need)]
            spare = self.room(tuple(h for h in old if h not in lost), need) >= need.max_workers
            assert reason or spare or not lost, f"{job} loses {lost} without a reason"
            assert job in now.held or job in now.preempted, f"{job} has left without a reason"
        self.preempted += len(now.preempted) + len(now.shrunk)


def history(seed: int) -> int:
    """Play one history; return how often a job had to give hosts up."""
    rng = random.Random(seed)
    fleet = _Fleet(rng)
    for _ in range(rng.randint(1, 4)):
        fleet.rooms.append(HostRoom(f"h{fleet.number()}", rng.choice([1, 1, 2, 4])))
    for _ in range(TROUBLE):
        _trouble(fleet)
        fleet.step()
    fleet.rooms = [replace(r, ready=True, leaving=False) for r in fleet.rooms]
    total = {True: len(fleet.rooms), False: sum(r.slots for r in fleet.rooms)}  # for jobs that take whole hosts
    fleet.jobs = [j for j in fleet.jobs if j.need.min_workers <= total[j.need.per_host]]
    fleet.submit(rng.randint(1, total[True]), total[True], rng.choice([0, 0, 1, 5]), 3, "restart")
    left = [j for j in fleet.jobs if not j.ran]
    for _ in range(sum(j.work for j in fleet.jobs) + 5 * OVERDUE):
        while len(fleet.jobs) < len(left) + total[False] + 1:  # a stream of small jobs that never ends
            least = min(fleet.priorities[j.need.job] for j in left) if left else 0
            fleet.submit(1, 1, least, rng.randint(1, 4), rng.choice(["elastic", "restart", "other"]))
        fleet.step()
        left = [j for j in left if not j.ran]
        if not left:
            break
    assert not left, f"{[j.need.job for j in left]} never had their turn"
    return fleet.preempted


def _trouble(fleet: _Fleet) -> None:
    rng = fleet.rng
    what = rng.random()
    if what < 0.45 and len(fleet.jobs) < 8:
        least = rng.randint(1, 3)
        fleet.submit(least, least + rng.choice([0, 0, 2, 6]), rng.choice([0, 0, 1, 5]), rng.randint(1, 25),
                     rng.choice(["elastic", "elastic", "restart", "restart", "ray", "other"]))
    elif what < 0.52 and len(fleet.rooms) < 8:
        fleet.rooms.append(HostRoom(f"h{fleet.number()}", rng.choice([1, 2]), ready=False))
    elif what < 0.57 and len(fleet.rooms) > 1:
        fleet.rooms.remove(rng.choice(fleet.rooms))
    elif what < 0.72 and fleet.rooms:
        place = rng.randrange(len(fleet.rooms))
        changed = rng.choice([{"ready": True}, {"ready": False}, {"leaving": True}, {"leaving": False}])
        fleet.rooms[place] = replace(fleet.rooms[place], **changed)
    elif what < 0.75 and fleet.jobs:
        fleet.jobs.remove(rng.choice(fleet.jobs))  # cancelled
