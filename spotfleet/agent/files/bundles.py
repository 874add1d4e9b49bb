"""Preparation of a job on this host: its launch is fetched and its bundle unpacked. One folder per job.

`blobs.py` holds the bundle's blobs; a dispatcher that has lost its disk gets them back from there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.agent.files.blobs import Blobs, Progress
from spotfleet.agent.files.checkpoint_folder import CheckpointFolder
from spotfleet.agent.transfer import RETRYABLE, Transfers, retry_until_answered
from spotfleet.protocol.messages import Assignment, HeldJob, WorkerLaunch
from spotfleet.storage import atomic

log = logging.getLogger("spotfleet.agent")


@dataclass(frozen=True)
class PreparedLaunch:
    launch: WorkerLaunch
    source: Path  # the unpacked working directory, shared by the job's workers on this host


def folder_name(name: str) -> str:
    """Return the name of a job or worker as one path component."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "-"


def checkpoint_files(name: str) -> tuple[str, str]:
    """Split `JobSpec.checkpoint_dir` into a folder and a pattern for names of files in it; "" means all of them."""
    folder, _, last = name.rpartition("/")
    return (folder, last) if any(c in last for c in "*?[") else (name, "")


class Bundles:
    """Launches and working directories of this host's jobs."""

    def __init__(self, home: Path, transfers: Transfers) -> None:
        self._home = home
        self._transfers = transfers
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._launches: dict[str, WorkerLaunch] = {}  # in memory only: they hold secrets
        self._submitted_at: dict[str, float] = {}  # job -> when it was submitted, on our clock
        self._sending: asyncio.Task[None] | None = None
        self._blobs = Blobs(home, transfers)
        self._checkpoints: dict[str, CheckpointFolder] = {}

    def folder(self, job: str) -> Path:
        return self._home / "jobs" / folder_name(job)

    def forget(self, job: str) -> None:
        """Drop a job without workers here. Its files stay: it may come back."""
        self._launches.pop(job, None)
        self._blobs.release(job)
        self._blobs.release(f"{job}#checkpoints")
        self._checkpoints.pop(job, None)
        self._submitted_at.pop(job, None)

    def checkpoints(self, job: str, prepared: PreparedLaunch) -> CheckpointFolder:
        """Return the checkpoint folder of a job that is prepared here."""
        if job not in self._checkpoints:
            inside, pattern = checkpoint_files(prepared.launch.spec.checkpoint_dir)
            folder = prepared.source / inside if inside or pattern else self.folder(job) / "checkpoints"
            self._checkpoints[job] = CheckpointFolder(self._transfers, self._blobs, job, folder,
                                                      self.folder(job) / "staged", pattern)
        return self._checkpoints[job]

    def held(self, job: str, assignments: tuple[Assignment, ...]) -> HeldJob:
        """Return this host's state of `job`, for a dispatcher that does not know it."""
        launch = self._launches.get(job)
        if launch is None:
            return HeldJob(job, assignments=assignments)
        held_launch = replace(launch, age_s=time.monotonic() - self._submitted_at[job])
        bundle = launch.spec.bundle
        return HeldJob(job, held_launch, assignments, bool(bundle) and self._blobs.is_complete(bundle))

    def send(self, digests: tuple[str, ...]) -> None:
        """Upload the bundles of this host's jobs that the dispatcher has lost; it requests a failed one again."""
        wanted = {launch.spec.bundle for launch in self._launches.values()} & set(digests)
        if wanted and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send(sorted(wanted)))

    async def _send(self, bundles: list[str]) -> None:
        try:
            await self._blobs.send(bundles)
        except RETRYABLE as error:
            log.warning("bundles: %s", error or type(error).__name__)

    async def prepare(self, job: str, progress: Progress) -> PreparedLaunch:
        """Fetch the launch of `job` and unpack its bundle. Waits for the dispatcher without limit.

        `progress` receives a line of text at each step.
        """
        async with self._locks[job]:
            if job not in self._launches:
                launch = await retry_until_answered(f"launch of {job}", lambda: self._transfers.launch(job))
                self._submitted_at[job] = time.monotonic() - launch.age_s
                self._launches[job] = launch
            launch = self._launches[job]
            source = self.folder(job) / "source"
            if source.exists():
                self._blobs.need(job, launch.spec.bundle)
            else:
                await self._unpack(job, launch, source, progress)
            return PreparedLaunch(launch, source)

    async def _unpack(self, job: str, launch: WorkerLaunch, source: Path, progress: Progress) -> None:
        source.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(prefix="source-", dir=source.parent))
        try:
            if launch.spec.bundle:
                await self._blobs.fill(job, launch.spec.bundle, fresh, progress)
            atomic.rename(fresh, source, sync=False)  # unpacked again from the blobs
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # left by a bundle that did not fit


def clear_leftovers(home: Path) -> None:
    """Remove the files of an earlier agent except unpacked bundles: its workers have all ended with it."""
    for pattern in ("workers", "restore", "uploads", "staged", "source-*"):
        for folder in (home / "jobs").glob(f"*/{pattern}"):
            shutil.rmtree(folder, ignore_errors=True)
    for part in (home / "blobs").glob("*.part"):
        part.unlink(missing_ok=True)
