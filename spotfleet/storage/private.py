"""Folders and files that only their owner can use, under any umask."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import IO

from spotfleet.errors import UsageError


def open_file(path: Path, mode: str) -> IO[str]:
    """Open a text file; a new one gets the mode 0600."""
    return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))


def check_home(path: Path) -> None:
    """Raise UsageError if `path` exists and other users can put files there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    shown = shlex.quote(str(path))
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise UsageError(f"SPOTFLEET_HOME is {path}, which belongs to another user: they can replace the keys in it",
                         hint="set SPOTFLEET_HOME to a folder of your own, or unset it for ~/.spotfleet")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise UsageError(f"SPOTFLEET_HOME is {path}, where other users may write (mode {stat.S_IMODE(found.st_mode):o})"
                         ": they can replace the keys in it", hint=f"chmod 700 {shown}")
