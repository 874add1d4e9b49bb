"""Activity of this process for the watchdog. It is read once a second, so that steps pay nothing for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import TypeVar

F = TypeVar("F", bound=Callable)
_waits: set[CodeType] = set()


def peer_wait(function: F) -> F:
    """Mark a function in which an engine waits for its peers; the mark adds no cost to a call."""
    _waits.add(function.__code__)
    return function


def waits_for_peers() -> bool:
    """Return whether any thread is in one of our collectives. If none is, the user's code runs, or something hangs."""
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code in _waits:
                return True
            at = at.f_back
    return False
