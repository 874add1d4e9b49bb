"""A disk that forgets at a power cut everything that was not synced, for the code of this process.

Only fsync is observed: that of a folder keeps the names in it as they are then, that of a file its content. A cut
writes the tree that a pessimistic file system would come back with. sqlite syncs by itself: its files are copied as
they are, where their folder was kept.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from types import TracebackType

import pytest

TRUSTED = "ledger.db"  # and sqlite's files beside it


class ForgetfulDisk:
    """The durable state of everything that was synced since this object was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: dict[int, dict[str, int]] = {}  # folder -> its names, by inode
        self._contents: dict[int, bytes] = {}
        self._held: list[int] = []  # descriptors: an inode that is in use is not given to another file
        self._lock, self._fsync = threading.Lock(), os.fsync
        monkeypatch.setattr(os, "fsync", self._observe)

    def __enter__(self) -> ForgetfulDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def cut(self, folder: Path, into: Path) -> Path:
        """Write to the new folder `into` what is left of `folder`; its own name counts as kept."""
        with self._lock:
            self._write(folder.stat().st_ino, folder, into)
        return into

    def _observe(self, descriptor: int) -> None:
        self._fsync(descriptor)
        about = os.fstat(descriptor)
        with self._lock:
            if about.st_ino not in self._names and about.st_ino not in self._contents:
                self._held.append(os.dup(descriptor))
            if stat.S_ISDIR(about.st_mode):
                with os.scandir(f"/proc/self/fd/{descriptor}") as entries:
                    self._names[about.st_ino] = {entry.name: entry.inode() for entry in entries}
            else:
                self._contents[about.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _write(self, inode: int, now: Path, into: Path) -> None:
        into.mkdir(mode=0o700)
        names = self._names.get(inode, {})
        for name, child in names.items():
            if name.startswith(TRUSTED):
                if (now / name).exists():
                    (into / name).write_bytes((now / name).read_bytes())
            elif child in self._names or (now / name).is_dir():
                self._write(child, now / name, into / name)
            else:
                (into / name).write_bytes(self._contents.get(child, b""))
