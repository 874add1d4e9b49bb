"""Check for a full disk on this host: a failure caused by it is not the worker's own."""

from __future__ import annotations

import shutil
from pathlib import Path

from spotfleet.errors import DiskFull, is_full, room

FULL_BYTES = 4 << 20


def why(folder: Path) -> str:
    """Explain that the disk is full; "" while there is room."""
    usage = shutil.disk_usage(folder)
    if usage.free >= FULL_BYTES:
        return ""
    return f"this host's disk is full: {room(usage.free, usage.total)}"


def as_disk_full(error: OSError, folder: Path) -> OSError | DiskFull:
    """Return DiskFull if `error` means a full disk, else `error`.

    DiskFull is no network error, so callers do not retry it at once.
    """
    if not is_full(error):
        return error
    return DiskFull(why(folder) or f"this host's disk is full: {error.strerror}", hint="another host is tried")
