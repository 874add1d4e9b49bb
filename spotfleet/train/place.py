"""Who this process is: `init` and the numbers it leads to. They change only between generations."""

from __future__ import annotations

from spotfleet.errors import UsageError
from spotfleet.train import member, runtime


def init() -> None:
    """Enter the job; blocks until its first generation has formed, and not at all when it is running already."""
    runtime.current().init()


def shutdown() -> None:
    runtime.current().shutdown()


def is_initialized() -> bool:
    return runtime.current().initialized


def _place() -> member.Place:
    current = runtime.current()
    if not current.initialized:
        raise UsageError("hvd.init() has not been called", hint="call hvd.init() first in the script")
    return current.place


def rank() -> int:
    """Provisional, before elastic.run, on a worker that joined a running job; so are the others."""
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
