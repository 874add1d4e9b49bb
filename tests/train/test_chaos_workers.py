"""Random trouble for the workers of one job, which must end as plain torch does undisturbed; see tests/e2e/chaos.py."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

import pytest

from tests.support.train import chaos_reference
from tests.support.train.train_scripts import chaos_script

pytestmark = pytest.mark.processes
LONG = bool(os.environ.get("SPOTFLEET_LONG"))
EVENTS, RUNS = (60, 10) if LONG else (8, 2)
KINDS = ("kill", "kill", "two at once", "stop", "drain", "resize", "forming")
MOST = 5


class Trouble:
    def __init__(self, fleet, dice: random.Random) -> None:
        self.fleet, self.dice = fleet, dice
        self.timers: list[threading.Timer] = []

    def members(self) -> list[str]:
        with self.fleet.cv:
            return [m for m in self.fleet.members if self.fleet.workers[m].alive and not self.fleet.workers[m].leaving]

    def strike(self, kind: str) -> None:
        fleet, members = self.fleet, self.members()
        if kind == "forming":  # somebody dies, and somebody else once the next generation is ordered
            generation = fleet.generation
            self.kill(1)
            fleet.wait(lambda: fleet.generation > generation or fleet._settled(), what="the next generation")
            time.sleep(self.dice.uniform(0, 0.05))
            self.kill(1)
        elif kind == "resize":
            fleet.target = self.dice.randint(3, MOST)
        elif kind == "drain" and len(members) > 1:
            fleet.drain(self.dice.choice(members))
        elif kind == "stop" and members:
            pid = fleet.workers[self.dice.choice(members)].pid
            send(pid, signal.SIGSTOP)
            self.timers.append(threading.Timer(self.dice.uniform(0.05, 0.3), send, (pid, signal.SIGCONT)))
            self.timers[-1].start()
        else:
            self.kill(2 if kind == "two at once" else 1)
        while sum(w.alive and not w.leaving for w in fleet.workers.values()) < fleet.target + 1:
            fleet.start()

    def calm(self) -> None:
        """All members train; returns then."""
        fleet = self.fleet
        fleet.wait(lambda: fleet._settled() or all(
            fleet.report(m).resumed == fleet.generation and fleet.workers[m].alive for m in fleet.members),
            what="all train")

    def kill(self, number: int) -> None:
        """Never the last one that holds the state."""
        members = self.members()
        if not members:  # the one that is left is leaving
            return
        spared = self.dice.choice([m for m in members if self.fleet.report(m).version > 0] or members)
        for name in self.dice.sample([m for m in members if m != spared], min(number, len(members) - 1)):
            send(self.fleet.workers[name].pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended just now
        os.kill(pid, number)


@pytest.mark.parametrize("run", range(RUNS))
def test_random_trouble_changes_no_bit_and_each_sample_counts_once(fleets, tmp_path, run):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    notes, stop = tmp_path / "notes", tmp_path / "stop"
    notes.mkdir()
    fleet = fleets(chaos_script(notes, stop))
    fleet.start_all()
    fleet.wait_version(5)
    trouble = Trouble(fleet, dice)
    for kind in [dice.choice(KINDS) for _ in range(EVENTS)]:
        print(f"generation {fleet.generation}: {kind}")
        trouble.strike(kind)
        if dice.random() < 0.6:
            trouble.calm()
        time.sleep(dice.uniform(0, 0.1))
    for timer in trouble.timers:
        timer.join()
    stop.touch()
    fleet.wait_end()
    job = chaos_reference.check(notes)
    print(f"{job.steps} steps in {job.epochs} epochs and {len({g for g, _ in job.applied})} generations")
