"""The base class that marks a distributed optimizer, and the handle to its reducer.

States and checkpoints hold optimizers and need no more of them than this; `optimizer.py` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spotfleet.train.reducer import Reducer


class ReducerHandle:
    """The reducer of one optimizer. It is replaced when the set of trained parameters changes."""

    def __init__(self, optimizer: Any, make: Callable[[], Reducer]) -> None:
        self._optimizer, self._make = optimizer, make
        self.reducer = make()

    def renew(self) -> None:
        """Replace the reducer by one for the parameters that the optimizer has and trains now."""
        self.reducer.detach()
        self.reducer.successor = made = self._make()
        self.reducer = made

    def is_current(self) -> bool:
        """Return whether the reducer holds exactly the trained parameters, in order.

        Ranks whose reducers differ would mix up each other's gradients.
        """
        trained = [p for g in self._optimizer.param_groups for p in g["params"] if p.requires_grad]
        return [id(p) for p in trained] == [id(p) for p in self.reducer.params]

    def has_new_params(self) -> bool:
        """Return whether a parameter requires gradients that the reducer does not know."""
        known = {id(p) for p in self.reducer.params}
        return any(p.requires_grad and id(p) not in known for g in self._optimizer.param_groups for p in g["params"])


class Distributed:
    """The base class of every distributed optimizer."""

    _spotfleet: ReducerHandle


def is_distributed(optimizer: Any) -> bool:
    return isinstance(optimizer, Distributed)


def handle_of(optimizer: Any) -> ReducerHandle:
    """Return the handle of a distributed optimizer."""
    return optimizer._spotfleet
