"""Drivers: scripts that `spotfleet ray submit` has sent to run beside the head. Files: `ray/cluster/drivers.py`.

They belong to the job that holds hosts for Ray, and end with it. Their folders lie in that job's.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from spotfleet.bundle.unpack import unpack
from spotfleet.codec import to_json
from spotfleet.dispatcher.core import Core, NotFound
from spotfleet.dispatcher.disk import space
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.dispatcher.disk.files import write_atomic, write_json
from spotfleet.errors import UsageError
from spotfleet.protocol.ray_cluster import DriverStart, RayDriver

FOLDER = "drivers"
ENDED = "ended"  # file in the folder of a driver that is to end
STOPPED = 143  # as a shell reports SIGTERM
MOST_DRIVERS = 1000  # in one cluster
LOG_BYTES = 1 << 20  # in one answer


class DriverDesk:
    """Drivers of the fleet's clusters, by the files that they have."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def start(self, job: str, bundles: BundleStore, bundle: str, given: DriverStart) -> str:
        """Unpack the working directory, and have the command started; return the driver's name."""
        await asyncio.to_thread(bundles.refuse_incomplete, bundle)
        space.refuse_if_full(self._core.home)
        top = self._core.jobs[job].folder / FOLDER
        number = 1 + max((int(p.name[1:]) for p in _folders(top)), default=0)
        if number > MOST_DRIVERS:
            raise UsageError(f"{MOST_DRIVERS} scripts have been submitted to this cluster",
                             hint="`spotfleet ray stop`, and start it anew")
        folder = top / f"d{number}"
        await asyncio.to_thread(_make, folder, bundles, bundle, given)
        return folder.name

    def wanted(self, job: str) -> tuple[str, ...]:
        """Return the folders of the drivers of this cluster that run, or should."""
        if job not in self._core.jobs:
            return ()
        return tuple(str(p) for p in _folders(self._core.jobs[job].folder / FOLDER)
                     if (p / "command").exists() and not (p / ENDED).exists())

    def status(self, job: str) -> tuple[RayDriver, ...]:
        """Return the drivers of this cluster, the oldest first; of the last one without a name."""
        if job not in self._core.jobs:
            return ()
        return tuple(_status(p) for p in _folders(self._core.jobs[job].folder / FOLDER)
                     if (p / "command").exists())

    def find(self, job: str, name: str) -> Path:
        """Return the folder of a driver. Raises NotFound."""
        known = {p.name: p for p in _folders(self._core.jobs[job].folder / FOLDER)} if job in self._core.jobs else {}
        if name not in known:
            raise NotFound(f"no submitted script {name[:40]!r}",
                           hint=f"this cluster has {', '.join(list(known)[-20:]) or 'none'}")
        return known[name]

    def stop(self, folder: Path) -> None:
        """Have a driver ended, also by a later dispatcher. One that has not begun never does."""
        (folder / ENDED).touch()

    @staticmethod
    def read(folder: Path, offset: int) -> tuple[bytes, bool]:
        """Return output from `offset` on, and whether that is all there will be."""
        ended = _exit_status(folder) is not None  # read first, so that output in between is not missed
        try:
            with (folder / "log").open("rb") as file:
                file.seek(offset)
                data = file.read(LOG_BYTES)
        except FileNotFoundError:
            data = b""
        return data, ended and len(data) < LOG_BYTES


def _folders(top: Path) -> list[Path]:
    found = [p for p in top.glob("d*") if p.name[1:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[1:]))


def _make(folder: Path, bundles: BundleStore, bundle: str, given: DriverStart) -> None:
    folder.mkdir(parents=True, mode=0o700)
    work = folder / "work"
    if bundle:
        unpack(bundles.path(bundle), bundles.path, work)
    work.mkdir(exist_ok=True)
    write_json(folder / "start.json", to_json(given))
    write_atomic(folder / "command", given.command)  # last: the driver starts with it


def _status(folder: Path) -> RayDriver:
    age_s = max(0.0, time.time() - (folder / "command").stat().st_mtime)
    command = (folder / "command").read_text()
    if (status := _exit_status(folder)) is None:
        return RayDriver(folder.name, command, age_s=age_s)
    state = "succeeded" if status == 0 else "stopped" if status == STOPPED else "failed"
    return RayDriver(folder.name, command, state, status, age_s)


def _exit_status(folder: Path) -> int | None:
    """Return the exit status of a driver that has ended, or that will never begin."""
    try:
        return int((folder / "exit").read_text())
    except (OSError, ValueError):
        return STOPPED if (folder / ENDED).exists() and not (folder / "begun").exists() else None
