"""The base class that marks a distributed optimizer, the handle to its reducer, and the list of those in use.

States and checkpoints hold optimizers and need no more of them than this; `optimizer.py` makes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Parameter

from spotfleet.train.gradients.reducer import Reducer


class ReducerHandle:
    """The reducer of one optimizer."""

    def __init__(self, optimizer: Any, make: Callable[[], Reducer]) -> None:
        self._optimizer = optimizer
        self.reducer = make()
        self.replaced = False  # a later distributed optimizer has the parameters

    def trained(self) -> list[Parameter]:
        return trained_params(self._optimizer)

    def renew(self) -> None:
        """Let the reducer have the parameters that the optimizer has and trains now."""
        self.reducer.track(self.trained())

    def is_current(self) -> bool:
        """Return whether the reducer holds exactly the trained parameters, in order.

        Ranks whose reducers differ would mix up each other's gradients.
        """
        return [id(p) for p in self.trained()] == [id(p) for p in self.reducer.params]

    def replace(self) -> None:
        """Leave the parameters to another distributed optimizer."""
        self.reducer.detach()
        self.replaced = True


class OptimizerList:
    """The distributed optimizers of this process, in the order in which they were made. It keeps none of them alive."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[Any]] = []

    def __iter__(self) -> Iterator[Any]:
        return iter([o for o in (held() for held in self._held) if o is not None])

    def append(self, optimizer: Any) -> None:
        self._held = [*(weakref.ref(o) for o in self), weakref.ref(optimizer)]

    def remove(self, optimizer: Any) -> None:
        self._held = [weakref.ref(o) for o in self if o is not optimizer]


def trained_params(optimizer: Any) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


class Distributed:
    """The base class of every distributed optimizer."""

    _spotfleet: ReducerHandle


def is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, Distributed)


def handle_of(optimizer: Any) -> ReducerHandle:
    """Return the handle of a distributed optimizer."""
    return optimizer._spotfleet
