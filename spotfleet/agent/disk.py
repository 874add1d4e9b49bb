"""Room on this host's disk: who fails for want of it has not failed by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

from spotfleet.errors import DiskFull, is_full, room

FULL_BYTES = 4 << 20


def why(folder: Path) -> str:
    """"" while there is room."""
    usage = shutil.disk_usage(folder)
    if usage.free >= FULL_BYTES:
        return ""
    return f"this host's disk is full: {room(usage.free, usage.total)}"


def told(error: OSError, folder: Path) -> OSError | DiskFull:
    """`error`, or what it means when the disk is full: then it is not the network's, and no other try helps at once."""
    if not is_full(error):
        return error
    return DiskFull(why(folder) or f"this host's disk is full: {error.strerror}", hint="another host is tried")
