"""A job on this host before its first worker: launch fetched, bundle unpacked, `setup` run. One folder per job.

The bundle's archive is kept beside what came out of it: a dispatcher that has lost its disk gets it back from here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.agent.transfer import TROUBLE, Transfers, patiently
from spotfleet.bundle import extract
from spotfleet.errors import JobFailed
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

    def folder(self, job: str) -> Path:
        return self._home / "jobs" / folder_name(job)

    def forget(self, job: str) -> None:
        """The job has no worker here any more. Its files stay: it may come back."""
        self._launches.pop(job, None)
        self._born.pop(job, None)

    def held(self, job: str, assignments: tuple[Assignment, ...]) -> HeldJob:
        """What lies here of `job`, for a dispatcher that does not know it."""
        launch = self._launches.get(job)
        if launch is None:
            return HeldJob(job, assignments=assignments)
        told = replace(launch, age_s=time.monotonic() - self._born[job])
        return HeldJob(job, told, assignments, bool(launch.spec.bundle) and self._archive(job, launch).exists())

    def send(self, digests: tuple[str, ...]) -> None:
        """Upload those bundles of jobs here that the dispatcher has lost; what fails is asked for again."""
        wanted = {d: p for job, launch in self._launches.items()
                  if (d := launch.spec.bundle) in digests and (p := self._archive(job, launch)).exists()}
        if wanted and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send(wanted))

    async def _send(self, archives: dict[str, Path]) -> None:
        for digest, archive in archives.items():
            try:
                status = await self._transfers.put_bundle(digest, archive)
                log.info("bundle %s: sent again, answered %s", digest[:12], status)
            except TROUBLE as error:
                log.warning("bundle %s: %s", digest[:12], error or type(error).__name__)

    def _archive(self, job: str, launch: Launch) -> Path:
        return self.folder(job) / f"{folder_name(launch.spec.bundle)}.tar.gz"

    async def prepare(self, job: str) -> Prepared:
        """Fetch and unpack what a worker of `job` needs. Waits for the dispatcher as long as it takes."""
        async with self._locks[job]:
            if job not in self._launches:
                launch = await patiently(f"launch of {job}", lambda: self._transfers.launch(job))
                self._born[job] = time.monotonic() - launch.age_s
                self._launches[job] = launch
            launch = self._launches[job]
            source = self.folder(job) / "source"
            if not source.exists():
                await self._unpack(job, launch, source)
            return Prepared(launch, source)

    async def _unpack(self, job: str, launch: Launch, source: Path) -> None:
        source.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(prefix="source-", dir=source.parent))
        try:
            if launch.spec.bundle:
                archive = self._archive(job, launch)
                await patiently(f"bundle of {job}", lambda: self._transfers.bundle(launch.spec.bundle, archive))
                await asyncio.to_thread(extract, archive, fresh)
            fresh.rename(source)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)  # of an archive that did not fit

    async def set_up(self, job: str, command: str, run: Callable[[str], Awaitable[int]]) -> None:
        """Run the job's setup command unless it has succeeded here before. JobFailed names command and code.

        `run` starts it and returns its exit code. A job's other workers wait meanwhile; what frees them from a
        setup that hangs is the end of the worker that runs it.
        """
        if not command.strip():
            return
        marker = self.folder(job) / "setup.done"
        digest = hashlib.sha256(command.encode()).hexdigest()
        async with self._locks[job]:
            if marker.exists() and marker.read_text() == digest:
                return
            code = await run(command)
            if code != 0:
                how = f"exited with code {code}" if code > 0 else f"was ended by signal {-code}"
                raise JobFailed(f"setup failed: the command {how}: {command.strip()}",
                                hint="its output is at the start of this worker's log")
            marker.write_text(digest)


def clear_leftovers(home: Path) -> None:
    """Remove what an earlier agent left but the unpacked bundles: its workers have all ended with it."""
    for pattern in ("workers", "restore", "uploads", "source-*"):
        for folder in (home / "jobs").glob(f"*/{pattern}"):
            shutil.rmtree(folder, ignore_errors=True)
