"""Changes to weights and optimizer state that no step has made, and copies that undo them.

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

The state of optimizers is marked likewise. A value of it that code has replaced is put back from a reference. Of one
that was changed in place there must be a copy, or it is all zeros now: code that runs again will set it to those again.
No forward pass reads optimizer state, so what an iteration changes before its gradient, and has changed there the first
time, is put back at that gradient.

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from spotfleet.train.state.buffers import overwrite
from spotfleet.train.state.plain import attributes_of, put_attributes

_COUNTER = attrgetter("_version")

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


Place = tuple[int, Any, str]  # number of the optimizer, key in its state, and for a parameter the key of the value


class StateMarks:
    """The values of the optimizers' `state`, as at the last step and at the gradient that followed."""

    def __init__(self) -> None:
        self._held: list[dict[Any, Any]] | None = None  # values by reference, without their containers; None: in a step
        self._values: list[Any] = []
        self._counts: list[int] = []
        self._flat = False  # all of them are tensors
        self._copies: dict[int, torch.Tensor] = {}  # by id of the tensor
        self._after: set[str] = set()  # names that code changes in place between a step and a gradient
        self._within: set[str] = set()  # and between that and the step
        self._of_step = False
        self._expected: tuple[str, ...] | None = None  # `touched` of the iteration that is computed again
        self.touched: tuple[str, ...] = ()  # names that code has changed between the last step and the gradient
        self.changes = False

    def entered(self, states: Sequence[Any], expected: tuple[str, ...] | None) -> None:
        """Take the present values as those of a version. `expected`: names that the iteration, if it is computed again,
        had changed before its gradient."""
        self._take(states, expected or ())
        self._of_step, self._expected = False, expected

    def step_ended(self, states: Sequence[Any]) -> None:
        self._take(states, self._after)
        self._of_step, self._expected = True, None

    def first_gradient(self, states: Sequence[Any]) -> None:
        """Take the present values as those of a gradient, but for changes of an iteration that is computed again."""
        changed, in_place = self._changed(states)
        expected, self._expected = self._expected, None
        if expected is None:
            self.touched = tuple(sorted(changed))
        else:
            self.touched = expected
            self._write(states, changed & set(expected))
        if changed and self._of_step:
            self._seen(states, in_place, self._after, "after step()")
        if changed or self._within:
            self._take(states, self._within)

    def step_begins(self, states: Sequence[Any]) -> None:
        if self._changed_in_place():
            self._seen(states, self._changed(states)[1], self._within, "between gradients")
        self._held, self._values = None, []  # a step may replace them, and their memory is its own

    def have_moved(self, states: Sequence[Any]) -> bool:
        """Return whether the values belong to no version."""
        return self._held is not None and not self._is_as_marked(*_values_of(states)[:2])

    def can_put_back(self, states: Sequence[Any]) -> bool:
        """Return whether there is a copy of all that has changed in place, or zeros need none."""
        return all(id(v) in self._copies or not v.any() for v in self._changed_in_place())

    def put_back(self, states: Sequence[Any]) -> None:
        """Restore the values of the last mark."""
        self._write(states, None)
        self._values, self._counts, self._flat = _values_of(states)

    def lent(self, states: Sequence[Any]) -> bool:
        """Return what `returned` needs."""
        return self.have_moved(states)

    def returned(self, states: Sequence[Any], moved: bool, has_steps: bool) -> None:
        """Take the present values, which are those from before the loan, as what they were then."""
        if has_steps:
            self._take(states, ())
            if moved:
                self._counts = []

    def _is_as_marked(self, values: list[Any], counts: list[int]) -> bool:
        return counts == self._counts and all(map(is_, values, self._values))

    def _changed_in_place(self) -> list[torch.Tensor]:
        if self._flat and [*map(_COUNTER, self._values)] == self._counts:
            return []
        return [v for v, count in zip(self._values, self._counts, strict=False)
                if isinstance(v, torch.Tensor) and not v.is_inference() and v._version != count]

    def _changed(self, states: Sequence[Any]) -> tuple[set[str], set[str]]:
        """Return the names of values that differ from those of the last mark, and of these that have in place."""
        if self._is_as_marked(*_values_of(states)[:2]):
            return set(), set()
        then, now = dict(_places(self._held or ())), dict(_places(states))
        moved = {id(v) for v in self._changed_in_place()}
        in_place = {p for p, value in then.items() if any(id(v) in moved for v in _leaves(value))}
        replaced = {p for p in {*then, *now} if p not in then or p not in now
                    or [*map(id, _leaves(then[p]))] != [*map(id, _leaves(now[p]))]}
        return {_name(p) for p in in_place | replaced}, {_name(p) for p in in_place}

    def _seen(self, states: Sequence[Any], names: set[str], known: set[str], where: str) -> None:
        self.changes = True
        if names - self._after - self._within:
            size = sum(v.numel() * v.element_size() for p, value in _places(states) if _name(p) in names
                       for v in _leaves(value) if isinstance(v, torch.Tensor)) / 1e6
            print(f"spotfleet: the loop changes {', '.join(sorted(names))} of the optimizer's state {where}: a copy, "
                  f"{size:.1f} MB, is kept at each step from now on, so that the loss of a worker stays exact. "
                  "optimizer.register_step_post_hook needs none. See docs/commit.md, Code that changes weights by "
                  "itself", file=sys.stderr, flush=True)
        known |= names

    @torch.no_grad()
    def _take(self, states: Sequence[Any], names: Collection[str]) -> None:
        """Mark the present values, and copy those of these names."""
        self._values, self._counts, self._flat = _values_of(states)
        self._held = [{k: held.copy() if self._flat else _shell(held) for k, held in state.items()} for state in states]
        last, self._copies = self._copies, {}
        for place, value in _places(self._held) if names else ():
            for v in _leaves(value) if _name(place) in names else ():
                if isinstance(v, torch.Tensor):
                    memory = last.get(id(v))
                    fits = memory is not None and _fit([memory], [v])
                    self._copies[id(v)] = memory.copy_(v) if memory is not None and fits else v.detach().clone()

    @torch.no_grad()
    def _write(self, states: Sequence[Any], names: set[str] | None) -> None:
        """Write the marked values back: all, or those of these names."""
        wanted = [p for p, _ in _places(states) if names is None or _name(p) in names]
        for number, key, name in wanted:
            del (states[number][key] if name else states[number])[name or key]
        moved = {id(v) for v in self._changed_in_place()}
        for place, value in _places(self._held or ()):
            if names is None or _name(place) in names:
                number, key, name = place
                (states[number].setdefault(key, {}) if name else states[number])[name or key] = _shell(value)
                for v in _leaves(value):
                    if id(v) in moved and id(v) in self._copies:
                        v.copy_(self._copies[id(v)])


def _values_of(states: Sequence[Any]) -> tuple[list[Any], list[int], bool]:
    """Return all values, torch's counters of changes, and whether all are tensors, one dict for each parameter."""
    try:
        values = [v for state in states for held in state.values() for v in held.values()]
        return values, [*map(_COUNTER, values)], True
    except (AttributeError, RuntimeError):  # numbers, containers, tensors made in inference_mode()
        values = [v for state in states for v in _leaves(state)]
        counted = [isinstance(v, torch.Tensor) and not v.is_inference() for v in values]
        return values, [v._version if c else 0 for v, c in zip(values, counted, strict=True)], False


def _places(states: Sequence[Any]) -> Iterator[tuple[Place, Any]]:
    for number, state in enumerate(states):
        for key, held in state.items():
            if isinstance(key, torch.Tensor) and type(held) is dict:
                yield from (((number, key, name), value) for name, value in held.items())
            else:
                yield (number, key, ""), held


def _name(place: Place) -> str:
    return str(place[2] or place[1])


def _leaves(value: Any) -> Iterator[Any]:
    parts = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else None
    if parts is None:
        yield value
    else:
        for part in parts:
            yield from _leaves(part)


def _shell(value: Any) -> Any:
    """Return `value` with containers of its own, and the same things in them."""
    if type(value) is dict:
        return {key: _shell(part) for key, part in value.items()}
    return type(value)(map(_shell, value)) if type(value) in (list, tuple) else value


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
        self.touches = state._touches.lent(state._optimizer_states)

    @property
    def has_steps(self) -> bool:
        return bool(self._optimizers)

    def before_step(self, state: Any) -> None:
        """Also keep the optimizers' state, before the first step."""
        if not self._optimizers:
            self._optimizers = [(o, copy.deepcopy(o.state_dict()), attributes_of(o))
                                for o in state._all_optimizers.values()]
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
            put_attributes(optimizer, attributes)
        if self.has_steps:
            state.__dict__.update(self._fields)
            vars(state._extras).update(self._extras)
