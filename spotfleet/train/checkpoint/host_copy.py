"""One copy of a checkpoint per host, fetched from its store by one worker for all workers of the job there.

    FOLDER/lock                          held while the copy changes, shared by those that read it; freed by the kernel
    FOLDER/VERSION-GENERATION-DIGEST/    its files, whole: renamed once the digest of each has been compared; in STATES
                                         the size and time of each by then
    FOLDER/VERSION-GENERATION-DIGEST.part    what has come so far; the next worker goes on with the files that are whole
    FOLDER/VERSION-GENERATION-DIGEST.read.PID    by each worker that has read it: the last one removes all

A worker that waits for another one's fetch reports that one's progress as its own. One that is killed frees the lock,
and another one goes on. Digests are compared once per host: the others compare sizes and times.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spotfleet.errors import is_full
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic, locks, private

POLL_S = 0.1
DIGEST_CHARS = 16
STATES = "states.json"
OURS = re.compile(rf"\d+-\d+-[0-9a-f]{{{DIGEST_CHARS}}}(\.part|\.read\.\d+)?")

Fetch = Callable[[Path, Callable[[int], None]], None]  # into a folder, with a callback for the bytes that have come


class CopyChanged(OSError):
    """A file of the copy has changed on this host since it was fetched: it is fetched again."""


@dataclass(frozen=True)
class HostFolder:
    """Folder that the job's workers on this host share."""

    folder: Path = Path()
    readers: int = 1  # workers here that restore


class HostCopy:
    """The copy of one checkpoint on this host, for one worker of `readers`."""

    def __init__(self, folder: Path, named: Checkpoint, readers: int) -> None:
        name = f"{named.version}-{named.generation}-{named.digest[:DIGEST_CHARS]}"
        self._folder, self._readers = folder, readers
        self._whole, self._part = folder / name, folder / f"{name}.part"

    @contextmanager
    def opened(self, fetch: Fetch, progress: Callable[[int], None]) -> Iterator[Path]:
        """Yield the folder with the copy, which nobody changes meanwhile.

        `fetch` is called if no worker has fetched it; it compares digests, and keeps the files that are whole already.
        Raises its errors, and CopyChanged where a file has changed since.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with private.open_file(self._folder / "lock", "a") as lock:
            self._bring(lock, fetch, progress)
            if not _is_unchanged(self._whole):
                if locks.take(lock, wait=True):
                    shutil.rmtree(self._whole, ignore_errors=True)
                raise CopyChanged(f"{self._whole} has changed on this host's disk")
            yield self._whole
            (self._folder / f"{self._whole.name}.read.{os.getpid()}").touch(mode=0o600)
            if len(self._marks()) >= self._readers and locks.take(lock, wait=True):  # nobody reads any more
                self._clear()

    def _bring(self, lock: IO[str], fetch: Fetch, progress: Callable[[int], None]) -> None:
        """Return with the lock shared and the copy there."""
        seen = 0
        while not (locks.take(lock, shared=True) and self._whole.is_dir()):
            if locks.take(lock):
                if not self._whole.is_dir():
                    self._clear(but=self._part)
                    self._part.mkdir(exist_ok=True, mode=0o700)
                    try:
                        fetch(self._part, progress)
                    except OSError as error:
                        if is_full(error):  # others may need the room
                            shutil.rmtree(self._part, ignore_errors=True)
                        raise
                    (self._part / STATES).write_text(json.dumps(_states(self._part)))
                    atomic.rename(self._part, self._whole, sync=False)  # the store has it
                continue
            now = _bytes_in(self._part)
            if now > seen:
                progress(now - seen)
                seen = now
            time.sleep(POLL_S)

    def _marks(self) -> list[Path]:
        return list(self._folder.glob(f"{self._whole.name}.read.*"))

    def _clear(self, but: Path | None = None) -> None:
        """Remove all copies, also those of other checkpoints, and what a killed worker left of them."""
        for path in self._folder.iterdir():
            if path == but or not OURS.fullmatch(path.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _states(folder: Path) -> dict[str, list[int]]:
    """Return the size of each file, and the time of its last change, in ns."""
    found = {path.name: path.stat() for path in folder.iterdir() if path.name != STATES}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def _is_unchanged(folder: Path) -> bool:
    try:
        return json.loads((folder / STATES).read_text()) == _states(folder)
    except (FileNotFoundError, ValueError):
        return False


def _bytes_in(folder: Path) -> int:
    found = 0
    with suppress(FileNotFoundError):  # it has just been renamed
        found = sum(path.stat().st_size for path in folder.iterdir())
    return found
