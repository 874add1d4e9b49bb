"""Random trouble through one training job that must end as if nothing had been:
`python -m tests.e2e.chaos --events 200 --seed S`.

A local fleet of 3 to 5 hosts trains a model with dropout and batch norm (tests/support/train/chaos_train.py). Bursts
of one to
four events hit it, some apart by milliseconds, some while a generation forms: workers, hosts, agents and the dispatcher
are killed, processes stopped, hosts cut off, noticed, drained, taken back, the fleet is made larger and smaller. After
each burst the job must train with all its workers again. In the end each sample must have been seen exactly once in
each epoch; weights, optimizer state, batch-norm statistics and learning rate must be those that plain torch computes
undisturbed, bit for bit (tests/support/train/chaos_reference.py); the cloud must bill what our ledger says, and no
process may
be left. The seed makes the order of events, whatever the machine does; the moments and victims differ with it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from spotfleet.api import Fleet, Job
from spotfleet.errors import SpotfleetError
from tests.e2e.by_hand import house
from tests.support.e2e.e2e_stage import LIMIT_S, Stage, wait_for
from tests.support.e2e.troubles import Troubles
from tests.support.e2e.watch import ENDED, Failure, await_forming, dump, status_of, trains_again

TRAIN = Path(__file__).parents[1] / "support" / "train"
FILES = ("chaos_train.py", "chaos_net.py")

KINDS = {"kill_worker": 5, "kill": 4, "stop_worker": 3, "cut": 3, "notice": 4, "withdraw": 2, "resize": 4,
         "kill_dispatcher": 4, "kill_agent": 2, "kill_two_workers": 2, "two_hosts": 2, "both_at_once": 2, "drain": 2,
         "all_hosts": 1}
WHEN = {"at once": 1, "forming": 2, "later": 1}
LEAST, MOST = 3, 5  # hosts
NAP_S = 0.08  # length of a step, so that the job lasts
RECOVER_S = 90.0
END_LIMIT_S = 300.0
CHECKPOINTS = "checkpoint: {interval: 2s}"


@dataclass(frozen=True)
class Event:
    number: int
    kind: str
    when: str  # after the one before it in the same burst; "": the first one
    seed: str  # seed of its own random numbers, so that it draws the same whatever came before


def plan(seed: int, events: int, kinds: dict[str, int] = KINDS) -> list[list[Event]]:
    """Bursts of one to four events, each kind about as often as it weighs."""
    dice = random.Random(seed)
    order: list[str] = []
    while len(order) < events:
        hand = [kind for kind, weight in kinds.items() for _ in range(weight)]
        dice.shuffle(hand)
        order += hand
    bursts: list[list[Event]] = []
    room = 0
    for number, kind in enumerate(order[:events]):
        if not room:
            bursts.append([])
            room = dice.choice([1, 1, 2, 2, 3, 4])
        when = dice.choices(list(WHEN), list(WHEN.values()))[0] if bursts[-1] else ""
        bursts[-1].append(Event(number, kind, when, f"{seed}/{number}"))
        room -= 1
    return bursts


class Strokes(Troubles):
    """Troubles, and the fleet's own size."""

    target = LEAST

    def resize(self) -> str:
        self.target = self.dice.choice([n for n in range(LEAST, MOST + 1) if n != self.target])
        limit = time.monotonic() + RECOVER_S
        path = self.stage.fleet_file(self.fleet.name, 1, self.target, MOST, CHECKPOINTS)
        while True:
            try:
                Fleet(path).up(timeout_s=LIMIT_S)
                return f"a target of {self.target} hosts"
            except SpotfleetError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.2)  # the dispatcher has just been killed


class LocalWorld:
    """A fleet on the local cloud. What another world needs: tests/network/chaos_network.py."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.work = stage, stage.work

    def begin(self, say: Callable[[str], None]) -> None:
        """Returns when LEAST hosts are up."""
        self.fleet = self.stage.fleet("chaos", 1, LEAST, CHECKPOINTS, most=MOST)
        self.strokes = Strokes(self.stage, self.fleet, random.Random(0), say)

    def train(self, args: list[str]) -> Job:
        for name in FILES:
            shutil.copy(TRAIN / name, self.work)
        return self.fleet.train(FILES[0], args, np=(1, MOST), detach=True)

    def events(self) -> list[dict[str, Any]]:
        return self.fleet.events()

    def end(self) -> None:
        """Raises Failure unless the fleet goes down with a right bill."""
        self.fleet.down()
        billed, ours = self.stage.cloud.invoice("chaos").micros, self.fleet.cost().micros
        if billed != ours or self.stage.cloud.truth():
            raise Failure(f"the cloud bills {billed}, our cost is {ours}; left: {self.stage.cloud.truth()}")

    def dump(self, job: Job) -> None:
        dump(self.stage, self.fleet, job)


class Chaos:
    """One fleet, one job, and the plan."""

    def __init__(self, world: LocalWorld, bursts: list[list[Event]]) -> None:
        self.world, self.bursts = world, bursts
        self.notes, self.enough, self.hurry = (world.work / name for name in ("notes", "enough", "hurry"))
        self.began = time.monotonic()
        self.slowest_s = 0.0

    def run(self) -> None:
        self.notes.mkdir()
        self.world.begin(self.say)
        self.strokes = self.world.strokes
        self.job = self.world.train(["--notes", str(self.notes), "--stop", str(self.enough),
                                     "--hurry", str(self.hurry), "--nap", str(NAP_S)])
        self.recovers("the start")
        for burst in self.bursts:
            self.strike(burst)
        self.end()

    def strike(self, burst: list[Event]) -> None:
        for event in burst:
            dice = self.strokes.dice = random.Random(event.seed)
            after_s = dice.uniform(0, 0.05)
            if event.when == "forming":
                await_forming(self.job)
            elif event.when != "at once":
                after_s = dice.uniform(0, 2)
            time.sleep(after_s)
            self.strokes.make(event.kind)
        self.recovers(f"event {burst[-1].number + 1}")

    def recovers(self, after: str) -> None:
        took_s = trains_again(self.job, self.strokes, self.strokes.target, after, RECOVER_S)
        self.slowest_s = max(self.slowest_s, took_s)
        status = status_of(self.job)
        self.say(f"  {after}: {self.strokes.target} workers at generation {status.generation}, step {status.version}, "
                 f"{status.repeated} repeated ({took_s:.1f} s)")

    def end(self) -> None:
        self.enough.touch()
        self.hurry.touch()
        wait_for("the job's end", lambda: status_of(self.job).state in ENDED, END_LIMIT_S)
        status = status_of(self.job)
        if status.state != "succeeded":
            raise Failure(f"the job has {status.state}: {status.why}\n{status.error}")
        self.strokes.close()
        self.check_weights()
        self.summary()
        self.world.end()

    def check_weights(self) -> None:
        from tests.support.train import chaos_reference

        begun = time.monotonic()
        job = chaos_reference.check(self.notes)
        worlds = Counter(world for _, world in job.applied)
        self.say(f"{job.epochs} epochs, {job.steps} steps: each sample once an epoch, and the bits of plain torch "
                 f"(steps by workers: {dict(sorted(worlds.items()))}; replayed in {time.monotonic() - begun:.0f} s)")

    def summary(self) -> None:
        events = [e for e in self.world.events() if e.get("job") == self.job.id]
        causes = Counter(e["cause"] for e in events if e["kind"] == "GenerationFormed")
        pauses = [e["pause_s"] for e in events if e["kind"] == "JobResumed" and e["pause_s"] > 0] or [0.0]
        self.say(f"events: {dict(self.strokes.done)}; missed: {dict(self.strokes.missed)}")
        self.say(f"{status_of(self.job).generation} generations: {dict(causes)}; {status_of(self.job).repeated} steps "
                 f"repeated; pauses: median {statistics.median(pauses):.2f} s, longest {max(pauses):.2f} s; "
                 f"slowest until all trained again {self.slowest_s:.1f} s")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.2f}  {text}", flush=True)


def chaos(world: LocalWorld, bursts: list[list[Event]]) -> None:
    """Raises Failure or chaos_reference.Differs, after all that is known about it has been printed."""
    run = Chaos(world, bursts)
    try:
        run.run()
    except (AssertionError, SpotfleetError, psutil.Error, OSError) as error:
        run.say(f"FAILED: {error!r}")
        if hasattr(run, "job"):
            world.dump(run.job)
        raise


def asked() -> tuple[int, int]:
    """Seed and number of events from the command line."""
    parser = argparse.ArgumentParser(description="Random trouble through one training job.")
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.events} events", flush=True)
    return args.seed, args.events


def main() -> None:
    seed, events = asked()
    with house("chaos") as stage:
        chaos(LocalWorld(stage), plan(seed, events))


if __name__ == "__main__":
    main()
