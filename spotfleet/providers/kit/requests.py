"""Requests to a cloud: several at once, and no more in a second than it takes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spotfleet.errors import SpotfleetError

AT_ONCE = 8

A = TypeVar("A")
T = TypeVar("T")


def each(do: Callable[[A], T], things: Sequence[A]) -> list[T]:
    """Apply `do` to each, several in parallel; results in order; raises the first failure."""
    if len(things) < 2:
        return [do(thing) for thing in things]
    with ThreadPoolExecutor(min(len(things), AT_ONCE), thread_name_prefix="cloud") as threads:
        return list(threads.map(do, things))


def until_known(call: Callable[[], T], unknown: Callable[[SpotfleetError], bool], limit_s: float, pause_s: float,
                waiting: Callable[[], None] = lambda: None) -> T:
    """Repeat `call` while it fails as the cloud does not know yet what was just made, or still knows what was removed.

    Raises its last error after `limit_s`. `waiting` is called before each pause.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return call()
        except SpotfleetError as error:
            if not unknown(error) or time.monotonic() > deadline:
                raise
        waiting()
        time.sleep(pause_s)


class RequestPace:
    """Pace of requests: at most `at_once` together, then `per_s`.

    A cloud limits the rate of each call for the whole account: without a pace a hundred hosts at once would use up what
    others need, and wait longer after being refused.
    """

    def __init__(self, at_once: int, per_s: float) -> None:
        self._at_once, self._per_s = at_once, per_s
        self._lock = threading.Lock()
        self._next = 0.0  # monotonic time at which the next request is due

    def wait(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - (self._at_once - 1) / self._per_s)
            due, self._next = self._next, self._next + 1 / self._per_s
        if due > now:
            time.sleep(due - now)


class Paces:
    """One pace for each kind of request and place."""

    def __init__(self, at_once: int, per_s: float) -> None:
        self._lock = threading.Lock()
        self._paces: dict[Hashable, RequestPace] = defaultdict(lambda: RequestPace(at_once, per_s))

    def wait(self, what: Hashable) -> None:
        """Wait until another one of `what` is due."""
        with self._lock:
            pace = self._paces[what]
        pace.wait()
