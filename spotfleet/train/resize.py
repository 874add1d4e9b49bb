"""What a change of the world size does to training: `Resize`, what a job asks for; `Resizer`, at work in one worker.

    keep-global-batch   Elastic samplers keep the global batch of the world in which the first step was made
    scale-lr            `step()` sees learning rates times (world size / that of the first step), after a warm-up
    growth, wanted      the world size that the job asks for, reported by every rank; the dispatcher hears rank 0

The factor of a step depends on the world sizes of the applied steps alone. It is kept in the position (`Ramp`), so a
step that is done again has the factor that it had, and a joiner takes it over.

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

if TYPE_CHECKING:
    from spotfleet.train.state import State

NAME = "_resize"  # in the state's position


@dataclass(frozen=True)
class Progress:
    """What a callback decides on."""

    version: int  # optimizer steps applied
    epoch: int
    size: int  # workers now
    min_workers: int
    max_workers: int


Wanted = Callable[[Progress], "int | None"]


@dataclass(frozen=True)
class Resize:
    """For `elastic.run(resize=...)`; it goes before the fleet file's `resize`.

    `growth` is {from this epoch: so many workers}. `wanted(progress)`, called on every rank after each step and when
    the function is entered, returns the world size to ask for, or None for no wish. Rank 0's answer counts.
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
                             hint="warm-up is the way of policy scale-lr; give it 0 or more steps there")
        epochs = list(self.growth)
        if epochs and (epochs != sorted(epochs) or epochs[0] != 0 or min(self.growth.values()) < 1):
            raise UsageError(f"resize: growth is {dict(self.growth)}",
                             hint="give epochs in order, 0 first, each with 1 or more workers: {0: 2, 30: 4}")
        if epochs and self.wanted is not None:
            raise UsageError("resize: growth and wanted both say how many workers there should be", hint="keep one")


def read(given: object, environ: Mapping[str, str]) -> Resize:
    """The script's own, else the job's, else none."""
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
    """Learning rates go linearly from `begin` to `world / reference` times their values, from step `since` on."""

    reference: int
    world: int
    since: int = 0
    begin: float = 1.0

    def factor(self, step: int, warmup_steps: int) -> float:
        """For the step that makes version `step` + 1."""
        full = self.world / self.reference
        done = (step - self.since + 1) / warmup_steps if warmup_steps else 1.0
        return full if done >= 1.0 else self.begin + (full - self.begin) * done


def moved(ramp: Ramp | None, world: int, step: int, warmup_steps: int) -> Ramp:
    """The ramp that holds for a step made at this world size."""
    if ramp is None:
        return Ramp(world, world, step)
    if world == ramp.world:
        return ramp
    return Ramp(ramp.reference, world, step, ramp.factor(step - 1, warmup_steps))


def workers_at(growth: Mapping[int, int], epoch: int) -> int:
    return [workers for start, workers in growth.items() if start <= max(0, epoch)][-1]


@contextmanager
def scaled(optimizer: Any, factor: float) -> Iterator[None]:
    """Inside, learning rates are `factor` times what everybody else sees."""
    held = [group["lr"] for group in optimizer.param_groups] if factor != 1.0 else []
    for group, rate in zip(optimizer.param_groups, held, strict=False):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, held, strict=False):
            group["lr"] = rate


class Resizer:
    """A resize policy at work."""

    def __init__(self, resize: Resize, environ: Mapping[str, str]) -> None:
        self.resize = resize
        least, _, most = environ.get("SPOTFLEET_WORKERS", "").partition(":")
        self.least, self.most = int(least or 1), int(most or sys.maxsize)
        self._ramp: Ramp | None = None
        self._said = False

    # As one of the state's values

    def state_dict(self) -> dict[str, Any]:
        return {"ramp": asdict(self._ramp) if self._ramp else None}

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self._ramp = Ramp(**held["ramp"]) if held["ramp"] else None

    # What the runtime calls

    def attach(self, state: State) -> None:
        """Before the state's first position is taken. Raises UsageError where the policy finds nothing to work on."""
        if self.resize.policy == "keep-global-batch":
            if not _elastic(state):
                raise UsageError("resize: keep-global-batch finds no elastic sampler in the state",
                                 hint="TorchState(..., sampler=elastic.ElasticSampler(data, batch_size=...))")
            for sampler in _elastic(state):
                sampler.keeps = True
        if self.resize.growth and self._epoch(state) is None:
            raise UsageError("resize: growth goes by epochs, and the state has none",
                             hint="TorchState(..., epoch=0), or an elastic sampler whose set_epoch is called")
        if self.resize.policy == "scale-lr":
            state._stateful[NAME] = self

    def entered(self, state: State, size: int, was: int) -> str:
        """All ranks stand at one position in a group of `size`; `was`: at that position. What was done, in one line."""
        if self.resize.policy == "keep-global-batch":
            for sampler in _elastic(state):
                sampler.keep_global_batch()
        return self._line(state, size, was) if was and was != size else ""

    def factor(self, step: int, world: int) -> float:
        """What the learning rates of the step after version `step` are to be multiplied by; the world counts from here
        on as that of the last step. Asking again for the same step changes nothing."""
        if self.resize.policy != "scale-lr":
            return 1.0
        self._ramp = moved(self._ramp, world, step, self.resize.warmup_steps)
        return self._ramp.factor(step, self.resize.warmup_steps)

    def wanted(self, state: State, size: int) -> int:
        """The world size to ask for now; 0: no wish. What the callback raises goes to the caller."""
        if not (self.resize.growth or self.resize.wanted):
            return 0
        epoch = self._epoch(state) or 0
        if self.resize.wanted:
            found: object = self.resize.wanted(Progress(state._version, epoch, size, self.least, self.most))
        else:
            found = workers_at(self.resize.growth, epoch)
        if found is None:
            return 0
        if isinstance(found, bool) or not isinstance(found, int):
            raise UsageError(f"resize: the callback returned {found!r}", hint="return a number of workers, or None")
        kept = max(self.least, min(self.most, found))
        if kept != found and not self._said:
            self._said = True
            print(f"resize: {found} workers are wanted; the job may have {self.least} to {self.most}, so {kept} are "
                  "asked for", file=sys.stderr, flush=True)
        return kept

    def _epoch(self, state: State) -> int | None:
        if "epoch" in state._scalars:
            return int(state.__dict__["epoch"])
        samplers = _elastic(state)
        return max(samplers, key=lambda s: s.iterated).epoch if samplers else None

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


def _elastic(state: State) -> list[Any]:
    from spotfleet.train.sampler import Elastic

    return [s for s in state._stateful.values() if isinstance(s, Elastic)]
