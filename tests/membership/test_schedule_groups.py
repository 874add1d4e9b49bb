"""Groups of hosts in the schedule, in any situation of jobs and hosts."""

from __future__ import annotations

import random

import pytest

from spotfleet.membership.schedule import HostRoom, JobNeed, allocate


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_groups_of_hosts_are_like_fleets_of_their_own(first: int):
    """Any jobs and hosts: each group's allocation is the one that there would be without the others."""
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        groups = ("cpu", "gpu")
        rooms = [HostRoom(f"h{n}", rng.choice([1, 1, 2, 4]), rng.random() < 0.1, rng.random() < 0.7, rng.choice(groups))
                 for n in range(rng.randint(1, 8))]
        jobs, held = [], {}
        for n in range(rng.randint(1, 6)):
            least, group = rng.randint(1, 3), rng.choice(groups)
            jobs.append(JobNeed(f"j{n}", least, least + rng.choice([0, 2]), n, rng.random() < 0.2,
                                rng.choice([0, 0, 5]), rng.random() < 0.7, rng.random() < 0.3, rng.random() < 0.4,
                                rng.random() < 0.4, group))
            if rng.random() < 0.6:
                held[f"j{n}"] = tuple(r.host for r in rooms if r.group == group and rng.random() < 0.4)
        whole = allocate(jobs, rooms, held)
        for group in groups:
            own = [job for job in jobs if job.group == group]
            alone = allocate(own, [r for r in rooms if r.group == group],
                             {job.job: held[job.job] for job in own if job.job in held})
            names = {job.job for job in own}
            assert {job: hosts for job, hosts in whole.held.items() if job in names} == alone.held, seed
            assert {job: why for job, why in whole.why.items() if job in names} == alone.why, seed
            assert whole.lacking & names == alone.lacking and whole.preempted.keys() & names == alone.preempted.keys()
