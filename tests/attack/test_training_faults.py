"""Faults of every kind in one training run: its end is that of plain torch, bit for bit.

Each test has a fleet of its own, as it ends with the fleet's bill. Only real processes die, stop and hang for real.
"""

from __future__ import annotations

import pytest

from spotfleet.api import Job
from spotfleet.providers.local import LocalCloud
from tests.e2e.by_hand import left
from tests.e2e.chaos import KINDS, Event, LocalWorld, chaos, plan
from tests.e2e.dispatcher_kills import kill_dispatchers
from tests.support.attack.port_noise import PortNoise
from tests.support.attack.tally import LONG, Tally, strokes
from tests.support.e2e.e2e_stage import Stage

pytestmark = [pytest.mark.processes, pytest.mark.timeout(7200)]
SOON = {"kill_worker": 3, "kill": 2, "kill_dispatcher": 2, "kill_two_workers": 2, "both_at_once": 2, "resize": 2,
        "drain": 1, "kill_agent": 1}  # nothing that takes its time
DEATHS = {"kill_worker": 4, "kill_two_workers": 1}


def check_run(tally: Tally, world: LocalWorld, bursts: list[list[Event]]) -> None:
    """Run the plan. It raises at the first promise that breaks: recovery, samples, weights, the bill."""
    chaos(world, bursts)
    tally.none("all workers train again after a burst of faults", (), len(bursts))
    tally.none("each sample counts once in each epoch; weights, Adam and statistics are plain torch's", (), 2)
    tally.none("the bill is the invoice and no machine is left", (), 2)
    tally.note(f"faults: {dict(world.strokes.done)}, without a victim: {dict(world.strokes.missed)}")
    LocalCloud(world.stage.home).shutdown()
    tally.none("no process is left", left(world.stage.home))


def test_random_faults_change_no_bit_and_leave_no_process(stage: Stage, attack, seed: int):
    with attack("K2 random faults in one training run") as tally:
        check_run(tally, LocalWorld(stage), plan(seed, strokes(4, 70), KINDS if LONG else SOON))


class NoisyWorld(LocalWorld):
    """Besides, random bytes arrive at the workers' ports."""

    seed = 0

    def train(self, args: list[str]) -> Job:
        job = super().train(args)
        self.noise = PortNoise(lambda: [process for _, process in self.strokes.workers()], self.seed)
        self.noise.start()
        return job

    def end(self) -> None:
        self.noise.stop()
        super().end()


def test_random_bytes_at_the_workers_ports_change_no_bit_while_workers_die(stage: Stage, attack, seed: int):
    with attack("K13 random bytes at the workers' ports while workers are killed") as tally:
        world = NoisyWorld(stage)
        world.seed = seed
        try:
            check_run(tally, world, plan(seed, strokes(3, 15), DEATHS))
        finally:
            if hasattr(world, "noise"):
                world.noise.stop()
        tally.check("the bytes arrived", world.noise.connections > 10, world.noise.connections)
        tally.note(f"{world.noise.connections} connections")


def test_kills_of_the_dispatcher_cost_no_step_and_no_worker(stage: Stage, attack, seed: int):
    with attack("K1 kill -9 of the dispatcher while one job trains") as tally:
        kills = strokes(3, 17)
        kill_dispatchers(stage, seed, kills, digits=LONG)
        tally.none("a kill of the dispatcher touches no worker, generation or step", (), kills)
        tally.none("each step is made once; the bill is the invoice", (), 2)
