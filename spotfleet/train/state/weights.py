"""Changes to weights that no step has made, and copies that undo them.

torch counts in-place changes of a tensor. The counters are noted when a step ends, and at the first gradient after it:

    step ended --(1)--> first gradient --(2)--> step begins --> step ended

(1) Code after a step has changed weights (decay by hand), or code of the next iteration (noise). Only if it changes
    them in (2), too, it is noise: it will change them back.
(2) Code of the iteration has changed weights and will change them back (a second gradient at other weights).

After a loss, an iteration is computed again from its beginning: with the changes of (1) made once more, if its step has
been applied, and of (2). So where a function is left by a failure, weights that have changed since the last mark belong
to no version, unless `borrowed` has put them back. Changes through `.data` are not counted; another memory for it is.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from spotfleet.train.state.plain import attributes_of


class WeightMarks:
    """Counters of the parameters that the optimizer owns, as at the last step and at the gradient that followed."""

    def __init__(self) -> None:
        self._last: tuple[list[int], list[int]] = ([], [])
        self._before_gradient = False  # changed in (1)
        self._within = False  # some iteration has changed them in (2)
        self.borrows = 0  # contexts of `borrowed` that are open

    def step_ended(self, params: Sequence[torch.Tensor]) -> None:
        """Take the present values as those of a version: a step has ended, or the user's function is called."""
        self._last, self._before_gradient = _counters(params), False

    def first_gradient(self, params: Sequence[torch.Tensor]) -> None:
        """Take the present values as those that the gradients of an iteration belong to."""
        now = _counters(params)
        self._before_gradient = now != self._last and not self.borrows
        self._last = now

    def step_begins(self, params: Sequence[torch.Tensor]) -> None:
        if self._before_gradient and not self._within:
            self._within = _counters(params) != self._last and not self.borrows

    def put_back(self, params: Sequence[torch.Tensor]) -> None:
        """Take the present values as those of the last mark: they are equal, bit for bit."""
        self._last = _counters(params)

    @property
    def are_borrowed(self) -> bool:
        """Whether the first gradient has come at weights that the iteration will change back."""
        return self._before_gradient and self._within

    def have_moved(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether the weights belong to no version."""
        return self.are_borrowed or _counters(params) != self._last


def _counters(params: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [p._version for p in params], [p.data_ptr() for p in params]


class StateLoan:
    """Copy of the tensors of a state while code uses them for something else: see `State.borrowed`."""

    FIELDS = ("_version", "_round", "_rounds", "_open", "_position", "_replay", "_replaying", "_made_in", "_computed")

    def __init__(self, state: Any) -> None:
        own = state.__dict__
        named = state._named()
        self.values = [(t, t.detach().clone()) for _, t in named if isinstance(t, torch.nn.Parameter)]
        self._buffers = [(t, t.detach().clone()) for _, t in named if not isinstance(t, torch.nn.Parameter)]
        self._fields = {name: own[name] for name in self.FIELDS}
        self._optimizers: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._extras: dict[str, Any] = {}

    @property
    def has_steps(self) -> bool:
        return bool(self._optimizers)

    def before_step(self, state: Any) -> None:
        """Also keep the optimizers' state, before the first step."""
        if not self._optimizers:
            self._optimizers = [(o, copy.deepcopy(o.state_dict()), attributes_of(o))
                                for o in state._optimizers.values()]
            self._extras = state._extras.snapshot()

    @torch.no_grad()
    def put_back(self, state: Any) -> None:
        """Restore the weights; after steps, all else, too."""
        for tensor, value in [*self.values, *(self._buffers if self.has_steps else [])]:
            tensor.copy_(value)
        for optimizer, held, attributes in self._optimizers:
            optimizer.load_state_dict(held)
            vars(optimizer).update(attributes)
        if self.has_steps:
            state.__dict__.update(self._fields)
            vars(state._extras).update(self._extras)
