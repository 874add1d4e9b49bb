"""Calls of the user's function: things outside the state that an earlier call has left behind.

    call 1: hooks before h, at its first gradient h + a
    call 2: hooks before h + a, at its first gradient h + 2a: they would act twice, so it ends with an error
            a global tensor that call 1 has bound anew, or an argument that it has: reported

Threads: the main thread, or an autograd thread while the main thread waits in backward().
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from spotfleet.errors import UsageError
from spotfleet.train.comm.script_lines import bound_in_loops, place_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
         "_post_accumulate_grad_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
MOST = 16  # tensors in a tuple or list that is taken for a batch

Hooks = dict[tuple[str, str], list[Any]]  # by the name of what has them, and their kind


class FunctionCalls:
    """The calls of one function."""

    def __init__(self, function: Any) -> None:
        self._function, self._arguments = getattr(function, "func", function), getattr(function, "args", ())
        self._before: Hooks = {}  # hooks as the present call began
        self._first: tuple[Hooks, Hooks] | None = None  # as the first call began, and at its first gradient
        self._waits = False  # for the first gradient of a call
        self._tensors: dict[str, Any] | None = None  # global tensors as the last call began
        self._reported = False

    def begins(self, state: Any) -> None:
        """Note that the function is called next."""
        self._before, self._waits = _hooks(state), True
        own, now = {id(t) for _, t in state._named()}, dict(self._globals())
        before, self._tensors = self._tensors, {n: _marks(v) for n, v in now.items() if own.isdisjoint(map(id, v))}
        if before is None or self._reported or state._position.version == 0:
            return
        changed = [n for n, m in self._tensors.items() if n in before and _differ(before[n], m)]
        code = getattr(self._function, "__code__", None)
        arguments = dict(zip(code.co_varnames, self._arguments, strict=False)) if code is not None else {}
        changed += bound_in_loops(code, [n for n, v in arguments.items() if _tensors(v)])
        if changed:
            self._reported = True
            print(f"spotfleet: the function is called again, but {', '.join(changed)} (outside of the state) is not "
                  "what the iteration had the first time, as where a batch is drawn ahead and the first one before "
                  "elastic.run. Draw it in the iteration that uses it, or keep it in the state. See docs/commit.md, "
                  "Random numbers", file=sys.stderr, flush=True)

    def gradient_begins(self, state: Any) -> None:
        """Raise UsageError at a call's first gradient if it has added the hooks of the first call again."""
        if not self._waits:
            return
        self._waits, now = False, _hooks(state)
        if self._first is None:
            self._first = self._before, now
            return
        first, then = self._first
        for key, hooks in now.items():
            added, more = (len(b.get(key, ())) - len(a.get(key, ())) for a, b in ((first, then), (self._before, now)))
            if added > 0 and more > 0 and len(self._before.get(key, ())) >= len(then[key]):
                raise UsageError(f"the function has been called again and has registered hooks of {key[0]} again, so "
                                 f"that they act twice: {place_of(hooks[-1])}",
                                 hint="register them before elastic.run calls the function, or remove them when it "
                                      "ends: `finally: handle.remove()`")

    def _globals(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield the tensors in variables of the function's module and of functions around it."""
        function = self._function
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
        around = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=False) if _is_set(c)} \
            if code is not None else {}
        for name, value in {**getattr(function, "__globals__", {}), **around}.items():
            if found := _tensors(value):
                yield name, found


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch: `value` itself, or in a tuple or list; none with a graph."""
    parts = value if type(value) in (tuple, list) and len(value) <= MOST else [value]
    return [t for t in parts if isinstance(t, torch.Tensor) and t.grad_fn is None]


def _marks(tensors: list[torch.Tensor]) -> list[Any]:
    return [(weakref.ref(t), t._version) for t in tensors]


def _differ(a: list[Any], b: list[Any]) -> bool:
    return len(a) != len(b) or any(one() is not other() or v != w
                                   for (one, v), (other, w) in zip(a, b, strict=True))


def _hooks(state: Any) -> Hooks:
    """Return the script's hooks on modules, parameters and optimizers of the state."""
    found: Hooks = {}
    parts = [(path, part) for n, m in state._modules.items() for path, part in m.named_modules(prefix=f"state.{n}")]
    params = [(f"state.{name}", t) for name, t in state._named() if isinstance(t, torch.nn.Parameter)]
    for name, thing in (*parts, *params, *((f"state.{n}", o) for n, o in state._optimizers.items())):
        for kind in HOOKS:
            hooks = getattr(thing, kind, None)
            own = [h for h in (hooks or {}).values() if not str(getattr(h, "__module__", "")).startswith("spotfleet")]
            if own:
                found[name, kind] = own
    return found
