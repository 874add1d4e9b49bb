"""What a user has at hand in an end-to-end test: a home, scripts, the command line, and a look behind the scene."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.api import Fleet, Job
from spotfleet.protocol.messages import HostStatus, JobStatus
from spotfleet.providers.local import LocalCloud

CLI = str(Path(sys.executable).with_name("spotfleet"))
LIMIT_S = 90.0  # for any one thing to happen on a busy machine

COUNTING = """
# A parameter falls by exactly 1 per applied step: whatever happens, it must end at minus the number of batches.
# Steps are slow until the file "hurry" exists, so that a test has time for trouble on any machine.
import argparse, os, time
import torch
import spotfleet.train as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batches", type=int, default=50)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--hurry", default="")
args = parser.parse_args()

def linger():
    for _ in range(20):
        if os.path.exists(args.hurry):
            return
        time.sleep(0.01)

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters())

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, args.epochs):
        for state.batch in range(state.batch, args.batches):
            opt.zero_grad()
            model(torch.ones(1)).sum().backward()
            opt.step()
            if (state.batch + 1) % args.every == 0:
                state.commit()
            linger()
        state.batch = 0

train(hvd.elastic.TorchState(model, opt, epoch=0, batch=0))
print("counted", model.weight.item(), "of", -args.epochs * args.batches, flush=True)
hvd.shutdown()
"""

RAISING = """
import spotfleet.train as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    raise ValueError(f"a bug in the script, seen by rank {hvd.rank()}")

train(hvd.elastic.ObjectState(step=0))
"""


def wait_for(what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.2)


@dataclass(frozen=True)
class Stage:
    """A home, a working directory with scripts, and what a user does there."""

    home: Path
    work: Path

    @property
    def cloud(self) -> LocalCloud:
        return LocalCloud(self.home)

    def cli(self, *command: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([CLI, *command], cwd=self.work, text=True, capture_output=True, timeout=2 * LIMIT_S,
                              stdin=subprocess.DEVNULL)
        assert not ok or done.returncode == 0, f"spotfleet {' '.join(command)}\n{done.stdout}{done.stderr}"
        return done

    def counting(self, fleet: Fleet, batches: int, workers: tuple[int, int], every: int = 1, **options: Any) -> Job:
        """Start counting `batches`, slowly until `hurry`."""
        args = ["--epochs", str(batches // 50), "--every", str(every), "--hurry", str(self.work / "hurry")]
        return fleet.train("counting.py", args, np=workers, detach=True, **options)

    def hurry(self) -> None:
        (self.work / "hurry").touch()

    def fleet_file(self, name: str, least: int, target: int, most: int, more: str = "") -> Path:
        """Write one; `more` lines stand in it."""
        path = self.work / f"{name}.yaml"
        path.write_text(f"name: {name}\nprovider: local\nnodes: {{min: {least}, target: {target}, max: {most}}}\n"
                        f"resources: {{instance_type: cpu.small}}\nworkdir: .\n{more}\n")
        return path

    def fleet(self, name: str, least: int, target: int, more: str = "", most: int = 0) -> Fleet:
        """A fleet that is up, with `target` hosts."""
        fleet = Fleet(self.fleet_file(name, least, target, most or target, more))
        fleet.up(timeout_s=LIMIT_S)
        wait_for(f"{target} hosts", lambda: len(hosts(fleet)) == target)
        return fleet


def hosts(fleet: Fleet, state: str = "up") -> list[HostStatus]:
    return [h for h in fleet.hosts() if h.role == "worker" and h.state == state]


def hosts_of(job: Job) -> list[str]:
    """The hosts that train the job, by rank."""
    return [w.host for w in sorted(job.status().workers, key=lambda w: w.rank) if w.rank >= 0]


def trains(job: Job, workers: int, step: int = 1, without: str = "") -> bool:
    """Does the job train with so many workers, beyond `step`, none on host `without`?"""
    status: JobStatus = job.status()
    assert not job.state.ended, f"it has ended: {status.state}, {status.why}\n{status.error}"
    there = hosts_of(job)
    return status.state == "running" and len(there) == workers and status.version >= step and without not in there


def output(job: Job) -> str:
    return b"".join(job.logs()).decode()


def repeated(fleet: Fleet, job: Job, cause: str) -> int:
    """Steps computed again after generations formed for `cause`."""
    events = [e for e in fleet.events() if e.get("job") == job.id]
    formed = {e["generation"]: e["cause"] for e in events if e["kind"] == "GenerationFormed"}
    assert cause in formed.values(), f"no generation was formed for a {cause}: {formed}"
    return sum(e["repeated"] for e in events if e["kind"] == "JobResumed" and formed[e["generation"]] == cause)
