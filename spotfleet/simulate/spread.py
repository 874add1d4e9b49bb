"""Runs on all cores: counted while they last, and given up at once when the caller is interrupted."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any, TypeVar

TELL_S = 0.2  # between two words about runs that go on

Task = TypeVar("Task")
Found = TypeVar("Found")
Watch = Callable[[float], None]  # told which share of a run is over, 0 to 1; may raise to end it
Progress = Callable[[float], None]  # told how many runs are over, parts of runs included


class GivenUp(Exception):
    """Nobody waits for this run any more."""


def spread(do: Callable[[Task, Watch], Found], tasks: Sequence[Task], progress: Progress, at_once: int,
           processes: int = 0) -> list[Found]:
    """What `do` finds for each of `tasks`, in their order; a process does `at_once` of them before it reports.

    `processes` 0: one for each core. What `do` raises goes on.
    """
    pieces = [tasks[i:i + at_once] for i in range(0, len(tasks), at_once)]
    workers = min(processes or os.cpu_count() or 1, len(pieces))
    if workers <= 1:
        return [do(task, _from(n, progress)) for n, task in enumerate(tasks)]
    context = multiprocessing.get_context()
    over, stop = context.Value("d", 0.0), context.Value("b", 0, lock=False)
    with ProcessPoolExecutor(workers, context, _begin, (over, stop)) as pool:
        try:
            asked = [pool.submit(_piece, do, piece) for piece in pieces]
            open_ones = set(asked)
            while open_ones:
                done, open_ones = wait(open_ones, TELL_S, FIRST_COMPLETED)
                for piece in done:
                    piece.result()
                progress(over.value if open_ones else float(len(tasks)))
            return [found for piece in asked for found in piece.result()]
        except BaseException:  # what goes on ends at its next word, what has not begun is not begun
            stop.value = 1
            pool.shutdown(cancel_futures=True)
            raise


def _from(before: int, progress: Progress) -> Watch:
    return lambda share: progress(before + min(1.0, share))


# ---- in the processes

_shared: list[Any] = []  # of this process: runs that are over, of all processes; and whether to stop


def _begin(over: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is told too, and tells us
    _shared[:] = [over, stop]


def _piece(do: Callable[[Task, Watch], Found], tasks: Sequence[Task]) -> list[Found]:
    found = []
    for task in tasks:
        count = _Count()
        found.append(do(task, count))
        count.add(1.0)
    return found


class _Count:
    """Adds to what all have done, seldom; raises GivenUp once nobody waits."""

    def __init__(self) -> None:
        self.share, self.told_at = 0.0, time.monotonic()

    def __call__(self, share: float) -> None:
        if _shared[1].value:
            raise GivenUp
        now = time.monotonic()
        if share > self.share and now - self.told_at >= TELL_S:
            self.told_at = now
            self.add(min(1.0, share))

    def add(self, share: float) -> None:
        with _shared[0].get_lock():
            _shared[0].value += share - self.share
        self.share = share
