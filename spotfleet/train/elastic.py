"""`hvd.elastic`: the `run` decorator, states, samplers and streams, and resize policies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.train.data.sampler import ElasticSampler
from spotfleet.train.data.seeded import seeded
from spotfleet.train.data.stream import ElasticIterable
from spotfleet.train.gradients.micro import micro_batches
from spotfleet.train.resize import Progress, Resize
from spotfleet.train.state.state import ObjectState, State, TorchState
from spotfleet.worker.errors import HorovodInternalError, HostsUpdatedInterrupt

if TYPE_CHECKING:
    from spotfleet.train.checkpoint.writer import Checkpointer

__all__ = ["ElasticIterable", "ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState",
           "Progress", "Resize", "State", "TorchState", "micro_batches", "run", "seeded"]


def run(function: Callable[..., Any] | None = None, *, resize: object = None,
        copy: bool = False) -> Callable[..., Any]:
    """Run `function(state, ...)` through changes of membership: after each one the function is called from its top.

    Keep the loop variables in `state`. When a gradient begins, they must name the batch that it is computed from. If
    the function changes numbers of the state before the gradient, it may be called more than once after a failure: each
    call begins with another of their earlier values, until one is right.

    A function that begins at its first batch again after a change ends with an error, if the state shows it: its
    numbers have their first values although steps were applied, or are set back to them. Only a number that starts at
    0, or a sampler that counts, shows it. Call this once in a script. It returns the function's result, or None on a
    worker that joined after the others had returned.

    `@run(resize=...)` defines the effect of a change of the world size: a policy's name, an `elastic.Resize`, or a
    function of the `Progress` that returns the wanted world size. It overrides the fleet file's `resize`.

    `@run(copy=True)` copies the state at each `commit()`, in memory. After a failure the newest copy is restored, so
    code between two commits may do with the weights what it wants. See "Jobs that copy" in docs/commit.md.
    """
    if function is None:
        return functools.partial(run, resize=resize, copy=copy)
    if not callable(function):
        raise UsageError(f"elastic.run: {function!r} is no function", hint='write @elastic.run(resize="scale-lr")')

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(function, state, *args, **kwargs)
        return runtime.current().run(call, state, resize, copy, _make_checkpointer)

    return wrapper


def _make_checkpointer(current: runtime.Runtime) -> Checkpointer:
    """Make a Checkpointer. Its import takes seconds in torch, which a script without an agent must not pay."""
    from spotfleet.train.checkpoint.writer import Checkpointer

    return Checkpointer(current)
