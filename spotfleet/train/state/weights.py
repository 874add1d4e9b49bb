"""Changes to weights that no step has made, and copies that undo them.

torch counts in-place changes of a tensor. The counters are noted when a step ends, and at the first gradient after it:

    step ended --(1)--> first gradient --(2)--> step begins --> step ended

(1) Code after a step has changed weights (decay by hand), or code of the next iteration (noise). Only if it changes
    them in (2), too, it is noise: it will change them back.
(2) Code of the iteration has changed weights and will change them back (a second gradient at other weights).

After a loss, an iteration is computed again from its beginning: with the changes of (1) made once more, if its step has
been applied, and of (2). So where a function is left by a failure, weights that have changed since the last mark belong
to no version. They are put back: by `borrowed`, or from a copy, which is kept at each mark once such changes have been
seen. A copy of the last step cannot undo noise, which may stand beside changes of (1) that are not made again.
Changes through `.data` are not counted; another memory for it is.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch

from spotfleet.train.state.buffers import overwrite
from spotfleet.train.state.plain import attributes_of

STEPLESS = 20  # gradients without a step before the first one, after which that is reported


class WeightMarks:
    """Counters of the parameters that the optimizer owns, as at the last step and at the gradient that followed."""

    def __init__(self) -> None:
        self._last: tuple[list[int], list[int]] = ([], [])
        self._before_gradient = False  # changed in (1)
        self._noise = False  # some iteration has changed them in (1) and in (2)
        self._within = False  # some iteration has changed them in (2)
        self._of_step = False  # the last mark is the end of a step
        self._marked = False  # at a first gradient, since weights were lent
        self._copy: list[torch.Tensor] | None = None  # the weights at the last mark
        self._told = False  # that no step is counted
        self.changes = False  # code has changed them in (1) or (2): copies are kept
        self.borrows = 0  # contexts of `borrowed` that are open

    def entered(self, params: Sequence[torch.Tensor]) -> None:
        """Take the present values as those of a version: the user's function is called."""
        self.step_ended(params)
        self._of_step = False

    def step_ended(self, params: Sequence[torch.Tensor]) -> None:
        """Take the present values as those of a version: a step has ended."""
        self._last, self._before_gradient, self._of_step = _counters(params), False, True
        self._keep(params, self.changes)

    def first_gradient(self, params: Sequence[torch.Tensor]) -> None:
        """Take the present values as those that the gradients of an iteration belong to."""
        now = _counters(params)
        self._before_gradient = now != self._last and not self.borrows
        self._last, self._marked = now, True
        if self._before_gradient:
            if self._of_step:
                self._changed(params, "after step()")
            self._keep(params, self._within)

    def step_begins(self, params: Sequence[torch.Tensor]) -> None:
        if self.borrows or _counters(params) == self._last:
            return
        self._noise = self._noise or self._before_gradient
        self._within = True
        self._changed(params, "between gradients")

    def stepless(self, params: Sequence[torch.Tensor], gradients: int) -> None:
        """Report, once, that weights change between so many gradients of a job that has made no step."""
        if gradients > 1 and not self._told and not self.borrows and _counters(params) != self._last:
            self._told = True
            print(f"spotfleet: {gradients} gradients were reduced and the weights have changed, but step() of the "
                  "distributed optimizer has not been called: no step is counted, nothing is committed, and a job that "
                  "goes on like this ends after 0 steps. Let step() change the weights, also where the optimizer has "
                  "methods of its own for it, such as second_step(). See docs/commit.md, Code that changes weights by "
                  "itself", file=sys.stderr, flush=True)

    def _changed(self, params: Sequence[torch.Tensor], where: str) -> None:
        if not self.changes:
            size = sum(p.numel() * p.element_size() for p in params) / 1e6
            print(f"spotfleet: the loop changes weights {where}: a copy of them, {size:.1f} MB, is kept at each step "
                  "from now on, so that the loss of a worker stays exact. optimizer.register_step_post_hook needs "
                  "none, and `with state.borrowed():` makes one only there. See docs/commit.md, Code that changes "
                  "weights by itself", file=sys.stderr, flush=True)
        self.changes = True

    @torch.no_grad()
    def _keep(self, params: Sequence[torch.Tensor], wanted: bool) -> None:
        held, self._copy = self._copy, None
        if not wanted:
            return
        if held is None or not _fit(held, params):
            self._copy = [p.detach().clone() for p in params]
        else:
            for copied, p in zip(held, params, strict=True):
                copied.copy_(p)
            self._copy = held

    @property
    def are_borrowed(self) -> bool:
        """Whether the first gradient has come at weights that the iteration will change back."""
        return self._before_gradient and self._noise

    def have_moved(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether the weights belong to no version."""
        return self.are_borrowed or _counters(params) != self._last

    def can_put_back(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether there is a copy of the last mark, and it is enough."""
        return self._copy is not None and not self.are_borrowed and _fit(self._copy, params)

    @torch.no_grad()
    def put_back(self, params: Sequence[torch.Tensor]) -> None:
        """Restore the values of the last mark from the copy."""
        for p, copied in zip(params, self._copy or (), strict=True):
            p.copy_(copied)
        self._last = _counters(params)

    def lent(self, params: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return what `returned` needs, so that changes in a loan are not taken for those of the loop."""
        held, self._copy, self._marked = self._copy, None, False
        return _counters(params) != self._last, self._before_gradient, self._of_step, held

    def returned(self, params: Sequence[torch.Tensor], lent: tuple[Any, ...], has_steps: bool) -> None:
        """Take the present values, which are those from before the loan bit for bit, as what they were then; or as
        those of the gradient that has come in between."""
        if self._marked and not has_steps:
            self._last = _counters(params)
            self._keep(params, self._within)
            return
        moved, self._before_gradient, self._of_step, self._copy = lent
        self._last = ([], []) if moved else _counters(params)


def _counters(params: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [p._version for p in params], [p.data_ptr() for p in params]


def _fit(held: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> bool:
    return len(held) == len(params) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device for a, b in zip(held, params, strict=True))


class StateLoan:
    """Copy of the tensors of a state while code uses them for something else: see `State.borrowed`."""

    FIELDS = ("_version", "_round", "_rounds", "_open", "_position", "_sources", "_replay", "_replaying", "_made_in",
              "_computed")

    def __init__(self, state: Any) -> None:
        own = state.__dict__
        named = state._named()
        self.values = [(t, t.detach().clone()) for _, t in named if isinstance(t, torch.nn.Parameter)]
        held = {id(t): t.detach().clone() for _, t in named if not isinstance(t, torch.nn.Parameter)}
        self._buffers = [(part._buffers, key, b, held[id(b)]) for module in state._modules.values()
                         for part in module.modules() for key, b in part._buffers.items() if b is not None]
        self._fields = {name: own[name] for name in self.FIELDS}
        self._optimizers: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self._extras: dict[str, Any] = {}
        self.marks = state._marks.lent(state._trained)

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
        for tensor, value in self.values:
            tensor.copy_(value)
        for buffers, key, tensor, value in self._buffers if self.has_steps else ():
            if buffers.get(key) is tensor:
                overwrite(tensor, value)
            else:  # the forward pass has set it anew: `tensor` is memory of the script
                buffers[key] = value
        for optimizer, held, attributes in self._optimizers:
            optimizer.load_state_dict(held)
            vars(optimizer).update(attributes)
        if self.has_steps:
            state.__dict__.update(self._fields)
            vars(state._extras).update(self._extras)
