"""Parts of a version that are no tensors of a parameter: what optimizers and modules keep besides.

    values in parameter groups that step() changes     counters of schedule-free optimizers, Prodigy's estimate
    attributes of an optimizer                         plain values that have changed since the state was built
    optimizer.state under keys that are no parameters  any value
    extra state of modules                             get_extra_state() of those that define it

They go with the tensors to ranks that are behind, and into copies. In a replay they stay as the applied step left them.

Threads: the main thread.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import where_set
from spotfleet.train.state.hyper import NAMES, PLAIN, copied
from spotfleet.train.state.position import HeldTensor

GroupKey = tuple[int, str]  # index of a parameter group, and a key in it


class PlainValues:
    """Plain values of a state's optimizers and modules that belong to its version."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], modules: Mapping[str, torch.nn.Module]) -> None:
        self._optimizers, self._modules = optimizers, modules
        self._stepped: dict[str, set[GroupKey]] = {name: set() for name in optimizers}  # values that step() changes
        self._at_first = {name: attributes_of(o) for name, o in optimizers.items()}
        self._before: dict[GroupKey, Any] = {}

    def step_begins(self, optimizer: Any) -> None:
        self._before = _group_values(optimizer)

    def step_ended(self, optimizer: Any) -> None:
        """Learn which values of the parameter groups the step itself has changed."""
        before, self._before = self._before, {}
        name = next((n for n, o in self._optimizers.items() if o is optimizer), None)
        if name is not None:
            for place, value in _group_values(optimizer).items():
                if place not in before or _differ(before[place], value):
                    self._stepped[name].add(place)

    def stepped(self, name: str) -> set[GroupKey]:
        """Return the places of values that the steps of this optimizer change."""
        return self._stepped[name]

    def capture(self) -> dict[str, Any]:
        """Return a copy of all values."""
        groups, attributes, others = {}, {}, {}
        for name, optimizer in self._optimizers.items():
            groups[name] = {(i, key): portable(optimizer.param_groups[i][key]) for i, key in self._stepped[name]
                            if i < len(optimizer.param_groups) and key in optimizer.param_groups[i]}
            first = self._at_first[name]
            attributes[name] = {n: v for n, v in attributes_of(optimizer).items() if n not in first or first[n] != v}
            others[name] = {key: portable(value) for key, value in optimizer.state.items()
                            if not isinstance(key, torch.Tensor)}
        extra = {path: portable(module.get_extra_state()) for path, module in self._with_extra_state()}
        return {"groups": groups, "attributes": attributes, "others": others, "extra": extra}

    def put(self, held: dict[str, Any]) -> None:
        """Take over captured values."""
        held = copy.deepcopy(held)
        for name, optimizer in self._optimizers.items():
            for (index, key), value in held["groups"].get(name, {}).items():
                self._stepped[name].add((index, key))
                optimizer.param_groups[index][key] = localized(value)
            first = self._at_first[name]
            changed = {n for n, v in attributes_of(optimizer).items() if n not in first or first[n] != v}
            for attribute in changed - set(first):
                delattr(optimizer, attribute)
            vars(optimizer).update({n: first[n] for n in changed & set(first)} | held["attributes"].get(name, {}))
            for key in [k for k in optimizer.state if not isinstance(k, torch.Tensor)]:
                del optimizer.state[key]
            optimizer.state.update({key: localized(value) for key, value in held["others"].get(name, {}).items()})
        for path, module in self._with_extra_state():
            if path in held["extra"]:
                module.set_extra_state(localized(held["extra"][path]))

    def _with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        seen: set[int] = set()
        for top, module in self._modules.items():
            for path, part in module.named_modules(prefix=top):
                if type(part).get_extra_state is not torch.nn.Module.get_extra_state and id(part) not in seen:
                    seen.add(id(part))
                    yield path, part


def attributes_of(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's attributes that are plain values, besides those of torch and spotfleet."""
    return {n: v for n, v in vars(optimizer).items()
            if is_plain(v) and not n.startswith(("_spotfleet", "_opt_called", "_zero_grad", "_warned", "_patch"))}


def is_plain(value: Any) -> bool:
    """Return whether it is None, a number, a string, or a tuple of those."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def _group_values(optimizer: Any) -> dict[GroupKey, Any]:
    """Return plain values and tensors of the parameter groups; of a tensor also its counter of changes."""
    return {(i, key): (value, value._version) if isinstance(value, torch.Tensor) else value
            for i, group in enumerate(optimizer.param_groups) for key, value in group.items()
            if key != NAMES and (isinstance(value, torch.Tensor) or is_plain(value))}


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and a and isinstance(a[0], torch.Tensor):
        return not isinstance(b, tuple) or a[0] is not b[0] or a[1] != b[1]
    return type(a) is not type(b) or bool(a != b)


def copied_value(name: str, value: Any, live: Mapping[int, Any]) -> Any:
    """Return a copy of the script's value `name`, which refers to none of the objects `live`, by id."""
    if isinstance(value, PLAIN):
        return value
    copies: dict[int, Any] = {}
    try:
        made = copy.deepcopy(value, copies)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError, copy.Error) as error:
        raise UsageError(f"state.{name} ({where_set(name)}) cannot be copied, so no change of membership could restore "
                         f"it: {error}", hint=f"put loss.item() or loss.detach() into state.{name} instead of a tensor "
                         "that is part of a graph; keep files, writers and locks outside of the state") from error
    if not copies.keys().isdisjoint(live):
        raise UsageError(f"state.{name} ({where_set(name)}) refers to a model, a parameter or an optimizer of the "
                         "state, and a copy of it would refer to a copy of that",
                         hint=f"give {type(value).__name__} the methods state_dict() and load_state_dict(), for the "
                              f"values of its own; or keep only those in state.{name}")
    return made


class _Sample:
    """An object that holds nothing but its attributes."""


def restored(value: Any, target: Any) -> Any:
    """Return a copy of `value`. It is `target` with other contents, where it can be, so that its other names stay
    true. Tensors and arrays are never written to: they may be memory of something else."""
    kind = type(value)
    if kind is not type(target):
        return copied(value)
    memo = {id(value): target}
    if kind in (list, deque, set):
        items: Any = [copy.deepcopy(v, memo) for v in value]
        target.clear()
        target.update(items) if kind is set else target.extend(items)
    elif kind in (dict, OrderedDict, defaultdict, Counter):
        items = {copy.deepcopy(k, memo): copy.deepcopy(v, memo) for k, v in value.items()}
        target.clear()
        target.update(items)
    elif _has_only_attributes(kind):
        items = copy.deepcopy(vars(value), memo)
        vars(target).clear()
        vars(target).update(items)
    else:
        return copied(value)
    return target


def _has_only_attributes(kind: type) -> bool:
    """Return whether objects of this class have no other contents, and are copied by those."""
    own = {"__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__slots__"}
    return kind.__basicsize__ == _Sample.__basicsize__ and all(
        own.isdisjoint(vars(k)) for k in kind.__mro__ if k is not object)


def portable(value: Any) -> Any:
    """Return a copy of `value` that another process can take over."""
    return _mapped(value, lambda v: HeldTensor(v.detach().cpu().clone(), v.device.type) if isinstance(v, torch.Tensor)
                   else copy.deepcopy(v))


def localized(value: Any) -> Any:
    return _mapped(value, lambda v: v.value.to(v.device, copy=True) if isinstance(v, HeldTensor) else v)


def _mapped(value: Any, change: Any) -> Any:
    """Return `value` with `change` made to each leaf of its dicts, lists and tuples."""
    if type(value) is dict:
        return {k: _mapped(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change) for v in value)
    return change(value)
