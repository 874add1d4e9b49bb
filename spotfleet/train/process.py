"""This process's entry into the job (`init`) and its rank numbers, which change only between generations.

A worker that joins a running job has no place between `init` and `elastic.run`. There the numbers are those of the
place that it will take, as the dispatcher predicts it. Reading one binds the worker: it enters no generation in which
that number would be wrong, and starts anew if there will be no other. See docs/place.md.
"""

from __future__ import annotations

import sys

from spotfleet.errors import UsageError
from spotfleet.train import default_group, runtime
from spotfleet.train.data import torch_sampler


def init() -> None:
    """Enter the job; block until its first generation has formed, or, if it runs already, until the place that this
    worker will take is known."""
    torch_sampler.watch(_read)
    default_group.watch()
    current = runtime.current()
    current.init()
    if current.control is not None and current.state is None:
        current.outside.begin(current.control.update)


def shutdown() -> None:
    runtime.current().shutdown()


def is_initialized() -> bool:
    return runtime.current().initialized


def _read(name: str) -> int:
    current = runtime.current()
    if not current.initialized:
        raise UsageError("hvd.init() has not been called", hint="call hvd.init() first in the script")
    value: int = getattr(current.place, name)
    if not current.placed:
        caller = sys._getframe(2)
        current.reads.note(name, value, f"{caller.f_code.co_filename}:{caller.f_lineno}")
    return value


def rank() -> int:
    """Return this worker's rank, 0 to size() - 1."""
    return _read("rank")


def size() -> int:
    """Return the number of workers in this generation."""
    return _read("size")


def local_rank() -> int:
    """Return this worker's number among those on its host. It belongs to the slot and never changes."""
    return _read("local_rank")


def local_size() -> int:
    """Return the number of workers of this generation on this host."""
    return _read("local_size")


def cross_rank() -> int:
    """Return the number of this worker's host among the hosts with a worker of this local rank."""
    return _read("cross_rank")


def cross_size() -> int:
    return _read("cross_size")
