"""Mailbox between a trial's workers and Tune: results wait here until Tune takes them. It knows nothing of Ray.

    rank 0: report -> receive -> answer                   Tune: train() -> next -> result
                        '---- waits until Tune asks for another result, or for a checkpoint ----'

So training goes on only once Tune has decided on the result, as with Ray's own `tune.report`, and a checkpoint is of
the step that was reported. The wait has a limit: a worker that waits for long would count as hanging.

Threads: `receive` is called by the threads of the control server, the rest by the trial's own. `_cv` guards all.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOLD_S = 10.0  # below membership's limit for workers that make no step


@dataclass(frozen=True)
class TrialReport:
    """One result of the function, with the path of its checkpoint if it has one."""

    metrics: dict[str, Any]
    checkpoint: str = ""


class Mailbox:
    """Reports of rank 0, and requests for checkpoints."""

    def __init__(self, next_index: int, newest: Callable[[], str], rank_0: Callable[[], str],
                 hold_s: float = HOLD_S) -> None:
        """`next_index`: the number of the trial's next checkpoint. `newest` returns the checkpoint that a function
        begins from, as text; `rank_0` the name of that worker."""
        self._cv = threading.Condition()
        self._reports: deque[TrialReport] = deque()
        self._index, self._newest, self._rank_0, self._hold_s = next_index, newest, rank_0, hold_s
        self._received = 0
        self._asked = 0  # results that Tune has asked for
        self._wanted = False  # Tune waits for a checkpoint
        self._saved = ""
        self._closed = False
        self.saves = False  # the function has passed a saver with its newest report

    def receive(self, worker: str, value: dict[str, Any]) -> Any:
        """Take one value of a worker; return the answer."""
        match value:
            case {"tune": "report"}:
                return self._report(value["metrics"], value.get("checkpoint", ""), bool(value.get("saves")))
            case {"tune": "index"}:
                with self._cv:
                    return self._next_index()
            case {"tune": "saved"}:
                with self._cv:
                    self._saved, self._wanted = value["checkpoint"], False
                    self._cv.notify_all()
                return None
            case {"tune": "restore"}:
                return self._newest()
        if worker == self._rank_0():
            self._report(value, "", False)  # logged by ray_logger
        return None

    def next(self, ended: Callable[[], bool]) -> TrialReport | None:
        """Return the next result; None once `ended` and there is none."""
        with self._cv:
            self._asked += 1
            self._cv.notify_all()
            while not self._reports:
                if ended() and not self._reports:
                    return None
                self._cv.wait(0.1)
            return self._reports.popleft()

    def save(self, ended: Callable[[], bool], limit_s: float) -> str:
        """Let the function write a checkpoint with its newest or next report; return its path, or "" without one."""
        end = time.monotonic() + limit_s
        with self._cv:
            self._saved, self._wanted = "", True
            self._cv.notify_all()
            while not self._saved and not ended() and time.monotonic() < end:
                self._cv.wait(0.1)
            self._wanted = False
            return self._saved

    def wake(self) -> None:
        with self._cv:
            self._cv.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._cv:
            self._closed = True
            self._cv.notify_all()

    def _next_index(self) -> int:
        self._index += 1
        return self._index - 1

    def _report(self, metrics: dict[str, Any], checkpoint: str, saves: bool) -> dict[str, int | None]:
        with self._cv:
            self._reports.append(TrialReport(metrics, checkpoint))
            self._received += 1
            self.saves = saves
            number = self._received
            self._cv.notify_all()
            self._cv.wait_for(lambda: self._asked > number or (saves and self._wanted) or self._closed, self._hold_s)
            return {"save": self._next_index() if saves and self._wanted else None}
