"""Time that passes only when nobody has anything to do: for event loops, and for modules that ask `time`."""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from spotfleet.providers.local.inprocess import ManualClock


class MovedTime:
    """Stands for the module `time`."""

    def __init__(self, clock: ManualClock, sleep: Callable[[float], None]) -> None:
        self._clock, self._begun, self.sleep = clock, clock.now, sleep

    def time(self) -> float:
        return self._clock.now

    def monotonic(self) -> float:
        return 1000.0 + self._clock.now - self._begun

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits by moving the clock."""

    clock: ManualClock

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready and timeout:
            self.clock.advance(timeout + 1e-6)
        return ready


class MovedLoop(asyncio.SelectorEventLoop):
    def __init__(self, moved: MovedTime, clock: ManualClock) -> None:
        selector = _Selector()
        selector.clock = clock
        super().__init__(selector)
        self.time = moved.monotonic  # type: ignore[method-assign]
        self.set_default_executor(Inline())


class Inline(ThreadPoolExecutor):
    """Does its work at once, so that nothing happens side by side."""

    def __init__(self, *_: object) -> None:
        super().__init__(1)

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future:
        done: Future = Future()
        try:
            done.set_result(work(*args, **options))
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            done.set_exception(error)
        return done


@contextmanager
def moved(shim: MovedTime) -> Iterator[None]:
    """`shim` instead of `time` in every module of ours that is loaded, and no threads."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("spotfleet.") and getattr(module, "time", None) is time:
                patches.enter_context(patch.object(module, "time", shim))
            if name.startswith("spotfleet.dispatcher.") and hasattr(module, "ThreadPoolExecutor"):
                patches.enter_context(patch.object(module, "ThreadPoolExecutor", Inline))
        yield
