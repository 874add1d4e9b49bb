"""Parallel simulation runs with progress; an interrupted caller ends them at their next progress report."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeVar

REPORT_EVERY_S = 0.2  # between two progress reports of a run

Task = TypeVar("Task")
Found = TypeVar("Found")
Watch = Callable[[float], None]  # gets the finished share of a run, 0 to 1; may raise to end it
Progress = Callable[[float], None]  # gets the number of finished runs, parts of runs included


class GivenUp(Exception):
    """Error: the result of this run is no longer needed."""


def run_all(do: Callable[[Task, Watch], Found], tasks: Sequence[Task], progress: Progress, chunk_size: int,
            processes: int = 0) -> list[Found]:
    """Return the results of `do` for each of `tasks`, in their order.

    `chunk_size`: tasks that a process gets at a time, which costs one exchange of messages. `processes` 0: one for each
    core; with only one, the caller's own process runs all. It also does if another is killed, as for lack of memory.
    Exceptions of `do` are passed on.
    """
    chunks = [tasks[i:i + chunk_size] for i in range(0, len(tasks), chunk_size)]
    workers = min(processes or os.cpu_count() or 1, len(chunks))
    if workers > 1:
        with suppress(BrokenProcessPool):
            return _in_pool(do, tasks, chunks, progress, workers)
    return [do(task, _from(n, progress)) for n, task in enumerate(tasks)]


def _in_pool(do: Callable[[Task, Watch], Found], tasks: Sequence[Task], chunks: Sequence[Sequence[Task]],
             progress: Progress, workers: int) -> list[Found]:
    context = multiprocessing.get_context()
    finished, stop = context.Value("d", 0.0), context.Value("b", 0, lock=False)
    with ProcessPoolExecutor(workers, context, _begin, (finished, stop)) as pool:
        try:
            asked = [pool.submit(_run_chunk, do, chunk) for chunk in chunks]
            open_ones = set(asked)
            while open_ones:
                done, open_ones = wait(open_ones, REPORT_EVERY_S, FIRST_COMPLETED)
                for chunk in done:
                    chunk.result()
                progress(finished.value if open_ones else float(len(tasks)))
            return [found for chunk in asked for found in chunk.result()]
        except BaseException:  # running tasks end at their next report, pending ones do not start
            stop.value = 1
            pool.shutdown(cancel_futures=True)
            raise


def _from(before: int, progress: Progress) -> Watch:
    return lambda share: progress(before + min(1.0, share))


# ---- in the processes

_shared: list[Any] = []  # set in each process: the count of finished runs of all processes, and a flag to stop


def _begin(finished: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets the signal too, and stops us
    _shared[:] = [finished, stop]


def _run_chunk(do: Callable[[Task, Watch], Found], tasks: Sequence[Task]) -> list[Found]:
    found = []
    for task in tasks:
        count = _Count()
        found.append(do(task, count))
        count.add(1.0)
    return found


class _Count:
    """Counter for the finished share of all processes, updated seldom; raises GivenUp once the caller has stopped."""

    def __init__(self) -> None:
        self.share, self.reported_at = 0.0, time.monotonic()

    def __call__(self, share: float) -> None:
        if _shared[1].value:
            raise GivenUp
        now = time.monotonic()
        if share > self.share and now - self.reported_at >= REPORT_EVERY_S:
            self.reported_at = now
            self.add(min(1.0, share))

    def add(self, share: float) -> None:
        with _shared[0].get_lock():
            _shared[0].value += share - self.share
        self.share = share
