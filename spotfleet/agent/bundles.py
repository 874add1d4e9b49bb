"""A job on this host before its first worker: launch fetched, bundle unpacked, `setup` run. One folder per job."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from spotfleet.agent.transfer import Transfers, patiently
from spotfleet.bundle import extract
from spotfleet.errors import JobFailed
from spotfleet.messages import Launch


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

    def folder(self, job: str) -> Path:
        return self._home / "jobs" / folder_name(job)

    def forget(self, job: str) -> None:
        """The job has no worker here any more. Its files stay: it may come back."""
        self._launches.pop(job, None)

    async def prepare(self, job: str) -> Prepared:
        """Fetch and unpack what a worker of `job` needs. Waits for the dispatcher as long as it takes."""
        async with self._locks[job]:
            if job not in self._launches:
                self._launches[job] = await patiently(f"launch of {job}", lambda: self._transfers.launch(job))
            launch = self._launches[job]
            source = self.folder(job) / "source"
            if not source.exists():
                await self._unpack(job, launch.spec.bundle, source)
            return Prepared(launch, source)

    async def _unpack(self, job: str, digest: str, source: Path) -> None:
        source.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = Path(tempfile.mkdtemp(prefix="source-", dir=source.parent))
        if digest:
            archive = source.parent / f"{folder_name(digest)}.tar.gz"
            await patiently(f"bundle of {job}", lambda: self._transfers.bundle(digest, archive))
            await asyncio.to_thread(extract, archive, fresh)
            archive.unlink()
        fresh.rename(source)

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
