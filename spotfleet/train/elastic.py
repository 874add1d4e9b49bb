"""`hvd.elastic`: the decorator, the states, what yields samples, and what a change of the world size does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.errors import HorovodInternalError, HostsUpdatedInterrupt
from spotfleet.train.micro import micro_batches
from spotfleet.train.resize import Progress, Resize
from spotfleet.train.sampler import ElasticSampler
from spotfleet.train.seeded import seeded
from spotfleet.train.state import ObjectState, State, TorchState
from spotfleet.train.stream import ElasticIterable

__all__ = ["ElasticIterable", "ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState",
           "Progress", "Resize", "State", "TorchState", "micro_batches", "run", "seeded"]


def run(function: Callable[..., Any] | None = None, *, resize: object = None) -> Callable[..., Any]:
    """Run `function(state, ...)` through changes of membership; it is re-entered from the top after each.

    Loop variables live in `state` and must name the batch being computed when its gradient begins. Called once in
    a script; returns the function's result, or None on a worker that joined after the others had returned.

    `@run(resize=...)` says what a change of the world size does: a policy's name, an `elastic.Resize`, or a function
    of the `Progress` that returns the wanted world size. It goes before the fleet file's `resize`.
    """
    if function is None:
        return functools.partial(run, resize=resize)
    if not callable(function):
        raise UsageError(f"elastic.run: {function!r} is no function", hint='write @elastic.run(resize="scale-lr")')

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        return runtime.current().run(function, state, args, kwargs, resize)

    return wrapper
