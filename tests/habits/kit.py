"""What a training loop of the table gets, under plain torch and in a worker: model, data, wrappers, points of loss.

Every rank has the same data, so the mean over two or one workers is exact, and plain torch's bits must come out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import spotfleet.train as hvd
from tests.support.train.thread_fleet import Lost, ThreadFleet, Worker

STEPS = 12  # iterations of a loop, unless it says otherwise

Result = dict[str, str]
Loop = Callable[["Kit"], Result]


@dataclass(frozen=True)
class Disturbance:
    """What happens to a worker: `what` at `point` of iteration `at`, once."""

    what: str = ""  # "kill", "notice"
    point: str = ""
    at: int = 5
    spares: int = 0
    second: int = 0  # the iteration in which the other founder is lost, too


@dataclass(frozen=True)
class Habit:
    """A way of writing a training loop, and what the runtime makes of it."""

    name: str
    family: str
    loop: Loop
    verdict: str = "exact"  # "exact", "noticed": a difference is reported, or "refused"
    message: str = ""  # a regular expression for the error, or for the report
    edit: str = ""  # what to change, where it is not exact as it is written


FAMILIES = ("usual", "accumulation", "gradients", "optimizers", "schedulers", "averages", "weights", "buffers", "data",
            "control flow", "precision", "models")  # in the order of the page
TABLE: list[Habit] = []


def habit(family: str, verdict: str = "exact", message: str = "", edit: str = "") -> Callable[[Loop], Loop]:
    """Enter the decorated loop into the table; its docstring's first line is its name."""

    def enter(loop: Loop) -> Loop:
        name = (loop.__doc__ or "").strip().splitlines()[0].rstrip(".")
        TABLE.append(Habit(name, family, loop, verdict, message, edit))
        return loop

    return enter


class PlainState:
    """The state of a loop under plain torch: its values as attributes."""

    is_replay = False
    _model: Any

    def __init__(self, model: Any, values: dict[str, Any]) -> None:
        self.__dict__.update(values, _model=model)

    def commit(self) -> None:
        pass

    check_host_updates = commit

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        params = list(self._model.parameters())
        held = [p.detach().clone() for p in params]
        yield
        with torch.no_grad():
            for p, value in zip(params, held, strict=True):
                p.copy_(value)

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        pass


@dataclass
class Kit:
    """One run of a loop: by plain torch where `worker` is None."""

    worker: Worker | None = None
    disturbance: Disturbance = Disturbance()
    reached: list[str] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        return self.worker is None

    # What stands for spotfleet under plain torch

    def optimizer(self, optimizer: Any, **options: Any) -> Any:
        return optimizer if self.plain else hvd.DistributedOptimizer(optimizer, **options)

    def state(self, model: Any = None, optimizer: Any = None, **values: Any) -> Any:
        if self.plain:
            return PlainState(model, values)
        return hvd.elastic.TorchState(model, optimizer, **values)

    def run(self, function: Callable[[Any], Any], **options: Any) -> Callable[[Any], Any]:
        return function if self.plain else hvd.elastic.run(function, **options)

    def allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.plain else hvd.allreduce(tensor)

    def rank(self) -> int:
        return 0 if self.plain else hvd.rank()

    # Disturbances

    def point(self, where: str, i: int) -> None:
        """A place in iteration `i` of the loop, at which this worker may be lost or another be told to leave."""
        worker, d = self.worker, self.disturbance
        if worker is None or not d.what:
            return
        if d.what == "kill" and worker.name == "h1/0/1" and (where, i) == (d.point, d.at):
            raise Lost
        first = worker.name == "h0/0/1"
        leaving = worker.fleet.workers["h1/0/1"].leaving
        if d.what == "notice" and first and (where, i) == (d.point, d.at) and not leaving:
            worker.fleet.drain("h1/0/1")
        if d.second and first and i >= d.second and where == d.point:
            self._leave_to_the_spare(worker.fleet)

    def _leave_to_the_spare(self, fleet: ThreadFleet) -> None:
        """Be lost once the spare has taken part in a step."""
        spare = fleet.workers["h2/0/1"]
        if spare.control.report.resumed:
            raise Lost


class ScriptKit(Kit):
    """One run of a loop in a worker's process, which others disturb."""

    plain = False

    def point(self, where: str, i: int) -> None:
        pass


def net(*extra: nn.Module, seed: int = 1, inputs: int = 4) -> nn.Sequential:
    """Return a little model whose weights depend on `seed` alone."""
    model = nn.Sequential(nn.Linear(inputs, 5), *extra, nn.Tanh(), nn.Linear(5, 1))
    fill(model, seed)
    return model


def fill(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)


def batch(i: int, rows: int = 6, inputs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of batch `i`, the same on all ranks."""
    generator = torch.Generator().manual_seed(1000 + i)
    x = torch.randn(rows, inputs, generator=generator)
    return x, x.sum(1, keepdim=True).sin()


def loss_of(model: Any, i: int) -> torch.Tensor:
    x, y = batch(i)
    return nn.functional.mse_loss(model(x), y)


def result(*things: Any, **values: Any) -> Result:
    """Return the digest of every tensor and value in modules, optimizers, state_dicts and `values`, by its name."""
    found: Result = {}
    for number, thing in enumerate(things):
        _describe(found, f"{type(thing).__name__}{number}", thing)
    for name, value in values.items():
        _describe(found, name, value)
    return found


def _describe(found: Result, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous()
        found[name] = hashlib.sha256(data.view(torch.uint8).numpy().tobytes() if data.dim() else
                                     repr(data.item()).encode()).hexdigest()[:12] + f" {data.double().sum().item():.6f}"
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _describe(found, f"{name}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _describe(found, f"{name}.{number}", item)
    elif callable(getattr(value, "state_dict", None)):
        held = value.state_dict()
        _describe(found, name, {k: v for k, v in held.items() if not k.startswith("_")})
    else:
        found[name] = repr(value)
