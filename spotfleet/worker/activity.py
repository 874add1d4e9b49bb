"""Activity of this process for the watchdog, which reads it once a second.

The waits are counted as they begin and end. To look for them in the frames of another thread that runs is not safe: it
has ended the process with a segmentation fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable)
_waits: list[None] = []  # one entry for each wait in progress, since appending is atomic


def peer_wait(function: F) -> F:
    """Mark a function in which an engine waits for its peers."""

    @functools.wraps(function)
    def waiting(*args: Any, **more: Any) -> Any:
        _waits.append(None)
        try:
            return function(*args, **more)
        finally:
            _waits.pop()

    return cast(F, waiting)


def waits_for_peers() -> bool:
    """Return whether any thread is in one of our collectives. If none is, the user's code runs, or something hangs."""
    return bool(_waits)
