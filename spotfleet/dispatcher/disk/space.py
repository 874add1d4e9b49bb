"""Free space on the dispatcher's disk.

Large data (bundles, checkpoints, logs, outputs) is refused while less than RESERVE_BYTES are free, so that the small
data which a restart needs (ledger, job records) still fits. Senders hold refused data and try again: nothing is lost
while the disk is full, and everything continues by itself when there is room again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spotfleet.errors import DiskFull, is_full, room

__all__ = ["full", "is_full", "refuse_if_full", "release_reserve", "reserve", "why"]

RESERVE_BYTES = 32 << 20
BALLAST, BALLAST_BYTES = "ballast", 1 << 20
HINT = ("it goes on by itself once there is room: remove files on the dispatcher's machine, or `spotfleet down` and "
        "`spotfleet up` with a larger `dispatcher`")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def reserve(home: Path) -> None:
    """Reserve room for the records of the fleet's end, if there is any."""
    try:
        with (home / BALLAST).open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, BALLAST_BYTES)
    except OSError as error:
        if not is_full(error):
            raise


def release_reserve(home: Path) -> None:
    """Free the reserved room at the fleet's end: a full disk must not keep machines billed."""
    (home / BALLAST).unlink(missing_ok=True)


def why(home: Path) -> str:
    """Return why data is refused; "" while there is room."""
    usage = shutil.disk_usage(home)
    return "" if usage.free >= RESERVE_BYTES else full(home)


def full(home: Path) -> str:
    usage = shutil.disk_usage(home)
    return f"the dispatcher's disk is full: {room(usage.free, usage.total)}"


def refuse_if_full(folder: Path, coming_bytes: int = 0) -> None:
    """Raise DiskFull if `coming_bytes` more would leave less than the reserve. `folder` exists."""
    if free_bytes(folder) - coming_bytes < RESERVE_BYTES:
        raise DiskFull(full(folder), hint=HINT)
