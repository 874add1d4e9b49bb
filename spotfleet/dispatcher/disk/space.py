"""Free space on the dispatcher's disk.

Large data (bundles, checkpoints, logs, outputs) and new jobs are refused while less than RESERVE_BYTES are free, so
that the small data which a restart needs (ledger, job records) still fits. Agents hold refused logs, checkpoints and
outputs and send them again until there is room. A `train` that is refused fails, and the user submits the job again.

Other programs may fill that room, too, so two kinds of files keep some: the *ballast* is removed at the fleet's end, so
that its last records fit on a full disk; a *spare* is removed where a job's record finds no room, since its workers get
no orders before that is written. A record replaces another of about its size, so one spare lasts.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spotfleet.errors import DiskFull, is_full, room

__all__ = ["HINT", "create_ballast", "create_spares", "full_message", "is_full", "refuse_if_full", "remove_ballast",
           "remove_spare", "why"]

RESERVE_BYTES = 32 << 20  # left free by large data and new jobs
RESERVE_FILES = 200  # so many more files must fit, where the file system limits their number
BALLAST, BALLAST_BYTES = "ballast", 1 << 20
SPARES, SPARE_BYTES = ("spare-0", "spare-1", "spare-2", "spare-3"), 256 << 10
HINT = ("running jobs go on by themselves, and `spotfleet train` works again, once there is room: remove files on the "
        "dispatcher's machine, or `spotfleet down` and `spotfleet up` with a larger `dispatcher`")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def create_ballast(home: Path) -> None:
    """Create the ballast, if the disk has room for it."""
    _create(home / BALLAST, BALLAST_BYTES)


def remove_ballast(home: Path) -> None:
    """Remove the ballast at the fleet's end: a full disk must not keep machines billed."""
    (home / BALLAST).unlink(missing_ok=True)


def create_spares(home: Path) -> None:
    """Create the spares that are missing, if the disk has room."""
    missing = [home / name for name in SPARES if not (home / name).exists()]
    if missing and not why(home):
        for path in missing:
            _create(path, SPARE_BYTES)


def remove_spare(home: Path) -> bool:
    """Remove a spare, and with it a file and its bytes; return False where none is left."""
    for name in SPARES:
        try:
            (home / name).unlink()
        except FileNotFoundError:
            continue
        return True
    return False


def _create(path: Path, size_bytes: int) -> None:
    try:
        with path.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        if not is_full(error):
            raise


def _has_files(folder: Path, least: int) -> bool:
    """Return whether `least` more files fit. Some file systems have no limit and report 0 in all."""
    found = os.statvfs(folder)
    return found.f_files == 0 or found.f_favail >= least


def why(home: Path) -> str:
    """Return why data is refused; "" while there is room."""
    room_left = free_bytes(home) >= RESERVE_BYTES and _has_files(home, RESERVE_FILES)
    return "" if room_left else full_message(home)


def full_message(home: Path) -> str:
    usage = shutil.disk_usage(home)
    if usage.free >= RESERVE_BYTES and not _has_files(home, RESERVE_FILES):
        found = os.statvfs(home)
        return f"the dispatcher's disk is full: {found.f_favail:,} of {found.f_files:,} files (inodes) free"
    return f"the dispatcher's disk is full: {room(usage.free, usage.total)}"


def refuse_if_full(folder: Path, coming_bytes: int = 0) -> None:
    """Raise DiskFull if `coming_bytes` more would leave less than RESERVE_BYTES, or if few files fit. `folder` exists.
    """
    if free_bytes(folder) - coming_bytes < RESERVE_BYTES or not _has_files(folder, RESERVE_FILES):
        raise DiskFull(full_message(folder), hint=HINT)
