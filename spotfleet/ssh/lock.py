"""A lock that is a file, and leaves none."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LOOK_S = 0.02


@contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Held by one thread of one process at a time; it ends with its process. Raises TimeoutError."""
    deadline = time.monotonic() + wait_s
    while (file := _take(path)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"another command holds {path}")
        time.sleep(LOOK_S)
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits for it sees that it is gone, and makes a new one


def _take(path: Path) -> TextIO | None:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None
