"""Actors of an executor: asked for, ready, running, ended. One that cannot be placed is Ray's request for more nodes.

`ask` and `end` wait for answers of Ray's control service; `train` and `take` do not.

Threads: any; Ray's own put results into the queue.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from spotfleet.ray.installed import About, connected_ray
from spotfleet.ray.run.actors import WARM, TrainingActor


@dataclass(frozen=True)
class ActorSpec:
    """Resources and environment of each actor."""

    cpus: float
    gpus: float
    env: dict[str, str]
    warm: tuple[str, ...] = WARM


@dataclass(frozen=True)
class Ready:
    """An actor is placed and warm."""

    number: int
    about: About


@dataclass(frozen=True)
class CallEnded:
    """A call has ended, with its result or its error; the latter also where the actor's process has ended."""

    number: int
    result: Any = None
    error: BaseException | None = None


class ActorPool:
    """The actors of one executor, by number. Numbers are never used again."""

    def __init__(self, spec: ActorSpec, wake: Callable[[], None]) -> None:
        self._ray = connected_ray()
        self.spec, self._wake = spec, wake
        self._class = self._ray.remote(TrainingActor)
        self._handles: dict[int, Any] = {}
        self._events: queue.SimpleQueue[Ready | CallEnded] = queue.SimpleQueue()
        self._numbers = 0

    def number(self) -> int:
        """Return the number of the next actor."""
        self._numbers += 1
        return self._numbers

    def ask(self, number: int, node: str = "") -> None:
        """Ask for an actor; on `node` only, if it is given."""
        strategy: Any = "SPREAD"
        if node:
            strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        # A restarted actor would come back under a worker's old name.
        handle = self._class.options(num_cpus=self.spec.cpus, num_gpus=self.spec.gpus, max_restarts=0,
                                     scheduling_strategy=strategy).remote(self.spec.env, self.spec.warm)
        self._handles[number] = handle
        self._watch(handle.about.remote(), number, ready=True)

    def train(self, number: int, env: dict[str, str], function: Any, args: Any, kwargs: Any) -> None:
        """Run a function in the actor; `function` and the arguments may be references to objects of Ray."""
        self._watch(self._handles[number].train.remote(env, function, args, kwargs), number)

    def handle(self, number: int) -> Any:
        return self._handles[number]

    def take(self) -> list[Ready | CallEnded]:
        """Return what has happened since the last call."""
        found = []
        while True:
            try:
                found.append(self._events.get_nowait())
            except queue.Empty:
                return found

    def end(self, number: int) -> None:
        """End the actor's process, or take the request for it back."""
        handle = self._handles.pop(number, None)
        if handle is not None:
            self._ray.kill(handle, no_restart=True)

    def close(self) -> None:
        for number in list(self._handles):
            self.end(number)

    def _watch(self, ref: Any, number: int, *, ready: bool = False) -> None:
        def ended(future: Future) -> None:
            error = future.exception()
            if error is None and ready:
                self._events.put(Ready(number, future.result()))
            else:
                self._events.put(CallEnded(number, None if error else future.result(), error))
            self._wake()

        ref.future().add_done_callback(ended)


def cannot_be_sent(error: BaseException | None) -> str:
    """Return why Ray could not send a call's function, arguments or result; "" for any other error.

    The call's process lives, and another one would fail in the same way. A lost object or connection is no such reason.
    """
    exceptions = connected_ray().exceptions
    if not isinstance(error, exceptions.RayTaskError | exceptions.RaySystemError):
        return ""
    cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if isinstance(cause, OSError | exceptions.ObjectLostError | exceptions.RayActorError):
        return ""
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
