"""Answers of a cloud, remembered for some time: one thread asks, the others wait for its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spotfleet.errors import NeedsPerson, SpotfleetError

KEPT = 512  # number of cached answers that triggers removal of old ones
FORGOTTEN_S = 600.0

T = TypeVar("T")


@dataclass
class _Kept:
    """One cached answer."""

    making: threading.Lock = field(default_factory=threading.Lock)
    value: Any = None
    error: SpotfleetError | None = None
    made_at: float = 0.0  # 0: never
    until: float = 0.0  # valid until then
    asked_at: float = 0.0

    def given(self) -> Any:
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.value


class AnswerCache:
    """Answers by key. They can all be requested again, so that a process may end at any time."""

    def __init__(self) -> None:
        self._answers_lock = threading.Lock()
        self._remembered: dict[Hashable, _Kept] = {}

    def cached(self, key: Hashable, seconds: float, make: Callable[[], T], *, failed_s: float = 0.0,
               stale_s: float = 0.0) -> T:
        """Return the result of `make` if at most `seconds` old. One thread makes it; others of the same key wait.

        If `make` fails, its last result at most `stale_s` older remains valid; else its error does, for `failed_s`.
        NeedsPerson is never cached: a person may have acted.
        """
        with self._answers_lock:
            kept = self._remembered.setdefault(key, _Kept())
            kept.asked_at = time.monotonic()
            self._forget_old(kept.asked_at)
        with kept.making:
            if time.monotonic() < kept.until:
                return kept.given()
            try:
                kept.value, kept.error = make(), None
                kept.made_at = time.monotonic()
                kept.until = kept.made_at + seconds
            except NeedsPerson:
                raise
            except SpotfleetError as error:
                now = time.monotonic()
                if not kept.made_at or now - kept.made_at > seconds + stale_s:
                    kept.error = error
                kept.until = now + failed_s
            return kept.given()

    def _forget_old(self, now: float) -> None:
        if len(self._remembered) > KEPT:
            old = [k for k, v in self._remembered.items() if now - v.asked_at > FORGOTTEN_S and v.until < now]
            for key in old:
                del self._remembered[key]

    def recent(self, key: Hashable) -> Any:
        """Return what `cached` would return from memory; None if it would call `make`, or raise."""
        with self._answers_lock:
            kept = self._remembered.get(key)
        return kept.value if kept is not None and kept.error is None and time.monotonic() < kept.until else None

    def forget(self, key: Hashable) -> None:
        with self._answers_lock:
            self._remembered.pop(key, None)
