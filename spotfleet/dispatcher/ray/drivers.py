"""Drivers: scripts that `spotfleet ray submit` has sent to run beside the head. Files: `ray/cluster/drivers.py`.

They belong to the job that holds hosts for Ray, and end with it. Their folders lie in that job's, and stay with it:
their output is part of the fleet's archive. Each has a folder among the job's outputs, which `down` copies to the user:
it is the script's SPOTFLEET_OUTPUT.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from spotfleet.bundle.unpack import unpack
from spotfleet.codec import to_json
from spotfleet.dispatcher.core import Core, NotFound
from spotfleet.dispatcher.disk import space
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.dispatcher.disk.files import write_atomic, write_json
from spotfleet.dispatcher.disk.logs import JobLogs
from spotfleet.errors import UsageError
from spotfleet.protocol.ray_cluster import DRIVER_LOG_BYTES, DRIVER_LOGS, LOST, OUTPUT, DriverStart, RayDriver

FOLDER = "drivers"
CANCELLED = "cancelled"  # file in a driver's folder, once it is to end
STOPPED = 143  # as a shell reports SIGTERM
MOST_DRIVERS = 1000  # in one cluster


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
                     if (p / "command").exists() and not (p / CANCELLED).exists())

    def status(self, job: str) -> tuple[RayDriver, ...]:
        """Return the drivers of this cluster, which may have ended, the oldest first."""
        if job not in self._core.jobs:
            return ()
        over = self._core.jobs[job].state.ended
        return tuple(_status(p, over=over) for p in _folders(self._core.jobs[job].folder / FOLDER)
                     if (p / "command").exists())

    def find(self, job: str, name: str) -> Path:
        """Return the folder of a driver. Raises NotFound."""
        known = {p.name: p for p in _folders(self._core.jobs[job].folder / FOLDER)} if job in self._core.jobs else {}
        if name not in known:
            raise NotFound(f"no submitted script {name[:40]!r}",
                           hint=f"this cluster has {', '.join(list(known)[-20:]) or 'none'}")
        return known[name]

    @staticmethod
    def stop(folder: Path) -> None:
        """Have a driver ended, unless it has ended, also by a later dispatcher. One that has not begun never does."""
        if not (folder / "exit").exists():
            write_atomic(folder / CANCELLED, "")

    def read(self, folder: Path, offset: int) -> tuple[bytes, int, bool]:
        """Return output from `offset` on, the offset of what follows, and whether that is all there will be."""
        job = self._core.jobs.get(folder.parent.parent.name)
        ended = job is None or job.state.ended or _exit_status(folder) is not None  # read before the output
        found = JobLogs(folder.parent / DRIVER_LOGS, DRIVER_LOG_BYTES).read(folder.name, offset)
        return found.data, found.next_offset, ended and found.next_offset == offset


def _folders(top: Path) -> list[Path]:
    found = [p for p in top.glob("d*") if p.name[1:].isdigit()]
    return sorted(found, key=lambda p: int(p.name[1:]))


def _make(folder: Path, bundles: BundleStore, bundle: str, given: DriverStart) -> None:
    folder.mkdir(parents=True, mode=0o700)
    work = folder / "work"
    if bundle:
        unpack(bundles.path(bundle), bundles.path, work)
    work.mkdir(exist_ok=True)
    output = folder.parents[1] / "outputs" / f"script@{folder.name}"
    output.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(folder / "start.json", to_json(replace(given, envs={OUTPUT: str(output), **given.envs})))
    write_atomic(folder / "command", given.command)  # last: the driver starts with it


def _status(folder: Path, *, over: bool) -> RayDriver:
    age_s = max(0.0, time.time() - (folder / "command").stat().st_mtime)
    command = (folder / "command").read_text()
    if (status := _exit_status(folder)) is None:
        return RayDriver(folder.name, command, "failed", LOST, age_s) if over else RayDriver(
            folder.name, command, age_s=age_s)
    cancelled = status == STOPPED or (folder / CANCELLED).exists()  # SIGKILL too, for one that ignores SIGTERM
    state = "stopped" if cancelled else "succeeded" if status == 0 else "failed"
    return RayDriver(folder.name, command, state, status, age_s)


def _exit_status(folder: Path) -> int | None:
    """Return the exit status of a driver that has ended, or that will never begin."""
    try:
        return int((folder / "exit").read_text())
    except (OSError, ValueError):
        return STOPPED if (folder / CANCELLED).exists() and not (folder / "begun").exists() else None
