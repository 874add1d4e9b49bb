"""Notes beside files whose digest was compared on this host, so that it is compared once for all who read them.

    NAME.verified    [sha256, size, time of the last change in ns] of the file NAME, when it was compared

NAME may be the folder of a checkpoint. Then the digest is that of its manifest, and size and time are sums over its
files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from spotfleet.storage import atomic

State = tuple[int, int]  # size and time of the last change in ns, of a file or summed over those of a folder


def note(path: Path, digest: str) -> None:
    """Note that the file at `path` has this sha256."""
    atomic.write(_place(path), json.dumps([digest, *state_of(path)]), sync=False)


def is_noted(path: Path, digest: str) -> bool:
    """Return whether the file has been compared with this sha256 and has not changed since."""
    try:
        return json.loads(_place(path).read_text()) == [digest, *state_of(path)]
    except (OSError, ValueError):
        return False


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one, with its note."""
    _place(path).unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def state_of(path: Path) -> State:
    """Return the state of a file or a folder of files, by which a change is noticed. OSError if there is none."""
    if not path.is_dir():
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    stats = [entry.stat() for entry in os.scandir(path)]
    return sum(s.st_size for s in stats), sum(s.st_mtime_ns for s in stats)


def _place(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")
