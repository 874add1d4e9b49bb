"""`hvd.elastic`: the decorator, the states and the sampler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spotfleet.train import runtime
from spotfleet.train.errors import HorovodInternalError, HostsUpdatedInterrupt
from spotfleet.train.sampler import ElasticSampler
from spotfleet.train.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState",
           "run"]


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function(state, ...)` through changes of membership; it is re-entered from the top after each.

    Loop variables live in `state` and must name the batch being computed when its gradient begins. Called once in
    a script; returns the function's result, or None on a worker that joined after the others had returned.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        return runtime.current().run(function, state, args, kwargs)

    return wrapper
