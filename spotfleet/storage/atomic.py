"""Files that are whole or absent: written as a draft, then renamed into place. Standard library alone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BY_UMASK = 0o666  # the mode of a file that others may read where the user's umask lets them


@contextmanager
def replacing(path: Path, *, mode: int = 0o600, draft: Path | None = None, sync: bool = True,
              sync_folder: bool = False) -> Iterator[BinaryIO]:
    """Open a draft that takes the place of `path` when the body ends, and is removed when the body raises.

    After a crash of this process `path` holds the old bytes or the new ones; with `sync` after a power failure too.
    With `sync_folder` a power failure after the return leaves the new ones. The draft of a killed process stays as
    `.NAME.DIGITS.part` in the same folder, or as `draft` if that is given. The draft's folder must exist.
    """
    digits = f"{os.getpid()}{secrets.randbelow(10**9):09d}"  # processes of two machines may have the same pid
    part = draft or path.with_name(f".{path.name}.{digits}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if sync_folder:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write(path: Path, text: str, *, mode: int = 0o600, draft: Path | None = None, sync: bool = True) -> None:
    """Replace the file `path` by `text`, in UTF-8."""
    with replacing(path, mode=mode, draft=draft, sync=sync) as file:
        file.write(text.encode())
