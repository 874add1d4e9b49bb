"""Notes beside files whose digest was compared on this host, so that it is compared once for all who read them.

    NAME.verified    [sha256, size, time of the last change in ns] of the file NAME, when it was compared
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from spotfleet.storage import atomic


def note(path: Path, digest: str) -> None:
    """Note that the file at `path` has this sha256."""
    atomic.write(_place(path), json.dumps([digest, *_state(path)]), sync=False)


def is_noted(path: Path, digest: str) -> bool:
    """Return whether the file has been compared with this sha256 and has not changed since."""
    try:
        return json.loads(_place(path).read_text()) == [digest, *_state(path)]
    except (OSError, ValueError):
        return False


def remove(path: Path) -> None:
    """Remove a file, if there is one, with its note."""
    for each in (path, _place(path)):
        each.unlink(missing_ok=True)


def _state(path: Path) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns]


def _place(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")
