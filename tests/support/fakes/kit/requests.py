"""Requests to a fake: their log, faults by pattern, lost answers, rate limits."""

from __future__ import annotations

import fnmatch
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any


class Lost(Exception):
    """The connection dies here."""


@dataclass
class Call:
    """One request."""

    at: float
    service: str
    action: str  # "ec2:RunInstances", "compute:instances.insert"
    region: str
    principal: str
    params: dict[str, Any] = field(repr=False)
    code: str = ""  # the error's; "" if it went well, "lost" if the answer did not arrive
    status: int = 0
    dry_run: bool = False


@dataclass
class Fault:
    action: str  # a pattern
    code: str = ""
    message: str = ""
    lost: str = ""  # "before" or "after"
    delay_s: float = 0.0
    times: int | None = 1  # None: for ever


class RequestScript:
    """What a test has arranged for requests. `refusal(code, message)` makes the cloud's error."""

    def __init__(self, refusal: Callable[[str, str], Exception]) -> None:
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.buckets: dict[Hashable, tuple[float, float]] = {}  # key -> (tokens, at)
        self._refusal = refusal
        self._faults_lock = threading.Lock()

    def reset(self) -> None:
        self.calls, self.faults, self.buckets = [], [], {}

    def before(self, action: str) -> Fault | None:
        """Delay, lose or refuse a request as arranged; returns the fault for `after`."""
        fault = self._fault(action)
        if fault and fault.delay_s:
            time.sleep(fault.delay_s)
        if fault and fault.lost == "before":
            raise Lost
        if fault and fault.code:
            raise self._refusal(fault.code, fault.message or f"{fault.code}, as the test wants it")
        return fault

    @staticmethod
    def after(fault: Fault | None) -> None:
        if fault and fault.lost == "after":
            raise Lost

    def spend(self, key: Hashable, size: float, refill_s: float, now: float) -> bool:
        """Take a token of the bucket `key`, which holds `size` and gets `refill_s` a second; False: it was empty."""
        with self._faults_lock:
            left, at = self.buckets.get(key, (size, now))
            left = min(size, left + (now - at) * refill_s)
            self.buckets[key] = (left - 1 if left >= 1 else left, now)
            return left >= 1

    def _fault(self, action: str) -> Fault | None:
        with self._faults_lock:
            for fault in self.faults:
                if fault.times != 0 and fnmatch.fnmatchcase(action.lower(), fault.action.lower()):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None
