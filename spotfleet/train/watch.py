"""Watchers of a job's steps, for those who look for a difference: SPOTFLEET_CHECK and `spotfleet.verify`.

    SPOTFLEET_CHECK=1          each SPOTFLEET_CHECK_EVERY (20) versions all ranks compare states: divergence.py
    SPOTFLEET_VERIFY=FOLDER    each version's digests are appended to FOLDER/WORKER.jsonl, after which the worker waits
                               while FOLDER/hold-VERSION exists; spotfleet/verify/ reads and controls that. A rank
                               waits within the step to VERSION while FOLDER/within-VERSION-RANK exists, beside which
                               it makes a file with the ending .reached

Without these variables nothing of this runs. Threads: the main thread, or an autograd thread while it waits.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from spotfleet.errors import UsageError
from spotfleet.train.state import digest, divergence
from spotfleet.train.state.divergence import Digests
from spotfleet.worker.errors import StateDiverged

CHECK, EVERY, VERIFY = "SPOTFLEET_CHECK", "SPOTFLEET_CHECK_EVERY", "SPOTFLEET_VERIFY"
HOLD_S = 0.005


class Watched(Protocol):
    """The members of the runtime that watchers use."""

    worker: str
    generation: int
    group: Any
    place: Any

    def report_divergence(self, error: StateDiverged) -> None: ...


class StepWatcher:
    """A watcher that does nothing."""

    def entered(self, state: Any) -> None:
        """Called once, when the script enters `elastic.run`."""

    def gradient_begins(self, state: Any) -> None:
        """Called at the first gradient of an iteration (in step mode)."""

    def step_begins(self, state: Any) -> None:
        """Called between the gradient and the step."""

    def stepped(self, state: Any) -> None:
        """Called when a version is complete."""


def watchers(runtime: Watched, environ: Mapping[str, str]) -> list[StepWatcher]:
    found: list[StepWatcher] = []
    if environ.get(VERIFY):
        found.append(Recorder(runtime, Path(environ[VERIFY])))
    if environ.get(CHECK, "0") not in ("", "0"):
        text = environ.get(EVERY, "20")
        if not text.isdigit() or int(text) < 1:
            raise UsageError(f"{EVERY} is {text!r}", hint="use a number of steps, 1 or more")
        found.append(Checker(runtime, int(text)))
    return found


class Checker(StepWatcher):
    """Comparison of all ranks each `every` versions. It costs one digest and one small allgather each time."""

    def __init__(self, runtime: Watched, every: int) -> None:
        self._runtime, self._every = runtime, every

    def stepped(self, state: Any) -> None:
        group, version = self._runtime.group, state.version
        if version % self._every or group is None or group.size == 1:
            return
        rows = group.allgather(torch.tensor([version, *astuple(divergence.digests_of(state))], dtype=torch.int64))
        numbers = [row.tolist() for row in rows]
        try:
            divergence.check(group, state, [Digests(*n[1:]) for n in numbers], range(group.size),
                             [n[0] for n in numbers], f"after step {version}")
        except StateDiverged as error:
            self._runtime.report_divergence(error)
            raise


class Recorder(StepWatcher):
    """Digests of each version, on a file that another process reads and compares."""

    def __init__(self, runtime: Watched, folder: Path) -> None:
        self._runtime, self._folder = runtime, folder
        self._path = folder / f"{runtime.worker.replace('/', '-')}.jsonl"
        self._iteration: tuple[int, int] = (-1, -1)
        self._gradients: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._draws = 0

    def entered(self, state: Any) -> None:
        for name, tensor in state._named():
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                tensor.register_hook(partial(self._gradient, state, name))
        place = self._runtime.place
        self._write({"entered": True, "mode": "step" if state.step_mode else "copy", "rank": place.rank,
                     "size": place.size})

    def _gradient(self, state: Any, name: str, gradient: torch.Tensor) -> None:
        iteration = (self._runtime.generation, state._round)
        if iteration != self._iteration:
            self._iteration, self._gradients = iteration, {}
        self._gradients[name] = digest.of_value((self._gradients.get(name), digest.of_tensor(gradient)))

    def gradient_begins(self, state: Any) -> None:
        self._before = {e.name: digest.of_tensor(e.value) for e in divergence.tensors_of(state)
                        if isinstance(e.value, torch.nn.Parameter)}
        self._draws = _draws()

    def step_begins(self, state: Any) -> None:
        hold = self._folder / f"within-{state.version + 1}-{self._runtime.place.rank}"
        if hold.exists():
            hold.with_suffix(".reached").touch()
        while hold.exists():
            time.sleep(HOLD_S)

    def stepped(self, state: Any) -> None:
        place = self._runtime.place
        buffers = {id(b) for m in state._modules.values() for b in m.buffers()}
        tensors = {e.name: digest.of_tensor(e.value) for e in divergence.tensors_of(state)}
        self._write({
            "version": state.version, "rank": place.rank, "size": place.size, "generation": self._runtime.generation,
            "values": {e.name: [digest.of_value(e.value), repr(e.value)[:divergence.TEXT_CHARS]]
                       for e in divergence.values_of(state)},
            "before": self._before, "tensors": tensors,
            "buffers": {name: digest.of_tensor(t) for name, t in state._named()
                        if id(t) in buffers and name not in tensors},
            "reported": state._repeats.reported, "draws": self._draws, "gradient": digest.of_value(self._gradients)})
        self._before, self._draws = {}, 0
        hold = self._folder / f"hold-{state.version}"
        while hold.exists():
            time.sleep(HOLD_S)

    def _write(self, record: dict[str, Any]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")


def _draws() -> int:
    """Return a digest of the states of the global random generators."""
    numpy = sys.modules.get("numpy")
    return digest.of_value((torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None))
