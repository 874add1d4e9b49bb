"""Room on the dispatcher's disk.

What is large (bundles, checkpoints, logs, outputs) is refused while less than RESERVE_BYTES are free, so that the
little which a restart needs (ledger, job records) still fits. What is refused is held by its sender, who tries again:
nothing is lost while the disk is full, and everything goes on by itself when there is room again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spotfleet.errors import DiskFull, is_full, room

__all__ = ["full", "is_full", "lay_by", "refuse_if_full", "spend", "why"]

RESERVE_BYTES = 32 << 20
BALLAST, BALLAST_BYTES = "ballast", 1 << 20
HINT = ("it goes on by itself once there is room: remove files on the dispatcher's machine, or `spotfleet down` and "
        "`spotfleet up` with a larger `dispatcher`")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def lay_by(home: Path) -> None:
    """Set room aside for the records of the fleet's end, unless there is none any more."""
    try:
        with (home / BALLAST).open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, BALLAST_BYTES)
    except OSError as error:
        if not is_full(error):
            raise


def spend(home: Path) -> None:
    """The end has come, and a full disk must not keep machines billed."""
    (home / BALLAST).unlink(missing_ok=True)


def why(home: Path) -> str:
    """"" while there is room."""
    usage = shutil.disk_usage(home)
    return "" if usage.free >= RESERVE_BYTES else full(home)


def full(home: Path) -> str:
    usage = shutil.disk_usage(home)
    return f"the dispatcher's disk is full: {room(usage.free, usage.total)}"


def refuse_if_full(folder: Path, coming_bytes: int = 0) -> None:
    """Raise DiskFull if `coming_bytes` more would leave less than the reserve. `folder` exists."""
    if free_bytes(folder) - coming_bytes < RESERVE_BYTES:
        raise DiskFull(full(folder), hint=HINT)
