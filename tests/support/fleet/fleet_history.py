"""Random histories of a whole fleet: in each, every job ends, nothing is left, the bill is the cloud's own.

`python -m tests.sim.many_histories fleet COUNT [FIRST]` runs them.
"""

from __future__ import annotations

import random

from spotfleet.fleet.reconcile import leftovers
from tests.support.fleet import planner_history
from tests.support.fleet.whole_fleet import WholeFleet
from tests.support.membership import membership_history
from tests.support.membership.membership_calm import calm

INSIDE = ("agent", "away", "break", "cut", "freeze", "heal", "kill", "late", "lossy", "pause", "restart", "stop")
OUTSIDE = ("take", "take", "take all", "withdraw", "hint", "power off", "return", "drain", "capacity", "refuse",
           "price", "kill", "lose", "lag", "repeat", "mute", "want", "clock")
END_S = 4000.0  # long enough for jobs one after the other, after the longest wait that the planner knows


class CloudSide:
    """State that the faults of `planner_history` read."""

    def __init__(self, fleet: WholeFleet) -> None:
        self.fleet, self.world = fleet, fleet.world

    @property
    def true(self) -> float:
        return self.world.clock()

    def tick(self, after_s: float) -> None:
        """Do nothing: the next tick comes by itself, and meets the lit fuse."""


def trouble(sim: WholeFleet, rng: random.Random) -> None:
    hosts, workers = sim.living(), sim.workers()
    if rng.random() < 0.5 and hosts and workers:
        membership_history.TROUBLES[rng.choice(INSIDE)](sim, rng, rng.choice(hosts), rng.choice(workers))
    else:
        planner_history.TROUBLES[rng.choice(OUTSIDE)](CloudSide(sim), rng, sorted(sim.world.living()))
        sim.wall = sim.now + sim.world.skew_s


def history(seed: int) -> WholeFleet:
    rng = random.Random(seed)
    sim = WholeFleet(seed, rng)
    sim.look_s = rng.choice([0.1, 0.3, 0.5])
    try:
        _happen(sim, rng)
    except AssertionError as wrong:
        ledger = "\n".join(f"{h.request_id} {h.state.value} {h.why}" for h in sim.world.state.hosts)
        raise AssertionError(f"seed {seed}: {wrong}\n{sim.story()}\n{ledger}") from wrong
    return sim


def _happen(sim: WholeFleet, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 2, 3])):
        least = rng.randint(1, 3)
        sim.submit(least, rng.randint(least, 5), rng.choice([30, 100, 250]))
    sim.run(rng.choice([0.0, 5.0, 30.0]))
    for _ in range(rng.randint(1, 12)):
        trouble(sim, rng)
        sim.run(rng.choice([0.1, 0.5, 1.0, 3.0, 10.0, 40.0]))
    end_the_trouble(sim)
    assert sim.run_until(lambda: all(j.ended for j in sim.jobs.values()), END_S), "a job has not ended"
    sim.check_bill()
    sim.world.hosts = 0
    sim.run_until(lambda: not leftovers(sim.world.cloud, "f"), 600.0)
    sim.run(5.0)
    assert leftovers(sim.world.cloud, "f") == [], "machines are left"
    sim.check_bill()


def end_the_trouble(sim: WholeFleet) -> None:
    calm(sim)
    planner_history.calm(CloudSide(sim))
    sim.world.fuse.left = None
    sim.world.asked_to_drain.clear()
    sim.world.hosts = 4
