"""SIGKILLs of the dispatcher's process during one training run: `python -m tests.e2e.dispatcher_kills --kills 50`.

A job trains on two hosts. The dispatcher is killed at random moments: while it idles, works or writes down a
checkpoint, while its last death is only being repaired, and while a generation forms because a worker or a whole host
was killed just before. What must hold: a kill of the dispatcher alone touches no worker process, begins no generation
and repeats no step; the death of a worker repeats at most the step in flight; at the end every step has been done once
(the counting job counts them; the digits' weights are those of a replay in plain torch.distributed, bit for bit), and
the cloud bills what our ledger says. The seed is printed; the same one makes the same plan, though the moments differ
with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from spotfleet.api import Fleet, Job
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import JobStatus
from spotfleet.providers.local import LocalMachine
from tests.e2e.by_hand import house
from tests.support.e2e.e2e_stage import COUNTING, Stage, output, wait_for
from tests.support.e2e.troubles import workers_of

EXAMPLES = Path(__file__).parents[2] / "examples"
WORKERS = 2
RECOVER_S = 90.0
STEPS_PER_KILL = 150  # the job must not end before the last kill
MIN_STEPS = 300
BATCHES = 29  # number in an epoch of the digits
ENDED = ("succeeded", "failed", "cancelled")


class Failure(AssertionError):
    pass


class Run:
    """One fleet, one job, and the dice."""

    def __init__(self, stage: Stage, seed: int, kills: int, digits: bool) -> None:
        self.stage, self.dice, self.kills, self.digits = stage, random.Random(seed), kills, digits
        self.began = time.monotonic()
        self.done: Counter[str] = Counter()
        self.deaths = 0  # number of workers that died
        self.slowest_s = 0.0
        self.dispatcher_pids: set[int] = set()

    def run(self) -> None:
        self.fleet: Fleet = self.stage.fleet("kills", least=1, target=WORKERS, more="checkpoint: {interval: 2s}")
        self.job = self.start()
        self.whole("the start")
        plan = self.plan()
        for number, kind in enumerate(plan):
            self.say(f"{number + 1}/{len(plan)} {kind}")
            {"alone": self.alone, "restarting": self.restarting, "forming": self.forming}[kind]()
            self.done[kind] += 1
        self.end()

    def plan(self) -> list[str]:
        """Each kind of moment at least once; most kills hit the dispatcher alone."""
        kinds = ["alone", "restarting", "forming"]
        more = self.dice.choices(kinds, [5, 3, 2], k=max(0, self.kills - len(kinds)))
        plan = (kinds + more)[:self.kills]
        self.dice.shuffle(plan)
        return plan

    def start(self) -> Job:
        steps = MIN_STEPS + STEPS_PER_KILL * self.kills
        if not self.digits:
            self.steps = steps // 50 * 50
            return self.stage.counting(self.fleet, self.steps, (1, WORKERS))
        self.steps = steps // BATCHES * BATCHES
        args = ["--epochs", str(self.steps // BATCHES), "--hurry", str(self.stage.work / "hurry")]
        return self.fleet.train("digits.py", args, np=(1, WORKERS), detach=True)

    # ---- kills

    def alone(self) -> None:
        """Nothing else happens: nobody else may notice."""
        before, processes = self.whole("the last trouble"), self.processes()
        time.sleep(self.dice.uniform(0, 2))
        self.kill_dispatcher()
        after = self.whole("a kill of the dispatcher alone")
        if (after.generation, after.repeated, self.processes()) != (before.generation, before.repeated, processes):
            raise Failure(f"workers felt a kill of the dispatcher: {before} {processes}\n{after} {self.processes()}")

    def restarting(self) -> None:
        """Killed again before it has settled."""
        time.sleep(self.dice.uniform(0, 1))
        self.kill_dispatcher()
        self.dispatcher()
        time.sleep(self.dice.uniform(0, 1.5))
        self.kill_dispatcher()

    def forming(self) -> None:
        """Killed while the loss of a worker is being repaired."""
        self.whole("the last trouble")
        machine = self.dice.choice(self.hosts())
        if self.dice.random() < 0.5:
            self.say(f"  with worker on {machine.request_id}")
            for process in workers_of(machine):
                process.kill()
        else:
            self.say(f"  with host {machine.request_id}")
            self.stage.cloud.interrupt(machine.request_id, None)
        self.deaths += 1
        time.sleep(self.dice.choice([0.0, self.dice.uniform(0, 0.3), self.dice.uniform(0.3, 3)]))
        self.kill_dispatcher()

    def kill_dispatcher(self) -> None:
        pid = self.dispatcher()
        self.dispatcher_pids.add(pid)
        os.kill(pid, signal.SIGKILL)

    # ---- what is there

    def dispatcher(self) -> int:
        """The process that runs now, once there is another than those that were killed."""
        end = time.monotonic() + RECOVER_S
        while True:
            machine = next(m for m in self.stage.cloud.truth() if "-d-" in m.request_id)
            if machine.processes and machine.processes[0] not in self.dispatcher_pids:
                return machine.processes[0]
            if time.monotonic() > end:
                raise Failure("the dispatcher's process does not come back")
            time.sleep(0.02)

    def hosts(self) -> list[LocalMachine]:
        return sorted((m for m in self.stage.cloud.truth() if m.processes and "-d-" not in m.request_id),
                      key=lambda m: m.request_id)

    def processes(self) -> set[int]:
        """The training processes."""
        return {p.pid for m in self.hosts() for p in workers_of(m)}

    def status(self) -> JobStatus:
        """The job, by a dispatcher that may only just be coming back."""
        end = time.monotonic() + RECOVER_S
        while True:
            try:
                return self.job.status()
            except SpotfleetError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def whole(self, after: str) -> JobStatus:
        """Once all workers train: some steps in one generation, known to a dispatcher that has settled."""
        began, first = time.monotonic(), None
        while True:
            status = self.status()
            if status.state in ENDED:
                raise Failure(f"the job has {status.state} after {after}: {status.why}\n{status.error}")
            ranked = [w for w in status.workers if w.rank >= 0]
            trains = status.state == "running" and len(ranked) == WORKERS and min(w.version for w in ranked) > 0
            if not trains or first is None or first.generation != status.generation:
                first = status if trains else None
            elif status.version >= first.version + 3:
                break
            if time.monotonic() - began > RECOVER_S:
                raise Failure(f"does not train with {WORKERS} workers {RECOVER_S:.0f} s after {after}: {status}")
            time.sleep(0.1)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return status

    # ---- the end

    def end(self) -> None:
        last = self.whole("the last kill")
        if last.version > self.steps - 50:
            raise Failure(f"the job was too short for this machine: step {last.version} of {self.steps}")
        self.stage.hurry()
        wait_for("the job's end", lambda: self.status().state in ENDED, 300)
        status = self.status()
        if status.state != "succeeded":
            raise Failure(f"the job has {status.state}: {status.why}\n{status.error}")
        if status.repeated > self.deaths:
            raise Failure(f"{status.repeated} steps were repeated for {self.deaths} deaths of workers")
        (self.check_digits if self.digits else self.check_count)()
        self.fleet.down()
        billed, ours = self.stage.cloud.invoice("kills").micros, self.fleet.cost().micros
        if billed != ours or self.stage.cloud.truth():
            raise Failure(f"the cloud bills {billed}, our cost is {ours}; left: {self.stage.cloud.truth()}")
        self.say(f"{len(self.dispatcher_pids)} SIGKILLs of the dispatcher ({dict(self.done)}), {self.deaths} deaths of "
                 f"workers: {self.steps} steps, {status.repeated} repeated; billed {billed} micros as expected; "
                 f"slowest until all trained again {self.slowest_s:.1f} s")

    def check_count(self) -> None:
        said = f"counted -{self.steps}.0 of -{self.steps}"
        if said not in output(self.job):
            raise Failure(f"expected '{said}', got {output(self.job)[-300:]!r}")
        self.say(said)

    def check_digits(self) -> None:
        """Against a replay without spotfleet."""
        found = list((Path(self.stage.home) / "fleets").glob("*/archive/jobs/*/outputs/*/metrics.json"))
        if not found:  # it is still with the dispatcher
            found = list(Path(self.stage.home).glob("local/hosts/*/jobs/*/outputs/*/metrics.json"))
        metrics = json.loads(found[0].read_text())
        replay = subprocess.run([sys.executable, str(EXAMPLES / "reference_digits.py"), str(found[0])], text=True,
                                capture_output=True, timeout=600, check=True)
        expected = json.loads(replay.stdout)
        if metrics["steps"] != self.steps or metrics["sha256"] != expected["sha256"]:
            raise Failure(f"weights {metrics['sha256']}, the replay's are {expected['sha256']}")
        self.say(f"weights {metrics['sha256'][:12]} after {metrics['steps']} steps, as in the replay; worlds "
                 f"{metrics['worlds']}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.2f}  {text}", flush=True)


def digits_script() -> str:
    """examples/digits.py, slow until a file exists."""
    text = (EXAMPLES / "digits.py").read_text()
    assert "time.sleep(args.step_delay)" in text
    text = text.replace("time.sleep(args.step_delay)", "linger()")
    option = 'parser.add_argument("--hurry", default="")\n    return parser.parse_args()'
    text = text.replace("return parser.parse_args()", option)
    return text.replace("args = parse()\n", '''args = parse()


def linger():
    for _ in range(10):
        if not os.path.exists(args.hurry):
            time.sleep(0.01)

''', 1)


def prepare(work: Path) -> None:
    (work / "counting.py").write_text(COUNTING)
    (work / "digits.py").write_text(digits_script())
    shutil.copy(EXAMPLES / "digits_net.py", work)


def kill_dispatchers(stage: Stage, seed: int, kills: int, digits: bool) -> None:
    """Raises Failure, after the state of things has been printed."""
    prepare(stage.work)
    run = Run(stage, seed, kills, digits)
    try:
        run.run()
    except (AssertionError, SpotfleetError, psutil.Error, OSError, subprocess.SubprocessError) as error:
        run.say(f"FAILED: {error!r}")
        if hasattr(run, "job"):
            for event in run.fleet.events()[-60:]:
                print({k: v for k, v in event.items() if k not in ("ledger", "seq", "offer")})
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--job", choices=("digits", "counting"), default="digits")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.kills} kills, {args.job}", flush=True)
    with house("kills") as stage:
        kill_dispatchers(stage, args.seed, args.kills, args.job == "digits")


if __name__ == "__main__":
    main()
