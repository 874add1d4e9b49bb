"""Time in a fake cloud, and the runner that makes its machines real."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

TICK_S = 0.5  # how often what waits is looked at, if nothing else happens


class FiniteCloud:
    """Base of a fake. Time is `clock`: with time.time a thread lets things fall due; with another, call `tick`.

    `runner` has methods `run`, `stop` and `terminate`, each called with `view(machine)`, one after another by a thread
    without any lock; what they raise is kept in `runner_errors`.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        self._wake = threading.Condition()
        self._closing = False
        self._orders: queue.Queue[tuple[str, Any] | None] = queue.Queue()
        self.forget_time()

    def forget_time(self) -> None:
        """Let nothing be due, and nothing run."""
        self.runner: Any = None
        self.runner_errors: list[str] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    # ---- for the fake to override

    def view(self, machine: Any) -> Any:
        """Return the machine as a runner sees it."""
        return machine

    def tick(self) -> None:
        """Let happen what is due."""
        with self.lock:
            self.run_due()

    def waits(self) -> bool:
        """Return whether something waits for room, so that a tick may serve it."""
        return False

    # ---- time

    def now(self) -> float:
        return self.clock()

    def later(self, at: float, what: Callable[[], None]) -> None:
        if at <= self.now():
            what()
            return
        with self._wake:
            heapq.heappush(self._due, (at, next(self._count), what))
            self._wake.notify_all()

    def run_due(self) -> None:
        while self._due and self._due[0][0] <= self.now():
            heapq.heappop(self._due)[2]()

    def noise(self) -> None:
        """Wake the thread that keeps time: what it waits for may have changed."""
        with self._wake:
            self._wake.notify_all()

    # ---- threads

    def start(self, work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work, daemon=True, name="cloud-fake")
        thread.start()
        self._threads.append(thread)

    def begin(self) -> None:
        self.start(self._run_orders)
        if self.clock is time.time:
            self.start(self._keep_time)

    def end(self) -> None:
        self._closing = True
        self._orders.put(None)
        self.noise()
        for thread in self._threads:
            thread.join(5)

    def settle(self, limit_s: float = 30.0) -> None:
        """Wait until the runner has done all that it was told, and nothing is due."""
        self.tick()
        ends = time.monotonic() + limit_s
        while self._orders.unfinished_tasks:
            if time.monotonic() > ends:
                raise TimeoutError("the runner is busy")
            time.sleep(0.005)

    def order_runner(self, what: str, machine: Any) -> None:
        if self.runner is not None:
            self._orders.put((what, self.view(machine)))

    def _run_orders(self) -> None:
        while True:
            order = self._orders.get()
            try:
                if order is None:
                    return
                what, view = order
                if self.runner is not None:
                    getattr(self.runner, what)(view)
            except Exception as error:  # noqa: BLE001 - the test looks at them
                self.runner_errors.append(f"{order}: {error!r}")
            finally:
                self._orders.task_done()

    def _keep_time(self) -> None:
        while not self._closing:
            with self._wake:
                first = self._due[0][0] - self.now() if self._due else 3600.0
                self._wake.wait(max(0.001, min(first, TICK_S if self.waits() else 3600.0)))
            if not self._closing:
                self.tick()
