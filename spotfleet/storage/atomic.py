"""Durable changes of files and folders: every rename of the product is made here. Standard library alone.

A file that is replaced is whole or absent: it is written as a draft, then renamed into place. A rename, like a new name
or a removed one, survives a power failure only once its folder has been synced. Without `sync` a change is only safe
from the end of this process: callers choose that for data that is made again.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BY_UMASK = 0o666  # the mode of a file that others may read where the user's umask lets them
NO_SUCH_CALL = (errno.EINVAL, errno.ENOTSUP)  # a file system on which folders cannot be synced


@contextmanager
def replacing(path: Path, *, mode: int = 0o600, draft: Path | None = None, sync: bool = True,
              data_synced: bool = False) -> Iterator[BinaryIO]:
    """Open a draft that takes the place of `path` when the body ends, and is removed when the body raises.

    After a crash of this process `path` holds the old bytes or the new ones. With `sync` a power failure after the
    return leaves the new ones; with `data_synced` the body syncs the file itself. The draft of a killed process stays
    as `.NAME.DIGITS.part` in the same folder, or as `draft` if that is given. The draft's folder must exist.
    """
    digits = f"{os.getpid()}{secrets.randbelow(10**9):09d}"  # processes of two machines may have the same pid
    part = draft or path.with_name(f".{path.name}.{digits}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if sync and not data_synced:
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def write(path: Path, text: str, *, mode: int = 0o600, draft: Path | None = None, sync: bool = True) -> None:
    """Replace the file `path` by `text`, in UTF-8."""
    with replacing(path, mode=mode, draft=draft, sync=sync) as file:
        file.write(text.encode())


def rename(source: Path, target: Path, *, sync: bool = True) -> None:
    """Rename a file or folder; a file at `target` is replaced. With `sync` a power failure after the return leaves the
    new name; the data of a file must have been synced before."""
    source.replace(target)
    if sync:
        sync_folder(target.parent)
        if source.parent != target.parent:
            sync_folder(source.parent)


def remove(path: Path) -> None:
    """Remove the file `path`, if there is one, so that no power failure brings it back."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync_folder(path.parent)


def make_folder(path: Path, *, mode: int = 0o700) -> None:
    """Create the folder `path` with all missing ones above it, so that no power failure removes them again."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=mode, exist_ok=True)
        sync_folder(folder.parent)
    if not missing and not path.is_dir():
        raise FileExistsError(errno.EEXIST, "it is no folder", str(path))


def sync_folder(folder: Path) -> None:
    """Return once all names in `folder` are on the disk; at once on a file system that has no such call."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Return once `folder` is on the disk with everything in it. Its own name is its parent's, see `rename`."""
    for above, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)
            if not os.path.islink(path):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        sync_folder(Path(above))
