"""Resize policies: `Resize`, a job's request for changes of the world size; `Resizer`, its execution in one worker.

    keep-global-batch   elastic samplers keep the global batch of the world in which the first step was made
    scale-lr            `step()` uses learning rates times (world size / that of the first step), after a warm-up
    growth, wanted      the world size that the job requests, reported by every rank; the dispatcher uses rank 0's

The factor of a step depends on the world sizes of the applied steps alone. It is kept in the position (`Ramp`), so a
repeated step has the same factor again, and a joiner receives it.

Threads: the main thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from spotfleet.codec import from_json
from spotfleet.errors import UsageError
from spotfleet.model import RESIZE_POLICIES, ResizeSpec
from spotfleet.train.data.sampler import Elastic

if TYPE_CHECKING:
    from spotfleet.train.state.state import State

NAME = "_resize"  # in the state's position


@dataclass(frozen=True)
class Progress:
    """Input of a `wanted` callback."""

    version: int  # optimizer steps applied
    epoch: int
    size: int  # workers now
    min_workers: int
    max_workers: int


Wanted = Callable[[Progress], "int | None"]


@dataclass(frozen=True)
class Resize:
    """Resize policy for `elastic.run(resize=...)`; it overrides the fleet file's `resize`.

    `growth` is {first epoch: number of workers}. `wanted(progress)`, called on every rank after each step and when
    the function is entered, returns the world size to request, or None for no request. Rank 0's result counts.
    """

    policy: str = "none"
    warmup_steps: int = 0
    growth: Mapping[int, int] = field(default_factory=dict)
    wanted: Wanted | None = None

    def __post_init__(self) -> None:
        if self.policy not in RESIZE_POLICIES:
            raise UsageError(f"resize: policy {self.policy!r} is unknown",
                             hint=f"use one of {', '.join(RESIZE_POLICIES)}")
        if self.warmup_steps < 0 or (self.warmup_steps and self.policy != "scale-lr"):
            raise UsageError(f"resize: warmup_steps is {self.warmup_steps} with policy {self.policy}",
                             hint="use warmup_steps with policy scale-lr only, and give 0 or more")
        epochs = list(self.growth)
        if epochs and (epochs != sorted(epochs) or epochs[0] != 0 or min(self.growth.values()) < 1):
            raise UsageError(f"resize: growth is {dict(self.growth)}",
                             hint="give epochs in order, 0 first, each with 1 or more workers: {0: 2, 30: 4}")
        if epochs and self.wanted is not None:
            raise UsageError("resize: growth and wanted both set the number of workers", hint="keep one")


def read(given: object, environ: Mapping[str, str]) -> Resize:
    """Return the script's own policy, else the job's, else none."""
    if isinstance(given, Resize):
        return given
    if isinstance(given, str):
        return Resize(given)
    if callable(given):
        return Resize(wanted=given)
    if given is not None:
        raise UsageError(f"elastic.run: resize is {given!r}",
                         hint='give "keep-global-batch", "scale-lr", an elastic.Resize, or a function of the progress')
    spec = from_json(ResizeSpec, json.loads(environ.get("SPOTFLEET_RESIZE", "{}")))
    return Resize(spec.policy, spec.warmup_steps, dict(spec.growth))


@dataclass(frozen=True)
class Ramp:
    """Linear change of the factor of the learning rates from `begin` to `world / reference`, from step `since` on."""

    reference: int
    world: int
    since: int = 0
    begin: float = 1.0

    def factor(self, step: int, warmup_steps: int) -> float:
        """Return the factor for the step that makes version `step` + 1."""
        full = self.world / self.reference
        done = (step - self.since + 1) / warmup_steps if warmup_steps else 1.0
        return full if done >= 1.0 else self.begin + (full - self.begin) * done


def ramp_at(ramp: Ramp | None, world: int, step: int, warmup_steps: int) -> Ramp:
    """Return the ramp for a step made at this world size."""
    if ramp is None:
        return Ramp(world, world, step)
    if world == ramp.world:
        return ramp
    return Ramp(ramp.reference, world, step, ramp.factor(step - 1, warmup_steps))


def workers_at(growth: Mapping[int, int], epoch: int) -> int:
    return [workers for start, workers in growth.items() if start <= max(0, epoch)][-1]


@contextmanager
def scaled(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply learning rates by `factor` inside this context only."""
    held = [group["lr"] for group in optimizer.param_groups] if factor != 1.0 else []
    for group, rate in zip(optimizer.param_groups, held, strict=False):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, held, strict=False):
            group["lr"] = rate


class Resizer:
    """Execution of a resize policy in one worker."""

    def __init__(self, resize: Resize, environ: Mapping[str, str]) -> None:
        self.resize = resize
        least, _, most = environ.get("SPOTFLEET_WORKERS", "").partition(":")
        self.min_workers, self.max_workers = int(least or 1), int(most or sys.maxsize)
        self._ramp: Ramp | None = None
        self._warned = False

    # Protocol of a value in the state

    def state_dict(self) -> dict[str, Any]:
        return {"ramp": asdict(self._ramp) if self._ramp else None}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self._ramp = Ramp(**held["ramp"]) if held["ramp"] else None

    # Called by the runtime

    def attach(self, state: State) -> None:
        """Prepare `state` before its first position is taken. UsageError where it lacks what the policy needs."""
        if self.resize.policy == "keep-global-batch":
            if not _elastic(state):
                raise UsageError("resize: keep-global-batch finds no elastic sampler in the state",
                                 hint="TorchState(..., sampler=elastic.ElasticSampler(data, batch_size=...))")
            for sampler in _elastic(state):
                sampler.keeps_global_batch = True
        if self.resize.growth and self._epoch(state) is None:
            raise UsageError("resize: growth goes by epochs, and the state has none",
                             hint="TorchState(..., epoch=0), or an elastic sampler whose set_epoch is called")
        if self.resize.policy == "scale-lr":
            state._stateful[NAME] = self

    def apply(self, state: State, size: int, was: int) -> str:
        """Apply the policy once all ranks are at one position in a group of `size`. Return the effect in one line.

        `was` is the world size of that position.
        """
        if self.resize.policy == "keep-global-batch":
            for sampler in _elastic(state):
                sampler.keep_global_batch()
        return self._line(state, size, was) if was and was != size else ""

    def factor(self, step: int, world: int) -> float:
        """Return the factor for the learning rates of the step after version `step`.

        From here on `world` counts as the world size of the last step. A second call for the same step changes nothing.
        """
        if self.resize.policy != "scale-lr":
            return 1.0
        self._ramp = ramp_at(self._ramp, world, step, self.resize.warmup_steps)
        return self._ramp.factor(step, self.resize.warmup_steps)

    def wanted(self, state: State, size: int) -> int:
        """Return the world size to request now; 0: no request. Exceptions of the callback go to the caller."""
        if not (self.resize.growth or self.resize.wanted):
            return 0
        epoch = self._epoch(state) or 0
        if self.resize.wanted:
            progress = Progress(state._version, epoch, size, self.min_workers, self.max_workers)
            found: object = self.resize.wanted(progress)
        else:
            found = workers_at(self.resize.growth, epoch)
        if found is None:
            return 0
        if isinstance(found, bool) or not isinstance(found, int):
            raise UsageError(f"resize: the callback returned {found!r}", hint="return a number of workers, or None")
        kept = max(self.min_workers, min(self.max_workers, found))
        if kept != found and not self._warned:
            self._warned = True
            print(f"resize: {found} workers are wanted; the job may have {self.min_workers} to {self.max_workers}, so "
                  f"{kept} are asked for", file=sys.stderr, flush=True)
        return kept

    def _epoch(self, state: State) -> int | None:
        if "epoch" in state._scalars:
            return int(state.__dict__["epoch"])
        samplers = _elastic(state)
        return max(samplers, key=lambda s: s.last_used).epoch if samplers else None

    def _line(self, state: State, size: int, was: int) -> str:
        match self.resize.policy:
            case "keep-global-batch":
                totals = {s.global_batch for s in _elastic(state)}
                each = ", ".join(f"{total}, {-(-total // size)} at most on each worker" for total in sorted(totals))
                return f"the global batch stays {each}"
            case "scale-lr":
                reference = self._ramp.reference if self._ramp else was
                over = f" after {self.resize.warmup_steps} steps" if self.resize.warmup_steps else ""
                return f"learning rates are {size}/{reference} of those for {reference} workers{over}"
        return f"{was} -> {size} workers" if self.resize.growth or self.resize.wanted else ""


def _elastic(state: State) -> list[Elastic]:
    return [s for s in state._stateful.values() if isinstance(s, Elastic)]
