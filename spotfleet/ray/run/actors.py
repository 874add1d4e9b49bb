"""Code that runs in Ray's worker processes: one actor for each worker, which holds the runtime unchanged.

The environment is set before torch is imported. Methods run in the actor's main thread, since it has no concurrency;
while it trains it answers no other call; reports and orders use its connection to the coordinator.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spotfleet.agent.processes.zygote import modules_of
from spotfleet.ray import drains
from spotfleet.ray.installed import About, load_ray, own_python
from spotfleet.ray.run.checkpoints import remove_work_folder

WARM = ("torch", "torch._dynamo")


@dataclass(frozen=True)
class Outcome:
    """End of the user's function in one worker."""

    done: bool
    value: Any = None
    error: BaseException | None = None  # None although it failed: it cannot be pickled
    text: str = ""  # the traceback of `error`
    blame_peer: bool = False
    blame_host: bool = False


def keep_from_collector() -> None:
    """Exempt all objects of this process from later garbage collections.

    The modules of Ray and torch have 325,000. A full collection that traverses them stops training for 0.2 s of CPU
    time, and comes where objects accumulate: after a change of membership.
    """
    gc.collect()
    gc.freeze()


class TrainingActor:
    """One worker's process."""

    def __init__(self, env: dict[str, str], warm: tuple[str, ...]) -> None:
        self._begun = time.monotonic()
        os.environ.update(env)
        # Seconds, which no other worker waits for. Without the runtime's rarer modules the first loss would wait.
        for module in (*warm, *modules_of(("spotfleet.worker", "spotfleet.train"))):
            importlib.import_module(module)
        keep_from_collector()
        self._executable: Any = None

    def about(self) -> About:
        ray = load_ray()
        gpus = tuple(str(g) for g in ray.get_gpu_ids())
        node = ray.get_runtime_context().get_node_id()
        warm_s = time.monotonic() - self._begun
        return About(node, ray.util.get_node_ip_address(), os.getpid(), ray.__version__, own_python(), gpus,
                     drains.visible_gpus(), warm_s)

    def place(self, env: dict[str, str]) -> None:
        """Take a worker's name, before the runtime is used. Without WORK it writes no checkpoint."""
        os.environ.update(env)

    def create(self, cls: type | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Create the object that `execute` passes to functions."""
        self._executable = cls(*args, **kwargs) if cls is not None else None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def execute(self, function: Callable[[Any], Any]) -> Any:
        return function(self._executable)

    def train(self, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Outcome:
        """Run the function as the worker that `env` names, and end its membership."""
        self.place(env)
        keep_from_collector()  # the modules that came with the function
        outcome = _outcome(function, args, kwargs)
        self.leave()
        return outcome

    def leave(self) -> None:
        """Send the last report, and leave the group."""
        train = sys.modules.get("spotfleet.train")
        if train is not None and "spotfleet.train.runtime" in sys.modules:
            train.shutdown()
        remove_work_folder()


def _outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    try:
        return Outcome(True, function(*args, **kwargs))
    except SystemExit as leave:
        if leave.code in (None, 0):
            return Outcome(True)
        return Outcome(False, text=f"the function left with sys.exit({leave.code!r})")
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything; it becomes the outcome
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
        text = "".join(traceback.format_exception(error))
        blame = bool(getattr(error, "blame_peer", False)), bool(getattr(error, "blame_host", False))
        return Outcome(False, None, _sendable(error), text, *blame)


def _sendable(error: BaseException) -> BaseException | None:
    """Return the error if it survives pickling; some exceptions' constructors cannot repeat themselves."""
    cloudpickle = importlib.import_module("ray.cloudpickle")
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - any class of the user's; the text of the traceback stands for it
        return None
    return error
