"""`up` and `down` killed, interrupted, and given twice at once: nothing stays, the results come home once and whole.

Every point of each flow: tests/sweep. Here are real processes, signals and locks, and an output to be brought home.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from spotfleet.api import Fleet
from tests.support.attack.live import eventually
from tests.support.attack.tally import ONCE, Tally, strokes
from tests.support.e2e.e2e_stage import CLI, Stage, output
from tests.support.e2e.troubles import dispatches

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3600)]
OUTPUT_BYTES = 5_000_000
COMMAND_S = 240.0  # time limit for a command on a busy machine
WRITING = f"""
import os
with open(os.path.join(os.environ["SPOTFLEET_OUTPUT"], "result.bin"), "wb") as out:
    out.write(bytes(range(250)) * {OUTPUT_BYTES // 250})
print("written", flush=True)
"""
MANY = """
import os, sys
for number in range(int(sys.argv[1])):
    with open(os.path.join(os.environ["SPOTFLEET_OUTPUT"], f"{number}.bin"), "wb") as out:
        out.write(bytes([number % 256]) * 1_000_000)
print("written", flush=True)
"""
REFUSALS = ("another spotfleet command", "was asked by process", "is going down", "is down")  # in one of two commands


@contextmanager
def started(stage: Stage, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command; it has ended afterwards."""
    process = subprocess.Popen([CLI, *words], cwd=stage.work, stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Commands:
    """The life of one fleet."""

    def __init__(self, stage: Stage, name: str, dice: random.Random, tally: Tally) -> None:
        self.stage, self.name, self.dice, self.tally = stage, name, dice, tally
        stage.fleet_file(name, 1, 2, 2)

    def broken_off(self, latest_s: float, signals: Sequence[signal.Signals], *words: str) -> None:
        with started(self.stage, *words) as process:
            time.sleep(self.dice.uniform(0.2, latest_s))
            number = self.dice.choice(signals)
            with suppress(ProcessLookupError):
                process.send_signal(number)
            said, _ = process.communicate(timeout=COMMAND_S)
            self.tally.check("a broken-off command leaves no traceback", "Traceback" not in said, said[-500:])

    def twice(self, *words: str) -> None:
        with started(self.stage, *words) as one, started(self.stage, *words) as other:
            for process in (one, other):
                said, _ = process.communicate(timeout=COMMAND_S)
                fine = process.returncode == 0 or any(refusal in said for refusal in REFUSALS)
                self.tally.check(f"{words[0]} twice at once: each ends well or says why not", fine,
                                 f"status {process.returncode}: {said[-500:]}")

    def done(self, *words: str) -> None:
        with started(self.stage, *words) as process:
            said, _ = process.communicate(timeout=COMMAND_S)
            self.tally.check(f"`{words[0]}` in peace succeeds", process.returncode == 0, said[-1000:])

    def live(self) -> None:
        up, down = ("up", f"{self.name}.yaml", "-y"), ("down", self.name, "-y")
        ends = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
        for _ in range(self.dice.randint(1, 2)):
            self.broken_off(4.0, ends, *up)
        self.twice(*up)
        self.done(*up)
        machines = [m.request_id for m in self.stage.cloud.truth() if dispatches(m)]
        self.tally.check("the fleet has one dispatcher", len(machines) == 1, machines)
        self.done("train", "writing.py", "--np", "1", "-c", self.name)
        for _ in range(self.dice.randint(1, 2)):
            self.broken_off(3.0, ends, *down)
        self.twice(*down)
        self.done(*down)
        self.check_end()

    def check_end(self) -> None:
        tally, home = self.tally, self.stage.home
        left = [m.request_id for m in self.stage.cloud.truth()]
        tally.check("nothing is left", not left, left)
        results = sorted((home / "fleets" / self.name).rglob("result.bin"))
        whole = [path.stat().st_size for path in results] == [OUTPUT_BYTES]
        tally.check("the output is home once and whole", whole, [(p, p.stat().st_size) for p in results])
        billed, ours = self.stage.cloud.invoice(self.name).micros, Fleet(self.name).cost().micros
        tally.check("the bill is the invoice", billed == ours, f"billed {billed}, our cost {ours}")
        tally.none("nothing half written stays", half_written(home / "fleets"))


def half_written(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if ".part" in path.name or path.name.startswith(".spotfleet-")]


def test_commands_killed_interrupted_or_doubled_leave_nothing_and_lose_nothing(stage: Stage, attack, seed: int):
    with attack("K9 `up` and `down` killed, interrupted, and twice at once") as tally:
        (stage.work / "writing.py").write_text(WRITING)
        dice = random.Random(seed)
        for number in range(strokes(1, 4)):
            Commands(stage, f"life-{number}", dice, tally).live()


@ONCE
def test_a_down_right_after_many_outputs_brings_all_of_them_home(stage: Stage, attack):
    with attack("K14 `down` right after a job has written many files") as tally:
        (stage.work / "many.py").write_text(MANY)
        files, fleet = strokes(40, 600), stage.fleet("many", 1, 1)
        job = fleet.train("many.py", [str(files)], np=(1, 1), detach=True)
        eventually("the job's last line", lambda: "written" in output(job))
        stage.cli("down", "many", "-y")
        home = {path.name: path for path in (stage.home / "fleets" / "many").rglob("*.bin")}
        tally.none("a file comes home whole", [
            number for number in range(files) if f"{number}.bin" not in home
            or home[f"{number}.bin"].read_bytes() != bytes([number % 256]) * 1_000_000], files)
        left = [m.request_id for m in stage.cloud.truth()]
        tally.check("nothing is left", not left, left)
