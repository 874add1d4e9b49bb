"""A job on this host before its first worker: launch fetched, bundle unpacked. One folder per job.

What the bundle is made of lies in `blobs.py`: a dispatcher that has lost its disk gets it back from there.
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

from spotfleet.agent.blobs import Blobs, Say
from spotfleet.agent.transfer import TROUBLE, Transfers, patiently
from spotfleet.messages import Assignment, HeldJob, Launch

log = logging.getLogger("spotfleet.agent")


@dataclass(frozen=True)
class Prepared:
    launch: Launch
    source: Path  # the unpacked working directory, shared by the job's workers on this host


def folder_name(name: str) -> str:
    """`name` (of a job or worker) as one path component."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".") or "-"


class Bundles:
    def __init__(self, home: Path, transfers: Transfers) -> None:
        self._home = home
        self._transfers = transfers
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._launches: dict[str, Launch] = {}  # in memory only: they hold secrets
        self._born: dict[str, float] = {}  # job -> when it was submitted, on our clock
        self._sending: asyncio.Task[None] | None = None
        self._blobs = Blobs(home, transfers)

    def folder(self, job: str) -> Path:
        return self._home / "jobs" / folder_name(job)

    def forget(self, job: str) -> None:
        """The job has no worker here any more. Its files stay: it may come back."""
        self._launches.pop(job, None)
        self._blobs.release(job)
        self._born.pop(job, None)

    def held(self, job: str, assignments: tuple[Assignment, ...]) -> HeldJob:
        """What lies here of `job`, for a dispatcher that does not know it."""
        launch = self._launches.get(job)
        if launch is None:
            return HeldJob(job, assignments=assignments)
        told = replace(launch, age_s=time.monotonic() - self._born[job])
        return HeldJob(job, told, assignments, bool(launch.spec.bundle) and self._blobs.whole(launch.spec.bundle))

    def send(self, digests: tuple[str, ...]) -> None:
        """Upload those bundles of jobs here that the dispatcher has lost; what fails is asked for again."""
        wanted = {launch.spec.bundle for launch in self._launches.values()} & set(digests)
        if wanted and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send(sorted(wanted)))

    async def _send(self, bundles: list[str]) -> None:
        try:
            await self._blobs.send(bundles)
        except TROUBLE as error:
            log.warning("bundles: %s", error or type(error).__name__)

    async def prepare(self, job: str, say: Say) -> Prepared:
        """Fetch and unpack what a worker of `job` needs. Waits for the dispatcher as long as it takes; `say` hears how
        far it is."""
        async with self._locks[job]:
            if job not in self._launches:
                launch = await patiently(f"launch of {job}", lambda: self._transfers.launch(job))
                self._born[job] = time.monotonic() - launch.age_s
                self._launches[job] = launch
            launch = self._launches[job]
            source = self.folder(job) / "source"
            if source.exists():
                self._blobs.need(job, launch.spec.bundle)
            else:
                await self._unpack(job, launch, source, say)
            return Prepared(launch, source)

    async def _unpack(self, job: str, launch: Launch, source: Path, say: Say) -> None:
        source.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(prefix="source-", dir=source.parent))
        try:
            if launch.spec.bundle:
                await self._blobs.fill(job, launch.spec.bundle, fresh, say)
            fresh.rename(source)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # of a bundle that did not fit


def clear_leftovers(home: Path) -> None:
    """Remove what an earlier agent left but the unpacked bundles: its workers have all ended with it."""
    for pattern in ("workers", "restore", "uploads", "source-*"):
        for folder in (home / "jobs").glob(f"*/{pattern}"):
            shutil.rmtree(folder, ignore_errors=True)
    for part in (home / "blobs").glob("*.part"):
        part.unlink(missing_ok=True)
