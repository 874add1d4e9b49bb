"""This process's entry into the job (`init`) and its rank numbers, which change only between generations."""

from __future__ import annotations

from spotfleet.errors import UsageError
from spotfleet.train import runtime
from spotfleet.worker import member


def init() -> None:
    """Enter the job; block until its first generation has formed, or return at once if the job is running already."""
    current = runtime.current()
    current.init()
    if current.control is not None and current.state is None:
        current.outside.begin(current.control.update)


def shutdown() -> None:
    current = runtime.current()
    if current.control is not None and current.initialized and current.outside.steps:
        current.control.update()  # sends their final number
    current.shutdown()


def is_initialized() -> bool:
    return runtime.current().initialized


def _place() -> member.RankInfo:
    current = runtime.current()
    if not current.initialized:
        raise UsageError("hvd.init() has not been called", hint="call hvd.init() first in the script")
    return current.place


def rank() -> int:
    """Return this worker's rank. Like the other numbers, it is provisional before elastic.run on a worker that joined a
    running job."""
    return _place().rank


def size() -> int:
    return _place().size


def local_rank() -> int:
    return _place().local_rank


def local_size() -> int:
    return _place().local_size


def cross_rank() -> int:
    return _place().cross_rank


def cross_size() -> int:
    return _place().cross_size
