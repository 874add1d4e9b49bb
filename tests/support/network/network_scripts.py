"""A script that leaves a trace of each step, so that a test knows the truth whatever anybody reports."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

# Counts steps; each worker appends "monotonic seconds, step, generation" to a file of its own in TRACE.
TRACING = """
import os, time
import torch
import spotfleet.train as hvd
from spotfleet.train import runtime
ME = os.environ["SPOTFLEET_WORKER"]
TRACE, STEPS, NAP = os.environ["TRACE"], int(os.environ["STEPS"]), float(os.environ.get("NAP", "0.01"))
trace = open(os.path.join(TRACE, ME.replace("/", "_")), "a", buffering=1)
print(os.getpid(), file=trace)
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters())

def hangs(step):
    path = os.path.join(TRACE, "hang")
    if os.path.exists(path) and open(path).read() == ME:
        os.remove(path)
        while True:
            time.sleep(0.01)

def last():
    path = os.path.join(TRACE, "enough")
    return int(open(path).read()) if os.path.exists(path) else STEPS

@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, STEPS):
        if state.batch >= last():
            break
        opt.zero_grad()
        model(torch.ones(1)).sum().backward()
        opt.step()
        state.commit()
        print(time.monotonic(), state.batch + 1, runtime.current().generation, file=trace)
        time.sleep(NAP)
        hangs(state.batch)

train(hvd.elastic.TorchState(model, opt, batch=0))
print("counted", model.weight.item(), flush=True)
"""


MORE = 300  # steps of at least 10 ms, in which each rank has read it


@dataclass(frozen=True)
class Step:
    at: float  # time.monotonic()
    number: int
    generation: int


class Trace:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _lines(self, worker: str) -> list[str]:
        path = self.folder / worker.replace("/", "_")
        return path.read_text().splitlines() if path.exists() else []

    def pid(self, worker: str) -> int:
        return int(self._lines(worker)[0])

    def steps(self, worker: str) -> list[Step]:
        rows = [line.split() for line in self._lines(worker)[1:]]
        return [Step(float(r[0]), int(r[1]), int(r[2])) for r in rows if len(r) == 3]

    def all(self) -> dict[str, list[Step]]:
        return {p.name.replace("_", "/"): self.steps(p.name) for p in self.folder.iterdir() if "_" in p.name}

    def after(self, worker: str, at: float) -> Step | None:
        """The first step that the worker completed after `at`."""
        return next((s for s in self.steps(worker) if s.at > at), None)

    def hang(self, worker: str) -> None:
        """Make one worker hang in its own code after its next step."""
        partial = self.folder / "hang-part"
        partial.write_text(worker)
        partial.rename(self.folder / "hang")

    def enough(self) -> None:
        """End the job at a step that no rank has reached yet: a rank that stops alone is an error of the script."""
        reached = max((step.number for steps in self.all().values() for step in steps), default=0)
        partial = self.folder / "enough-part"
        partial.write_text(str(reached + MORE))
        partial.rename(self.folder / "enough")


def now() -> float:
    return time.monotonic()
