"""Training loops as people write them, run in plain torch and in a fleet of threads that is disturbed.

A loop is a function of a `Job`. It trains on the same data on every rank, so each mean over ranks is exact and only a
disturbance can make a difference: whatever becomes of the other worker, the bits are those of plain torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import spotfleet.train as hvd
from tests.support.train.thread_fleet import Lost, ThreadFleet, Worker


@dataclass(frozen=True)
class Disturbance:
    """`worker` dies, or is told to leave, at `point` of `step`."""

    kind: str  # kill or notice
    point: str
    step: int
    spares: int = 0  # workers that take its place
    worker: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.point}-{self.step}" + ("-replaced" if self.spares else "")


class PlainState(SimpleNamespace):
    """What a script uses of a state."""

    is_replay = False

    def commit(self) -> None:
        pass

    def check_host_updates(self) -> None:
        pass

    @contextlib.contextmanager
    def borrowed(self, restore: bool = True) -> Any:
        held = [p.detach().clone() for v in vars(self).values() if isinstance(v, nn.Module) for p in v.parameters()]
        yield
        if restore:
            with torch.no_grad():
                live = [p for v in vars(self).values() if isinstance(v, nn.Module) for p in v.parameters()]
                for p, value in zip(live, held, strict=True):
                    p.copy_(value)


@dataclass
class Job:
    """A loop's surroundings: plain torch without a worker."""

    worker: Worker | None = None
    disturbance: Disturbance | None = None

    def distributed(self, optimizer: Any, **options: Any) -> Any:
        return optimizer if self.worker is None else hvd.DistributedOptimizer(optimizer, **options)

    def run(self, function: Callable[[Any], Any], *, options: dict[str, Any] | None = None, **values: Any) -> Any:
        if self.worker is None:
            return function(PlainState(**values))
        state = hvd.elastic.TorchState(**values)
        return hvd.elastic.run(function, **(options or {}))(state)

    def note(self, value: Any) -> None:
        if self.worker is not None:
            self.worker.notes.append(value)

    def at(self, point: str, step: int) -> None:
        """Be disturbed here, if it is the place."""
        d = self.disturbance
        if self.worker is None or d is None or (d.point, d.step) != (point, step):
            return
        name = f"h{d.worker}/0/1"
        if self.worker.name == name and d.kind == "kill":
            raise Lost
        if d.kind == "notice" and hvd.size() > 1:
            self.worker.fleet.drain(name)

    def metric(self) -> None:
        if self.worker is not None:
            hvd.allreduce(torch.ones(1))


Loop = Callable[[Job], Any]


def plain(loop: Loop) -> Any:
    return loop(Job())


def fleet_of(threads: Any, loop: Loop, disturbance: Disturbance | None = None, founders: int = 2) -> ThreadFleet:
    """Run `loop` to its end in a fleet of threads."""

    def script(worker: Worker) -> Any:
        hvd.init()
        return loop(Job(worker, disturbance))

    fleet = threads(script, founders=founders, spares=disturbance.spares if disturbance else 0)
    fleet.finish()
    return fleet


def check(threads: Any, loop: Loop, disturbance: Disturbance | None = None) -> ThreadFleet:
    """Every rank ends with the bits of plain torch."""
    expected = plain(loop)
    fleet = fleet_of(threads, loop, disturbance)
    found = {n: w.result for n, w in fleet.workers.items() if w.result is not None}
    if disturbance is not None:
        assert fleet.generation > 1, "it was not disturbed"
    assert found == dict.fromkeys(found, expected) and found, fleet.story()
    return fleet


def disturbances(points: Iterable[str], step: int) -> list[Disturbance | None]:
    """None, and a kill and a notice at each point, with and without a worker that takes the place."""
    return [None, *(Disturbance(kind, point, step, spares) for point in points for kind in ("kill", "notice")
                    for spares in (0, 1))]


def data(step: int, rows: int = 8, width: int = 4) -> torch.Tensor:
    """The batch of a step: (rows, width)."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def seeded(module: nn.Module, seed: int = 7) -> nn.Module:
    """Give `module` the same parameters each time; the global generator is shared by all threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return module


def linear(width: int = 4) -> nn.Linear:
    """The same untrained layer each time."""
    made = nn.Linear(width, 1)
    seeded(made)
    return made


def bits(*modules: nn.Module) -> str:
    """Digest of parameters and buffers."""
    h = hashlib.sha256()
    for t in (t for m in modules for t in m.state_dict().values() if isinstance(t, torch.Tensor)):
        h.update(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:12]
