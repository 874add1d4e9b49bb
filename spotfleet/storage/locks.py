"""File locks between processes of one machine; the kernel frees them when their holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from spotfleet.errors import SpotfleetError
from spotfleet.storage import private

POLL_S, SLOW_POLL_S = 0.02, 0.1


def take(file: IO[str], *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False when another process holds it and the caller does not `wait`.

    A `shared` lock can have any number of holders; they exclude an exclusive one.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold a lock whose file exists only while it is held; for one thread of one process. Raises TimeoutError."""
    deadline = time.monotonic() + wait_s
    while (file := _take_new(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"another command holds {path}")
        time.sleep(POLL_S)
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # a waiting process finds it gone, and makes a new one


@contextmanager
def alone(path: Path, work: str) -> Iterator[None]:
    """Hold the lock of `locked`. Raises SpotfleetError at once if another command holds it; `work`: what that does."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path, 0.0))
        except TimeoutError:
            raise SpotfleetError(f"another command is {work}",
                                 hint="wait for its end, or name another folder") from None
        yield


def _take_new(path: Path) -> IO[str] | None:
    file = private.open_file(path, "a")
    try:
        if take(file) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except FileNotFoundError:
        pass
    file.close()
    return None


@contextmanager
def signed(path: Path, wait_s: float, waiting: Callable[[str, float], None]) -> Iterator[str]:
    """Hold a lock whose file contains its holder's pid; yields "", or that pid when it is still held after `wait_s`.

    Meanwhile `waiting` receives the pid and the seconds waited.
    """
    begun = time.monotonic()
    with private.open_file(path, "a+") as file:
        while not take(file):
            holder, waited_s = signature(file), time.monotonic() - begun
            if waited_s >= wait_s:
                yield holder
                return
            waiting(holder, waited_s)
            time.sleep(SLOW_POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield ""


def signature(file: IO[str]) -> str:
    """Read the pid in a lock file; "unknown" without one."""
    file.seek(0)
    return file.read().strip() or "unknown"
