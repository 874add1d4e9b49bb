"""Parts of a version that are no tensors of a parameter: what optimizers and modules keep besides.

    values in parameter groups that step() changes     counters of schedule-free optimizers, Prodigy's estimate
    attributes of an optimizer                         plain values that have changed since the state was built,
                                                       tensors, and lists, dicts, sets and deques of these
    optimizer.state under keys that are no parameters  any value
    extra state of modules                             get_extra_state() of those that define it
    attributes of modules                              plain values that have changed since; to workers alone

They go with the tensors to ranks that are behind, and into copies. In a replay they stay as the applied step left them.

Threads: the main thread.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import where_set
from spotfleet.train.state.hyper import NAMES, PLAIN, copied, params_of
from spotfleet.train.state.position import HeldTensor

# Attributes of torch's and spotfleet's own
NO_ATTRIBUTES = ("_spotfleet", "_opt_called", "_zero_grad", "_warned", "_patch", "_optimizer_", "defaults",
                 "state", "param_groups")
GroupKey = tuple[int, str]  # index of a parameter group, and a key in it


class PlainValues:
    """Plain values of a state's optimizers and modules that belong to its version."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer], modules: Mapping[str, torch.nn.Module]) -> None:
        self._optimizers, self._modules = optimizers, modules
        self._stepped: dict[str, set[GroupKey]] = {name: set() for name in optimizers}  # values that step() changes
        self._at_first = {name: {n: v for n, v in attributes_of(o).items() if not _has_tensors(v)}
                          for name, o in optimizers.items()}  # attributes
        self._settings_at_first: dict[tuple[str, str], Any] = {}  # those of modules
        self._before: dict[str, dict[GroupKey, Any]] = {}
        self._left: dict[str, dict[GroupKey, Any]] = {}  # as after the last step; of tensors a copy and the counter

    def step_begins(self, optimizer: Any) -> None:
        self._before = {name: _group_values(o) for name, o in self._of(optimizer)}

    def _of(self, optimizer: Any) -> list[tuple[str, Any]]:
        """Return this optimizer of the state and those inside it, with their names."""
        top = next((n for n, o in self._optimizers.items() if o is optimizer), None)
        return [(n, o) for n, o in self._optimizers.items() if n == top or n.startswith(f"{top}.")]

    def step_ended(self, optimizer: Any) -> None:
        """Learn which values of the parameter groups the step itself has changed."""
        before, self._before = self._before, {}
        after = {name: _group_values(o) for name, o in self._of(optimizer)}
        for name, values in after.items():
            for place, value in values.items():
                if place not in before[name] or _differ(before[name][place], value):
                    self._stepped[name].add(place)
        self.note_groups(after)

    def note_groups(self, values: dict[str, dict[GroupKey, Any]] | None = None) -> None:
        """Take the values of the parameter groups as those from which code of the script goes on."""
        values = {n: _group_values(o) for n, o in self._optimizers.items()} if values is None else values
        self._left = {n: {k: (v[0].detach().clone(), v[1]) if _is_counted(v) else v for k, v in held.items()}
                      for n, held in values.items()}

    def left(self) -> dict[str, dict[GroupKey, Any]]:
        """Return the values, as of the last step, that code has changed since."""
        found = {n: {k: v for k, v in held.items() if self._has_changed(n, k, v)} for n, held in self._left.items()}
        return {n: {k: v[0] if _is_counted(v) else v for k, v in held.items()} for n, held in found.items() if held}

    def _has_changed(self, name: str, place: GroupKey, then: Any) -> bool:
        groups = self._optimizers[name].param_groups
        now = groups[place[0]].get(place[1]) if place[0] < len(groups) else None
        if isinstance(now, torch.Tensor):
            return not _is_counted(then) or now._version != then[1]
        return now is not then and (type(now) is not type(then) or bool(now != then))

    def stepped(self, name: str) -> set[GroupKey]:
        """Return the places of values that the steps of this optimizer change."""
        return self._stepped[name]

    def capture(self) -> dict[str, Any]:
        """Return a copy of all values."""
        groups, attributes, others = {}, {}, {}
        for name, optimizer in self._optimizers.items():
            groups[name] = {(i, key): portable(optimizer.param_groups[i][key]) for i, key in self._stepped[name]
                            if i < len(optimizer.param_groups) and key in optimizer.param_groups[i]}
            attributes[name] = self._changed_attributes(name)
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
            first, given = self._at_first[name], held["attributes"].get(name, {})
            changed = {n for n, v in self._changed_attributes(name).items() if not _has_tensors(v)}
            for attribute in changed - set(first) - set(given):
                delattr(optimizer, attribute)
            put_attributes(optimizer, {n: first[n] for n in changed & set(first)} | given)
            for key in [k for k in optimizer.state if not isinstance(k, torch.Tensor)]:
                del optimizer.state[key]
            optimizer.state.update({key: localized(value) for key, value in held["others"].get(name, {}).items()})
        for path, module in self._with_extra_state():
            if path in held["extra"]:
                module.set_extra_state(localized(held["extra"][path]))

    def _changed_attributes(self, name: str) -> dict[str, Any]:
        first = self._at_first[name]
        return {n: v for n, v in attributes_of(self._optimizers[name]).items() if n not in first or first[n] != v}

    def attached(self) -> None:
        """Note the attributes of modules as the script has built them."""
        self._settings_at_first = self._all_settings()

    def settings(self) -> dict[tuple[str, str], Any]:
        """Return the plain attributes of modules, `training` too, that have changed since `attached`."""
        return {at: v for at, v in self._all_settings().items()
                if at not in self._settings_at_first or _differ(self._settings_at_first[at], v)}

    def put_settings(self, held: dict[tuple[str, str], Any]) -> None:
        """Take over the attributes that another worker has changed: it may have done so in an iteration of the past."""
        parts = {path: part for top, module in self._modules.items()
                 for path, part in module.named_modules(prefix=top)}
        for (path, name), value in held.items():
            if path in parts:
                vars(parts[path])[name] = value

    def _all_settings(self) -> dict[tuple[str, str], Any]:
        return {(path, name): value for top, module in self._modules.items()
                for path, part in module.named_modules(prefix=top)
                for name, value in vars(part).items() if not name.startswith("_") and is_plain(value)}

    def _with_extra_state(self) -> Iterator[tuple[str, torch.nn.Module]]:
        seen: set[int] = set()
        for top, module in self._modules.items():
            for path, part in module.named_modules(prefix=top):
                if type(part).get_extra_state is not torch.nn.Module.get_extra_state and id(part) not in seen:
                    seen.add(id(part))
                    yield path, part


@dataclass(frozen=True)
class HeldParam:
    """A parameter of the optimizer, or its `id()`, by its number."""

    index: int
    is_id: bool


def attributes_of(optimizer: Any) -> dict[str, Any]:
    """Return copies of the optimizer's attributes, besides those of torch and spotfleet: plain values, tensors, and
    containers of these. Attributes that hold other objects, or parts of the groups or the state, are left out."""
    params = {id(p): i for i, p in enumerate(params_of(optimizer))}
    parts = [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *optimizer.state.values()]
    parts += [v for part in parts if isinstance(part, dict) for v in part.values()]
    known = {id(v) for v in parts if not is_plain(v)}
    memory = {v.untyped_storage().data_ptr() for v in (*parts, *params_of(optimizer)) if isinstance(v, torch.Tensor)}
    found = {}
    for name, value in vars(optimizer).items():
        if not name.startswith(NO_ATTRIBUTES):
            with suppress(_NotHeld):
                found[name] = _held_value(value, params, known, memory)
    return found


def put_attributes(optimizer: Any, held: dict[str, Any]) -> None:
    """Give attributes the values that `attributes_of` has returned. Containers and tensors stay the same objects."""
    params = params_of(optimizer)
    for name, value in held.items():
        setattr(optimizer, name, _merged(vars(optimizer).get(name), value, params))


class _NotHeld(Exception):
    """A value that is not taken along."""


def _held_value(value: Any, params: dict[int, int], known: set[int], memory: set[int]) -> Any:
    def held(part: Any) -> Any:
        return _held_value(part, params, known, memory)

    if id(value) in params or (type(value) is int and value in params):
        return HeldParam(params[value if type(value) is int else id(value)], type(value) is int)
    if is_plain(value):
        return value
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and value.layout is torch.strided:
        if not value.requires_grad and value.untyped_storage().data_ptr() not in memory:
            return HeldTensor(value.detach().cpu().clone(), value.device.type)
    elif id(value) not in known:
        if isinstance(value, dict):
            return {held(key): held(part) for key, part in value.items()}
        if type(value) is deque:
            return deque(map(held, value), value.maxlen)
        if type(value) in (list, tuple, set):
            return type(value)(map(held, value))
    raise _NotHeld


@torch.no_grad()
def _merged(own: Any, held: Any, params: list[torch.Tensor]) -> Any:
    """Return what `held` stands for, in the container or tensor `own` if that is of the same kind."""
    if isinstance(held, HeldParam):
        return id(params[held.index]) if held.is_id else params[held.index]
    if isinstance(held, HeldTensor):
        fits = isinstance(own, torch.Tensor) and (own.shape, own.dtype) == (held.value.shape, held.value.dtype)
        return own.copy_(held.value) if fits else localized(held)
    if isinstance(held, dict):
        own = own if isinstance(own, dict) else {}
        made = {_merged(None, k, params): v for k, v in held.items()}
        made = {k: _merged(own.get(k), v, params) for k, v in made.items()}
        own.clear()
        own.update(made)
        return own
    if isinstance(held, (list, tuple, set, deque)):
        before = list(own) if type(own) is type(held) and not isinstance(held, set) else []
        items = [_merged(o, v, params) for o, v in zip_longest(before[:len(held)], held)]
        if isinstance(held, tuple) or type(own) is not type(held):
            return deque(items, held.maxlen) if isinstance(held, deque) else type(held)(items)
        own.clear()
        (own.update if isinstance(own, set) else own.extend)(items)
        return own
    return held


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, (*value, *value.values())))
    return isinstance(value, HeldTensor) or (isinstance(value, (list, tuple, set, deque)) and any(
        map(_has_tensors, value)))


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


def _is_counted(value: Any) -> bool:
    """Return whether it is a tensor with its counter, as in `_group_values`."""
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _differ(a: Any, b: Any) -> bool:
    if _is_counted(a):
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
                         hint=_own_keywords(name, value) or
                         f"give {type(value).__name__} the methods state_dict() and load_state_dict(), for the "
                         f"values of its own; or keep only those in state.{name}")
    return made


def _own_keywords(name: str, value: Any) -> str:
    """Return the hint for a container of optimizers or models; "" for another value."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    kind = next((k for t, k in ((torch.optim.Optimizer, "optimizer"), (torch.nn.Module, "model"))
                 if parts and all(isinstance(part, t) for part in parts)), "")
    if not kind:
        return ""
    given = f"**{name}" if isinstance(value, dict) else f"**{{f'{kind}{{i}}': v for i, v in enumerate({name})}}"
    return f"give each {kind} its own keyword: TorchState({'model, ' if kind == 'optimizer' else ''}{given})"


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
    return _has_attributes(kind) and kind.__basicsize__ == _Sample.__basicsize__ and all(
        own.isdisjoint(vars(k)) for k in kind.__mro__ if k is not object)


def _has_attributes(kind: type) -> bool:
    """Return whether its objects have a `__dict__`, and are all of one size, unlike tuples."""
    return kind.__dictoffset__ != 0 and kind.__itemsize__ == 0


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
