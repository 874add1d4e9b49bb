"""Seconds from SIGKILL of one of three workers to the next step: spotfleet and torchrun, side by side in one run.

    python bench/recovery.py [--kills 3]

Both train `bench/steps.py` on this machine, over gloo. torchrun is `torch.distributed.run` on one node with the c10d
rendezvous and a monitor interval of 0.1 s (its default is 0.1 s): it restarts all workers, which load a checkpoint
that rank 0 wrote in the step before. Under spotfleet the two survivors go on, and a third joins when it is warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from spotfleet.api import Fleet
from spotfleet.model import FleetSpec, Need, Nodes
from spotfleet.providers.local import LocalCloud

HERE = Path(__file__).parent
STEPS = HERE / "steps.py"
WORLD = 3
LIMIT_S = 120.0


class Step(NamedTuple):
    pid: int
    rank: int
    world: int
    step: int
    at: float


class Recovery(NamedTuple):
    next_step_s: float  # until anyone finished a step that the kill had not already let through
    full_s: float  # until a step was finished by three workers again


def steps(folder: Path) -> list[Step]:
    """All steps noted so far. A last line that is still being written is left for the next call."""
    found = []
    for path in folder.glob("*.jsonl"):
        whole, _, _ = path.read_text().rpartition("\n")
        found += [Step(**json.loads(line)) for line in whole.splitlines()]
    return sorted(found, key=lambda s: s.at)


def wait_for(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"gave up after {LIMIT_S:.0f} s waiting for {what}")
        time.sleep(0.1)


def trains_whole(folder: Path, after: float) -> bool:
    """Each of three ranks has done five steps since `after`."""
    recent = [s for s in steps(folder) if s.at > after and s.world == WORLD]
    return all(sum(s.rank == r for s in recent) >= 5 for r in range(WORLD))


def kill_one(folder: Path) -> Recovery:
    """Kill the process of the highest rank and watch the diary until all is as before."""
    started = time.monotonic()
    wait_for("three workers that train", lambda: trains_whole(folder, started))
    victim = next(s for s in reversed(steps(folder)) if s.rank == WORLD - 1)
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    wait_for("three workers after the kill", lambda: trains_whole(folder, killed + 0.1))
    noted = steps(folder)
    before, after = [s for s in noted if s.at <= killed], [s for s in noted if s.at > killed]
    new = {s.pid for s in after} - {s.pid for s in before}
    # Survivors may note one more step after the kill, whose reduction had ended before it: that one does not count.
    through = max(s.step for s in before) + 1
    next_at = min(s.at for s in after if s.pid in new or s.step > through)
    full_at = min(s.at for s in after if s.pid in new and s.world == WORLD)
    return Recovery(next_at - killed, full_at - killed)


@contextlib.contextmanager
def under_torchrun(folder: Path, kills: int) -> Iterator[None]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--max-restarts",
               str(kills + 1), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1",
               "--local-addr", "127.0.0.1", str(STEPS), "--under", "torchrun", "--folder", str(folder)]  # fmt: skip
    # torch 2.13 gives a restarted worker the store of its predecessor, with addresses where nobody listens any more;
    # without this setting torchrun needs a second restart, or all of them.
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "torchrun.log").open("w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        yield
    finally:
        agent.terminate()  # ends its workers
        try:
            agent.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def measure(kills: int, runtime: Callable[[Path, int], contextlib.AbstractContextManager[None]]) -> list[Recovery]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="spotfleet-bench-") as name, runtime(Path(name), kills):
        return [kill_one(Path(name)) for _ in range(kills)]


@contextlib.contextmanager
def under_spotfleet(folder: Path, kills: int) -> Iterator[None]:
    """Three hosts of the local provider; the job may go on with two workers."""
    home = folder / "home"
    cloud = LocalCloud(home)
    spec = FleetSpec("bench", any_of=(Need(instance_type="cpu.small"),), nodes=Nodes(2, WORLD, WORLD),
                     workdir=str(HERE))
    fleet = Fleet(spec, home)
    try:
        fleet.up(timeout_s=LIMIT_S)
        fleet.train("steps.py", ["--under", "spotfleet", "--folder", str(folder)], np=(2, WORLD), detach=True)
        yield
    finally:
        cloud.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=3)
    kills = parser.parse_args().kills
    os.environ["SPOTFLEET_LOCAL_OWNER_PID"] = str(os.getpid())
    print(f"seconds after SIGKILL of one of {WORLD} workers, {kills} kills each; {os.cpu_count()} cores")
    medians = {}
    for name, runtime in (("torchrun", under_torchrun), ("spotfleet", under_spotfleet)):
        found = measure(kills, runtime)
        medians[name] = statistics.median(r.next_step_s for r in found)
        print(f"{name:10}  next step {', '.join(f'{r.next_step_s:.3f}' for r in found)}  median {medians[name]:.3f}"
              f"   three workers again {', '.join(f'{r.full_s:.2f}' for r in found)}", flush=True)
    print(f"ratio of the medians: {medians['torchrun'] / medians['spotfleet']:.1f}")


if __name__ == "__main__":
    main()
