"""Free space on the dispatcher's disk.

Large data (bundles, checkpoints, logs, outputs) and new jobs are refused while less than RESERVE_BYTES are free, so
that the small data which a restart needs (ledger, job records) still fits. Agents hold refused logs, checkpoints and
outputs and send them again until there is room. A `train` that is refused fails, and the user submits the job again.

The *ballast* is another room: a file that is removed at the fleet's end, so that its last records fit on a full disk.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spotfleet.errors import DiskFull, is_full, room

__all__ = ["HINT", "create_ballast", "full_message", "is_full", "refuse_if_full", "remove_ballast", "why"]

RESERVE_BYTES = 32 << 20  # left free by large data and new jobs
BALLAST, BALLAST_BYTES = "ballast", 1 << 20
HINT = ("running jobs go on by themselves, and `spotfleet train` works again, once there is room: remove files on the "
        "dispatcher's machine, or `spotfleet down` and `spotfleet up` with a larger `dispatcher`")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def create_ballast(home: Path) -> None:
    """Create the ballast, if the disk has room for it."""
    try:
        with (home / BALLAST).open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, BALLAST_BYTES)
    except OSError as error:
        if not is_full(error):
            raise


def remove_ballast(home: Path) -> None:
    """Remove the ballast at the fleet's end: a full disk must not keep machines billed."""
    (home / BALLAST).unlink(missing_ok=True)


def why(home: Path) -> str:
    """Return why data is refused; "" while there is room."""
    usage = shutil.disk_usage(home)
    return "" if usage.free >= RESERVE_BYTES else full_message(home)


def full_message(home: Path) -> str:
    usage = shutil.disk_usage(home)
    return f"the dispatcher's disk is full: {room(usage.free, usage.total)}"


def refuse_if_full(folder: Path, coming_bytes: int = 0) -> None:
    """Raise DiskFull if `coming_bytes` more would leave less than RESERVE_BYTES. `folder` exists."""
    if free_bytes(folder) - coming_bytes < RESERVE_BYTES:
        raise DiskFull(full_message(folder), hint=HINT)
