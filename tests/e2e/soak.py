"""Trouble of every kind at random moments, for minutes: `python -m tests.e2e.soak SEED MINUTES`.

A local fleet trains counting jobs, one after another. Bursts of one to four troubles hit each, from its start to its
end, some apart by milliseconds, some timed to hit a generation that forms. After each burst the job must train with all
its workers again within RECOVER_S; each count must be exact, and at the end the cloud's invoice our cost. The same seed
makes the same plan of troubles, though the moments differ with the machine. What went wrong is printed with all that is
needed to find out why, and kept on disk.
"""

from __future__ import annotations

import random
import sys
import time

from spotfleet.api import Fleet, Job
from spotfleet.protocol.messages import JobStatus
from tests.e2e.by_hand import house
from tests.support.e2e.e2e_stage import COUNTING, Stage, output, wait_for
from tests.support.e2e.troubles import Troubles
from tests.support.e2e.watch import ENDED, Failure, await_forming, dump, status_of, trains_again

STEPS = 2000  # number of a job's steps
JOB_S = 50.0  # then the job may hurry to its end
HEAVY = 1_000_000  # numbers that some jobs count with as well, so that trouble also hits transfers
END_LIMIT_S = 180.0
KINDS = {"notice": 4, "kill": 4, "kill_worker": 4, "kill_agent": 2, "kill_dispatcher": 2, "drain": 2, "stop_worker": 3,
         "two_hosts": 2, "all_hosts": 1, "withdraw": 2, "both_at_once": 2}


class Soak:
    """One fleet, one job, and the dice."""

    def __init__(self, stage: Stage, seed: int, minutes: float) -> None:
        self.stage, self.dice = stage, random.Random(seed)
        self.minutes = minutes
        self.target = self.dice.choice([3, 3, 4])
        self.began = time.monotonic()
        self.slowest_s = 0.0

    def run(self) -> None:
        self.fleet: Fleet = self.stage.fleet("soak", least=1, target=self.target, more="checkpoint: {interval: 2s}")
        self.troubles = Troubles(self.stage, self.fleet, self.dice, self.say)
        until = time.monotonic() + 60 * self.minutes
        while time.monotonic() < until:
            self.one_job(min(until, time.monotonic() + JOB_S))
        self.troubles.close()
        self.fleet.down()
        billed, ours = self.stage.cloud.invoice("soak").micros, self.fleet.cost().micros
        if billed != ours or self.stage.cloud.truth():
            raise Failure(f"the cloud bills {billed}, our cost is {ours}; left: {self.stage.cloud.truth()}")
        self.say(f"{billed} micros; slowest recovery {self.slowest_s:.1f} s; {dict(self.troubles.done)}")

    def one_job(self, until: float) -> None:
        """Trouble from its start, sometimes, to its end."""
        least, every = self.dice.randint(1, self.target - 1), self.dice.choice([1, 7, 1000])
        (self.stage.work / "hurry").unlink(missing_ok=True)
        weights = self.dice.choice([1, 1, HEAVY])
        (self.stage.work / "counting.py").write_text(script(weights))
        self.say(f"a job of {least} to {self.target} workers, {weights} weights, a commit each {every}")
        self.job: Job = self.stage.counting(self.fleet, STEPS, (least, self.target), every, wait=True)
        if self.dice.random() < 0.5:
            time.sleep(self.dice.uniform(0, 4))  # while it forms its first generation, or just before or after
            self.recovers(self.burst())
        self.recovers("the start")
        while time.monotonic() < until and self.status().version < STEPS - 300:
            self.recovers(self.burst())
        self.end()

    def burst(self) -> str:
        made = []
        for number in range(self.dice.choice([1, 1, 2, 2, 3, 4])):
            if number:
                self.pause()
            made.append(self.troubles.make(self.dice.choices(list(KINDS), list(KINDS.values()))[0]))
        return ", ".join(made)

    def pause(self) -> None:
        """Until the next trouble of a burst: at once, or while a generation forms, or while it trains."""
        kind, after_s = self.dice.choice(["at once", "forming", "forming", "later"]), self.dice.uniform(0, 0.05)
        if kind == "forming":
            await_forming(self.job)
        elif kind == "later":
            after_s = self.dice.uniform(0.05, 5)
        time.sleep(after_s)

    # ---- what must hold

    def status(self) -> JobStatus:
        return status_of(self.job)

    def recovers(self, after: str) -> None:
        took_s = trains_again(self.job, self.troubles, self.target, after)
        self.slowest_s = max(self.slowest_s, took_s)
        status = self.status()
        self.say(f"  trains at generation {status.generation}, step {status.version} ({took_s:.1f} s)")

    def end(self) -> None:
        """The last steps in a hurry, with more trouble in them, and the sum."""
        self.stage.hurry()
        near = STEPS - self.dice.randrange(300)
        wait_for(f"step {near}", lambda: (s := self.status()).version >= near or s.state in ENDED, END_LIMIT_S)
        self.say("near the end:")
        self.burst()
        wait_for("the job's end", lambda: self.status().state in ENDED, END_LIMIT_S)
        said = f"counted -{STEPS}.0 of -{STEPS}"
        if self.status().state != "succeeded" or said not in output(self.job):
            raise Failure(f"expected '{said}', got: {self.status()} {output(self.job)[-300:]!r}")
        self.say(f"{said}; {self.status().repeated} steps repeated")

    # ---- words

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.2f}  {text}", flush=True)


def script(weights: int) -> str:
    """COUNTING with 30 ms a step, and so many weights of which each must have counted alike."""
    text = COUNTING.replace("range(20)", "range(3)").replace("Linear(1, 1, bias", f"Linear(1, {weights}, bias")
    return text.replace("train(hvd.elastic", """
def same(found):
    assert found.min() == found.max(), found
    return found[0]

train(hvd.elastic""").replace("model.weight.item()", "same(model.weight).item()")


def soak(stage: Stage, seed: int, minutes: float) -> None:
    """Raises Failure, after all that is known about it has been printed."""
    run = Soak(stage, seed, minutes)
    try:
        run.run()
    except BaseException as error:
        run.say(f"FAILED: {error!r}")
        if hasattr(run, "job"):
            dump(run.stage, run.fleet, run.job)
        raise


def main(seed: int, minutes: float) -> None:
    print(f"seed {seed}, {minutes:g} min", flush=True)
    with house("soak") as stage:
        soak(stage, seed, minutes)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
