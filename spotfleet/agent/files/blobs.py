"""Blobs of working directories on this host's disk, kept for the next job and for a dispatcher that loses its own.

    wanted --fetched if missing, four at a time--> here --used--> newest
                                                    '-- oldest, beyond the cap or on a full disk,
                                                        unless a job here needs it --> removed

A broken transfer continues with the missing blobs. Digests are verified again while unpacking; a blob that was damaged
on this disk is fetched again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from spotfleet.agent.transfer import Transfers, retry_until_answered
from spotfleet.bundle import BundlePiece, DamagedPiece, pieces_of, unpack
from spotfleet.errors import DiskFull, is_full
from spotfleet.storage import atomic

log = logging.getLogger("spotfleet.agent")
AT_ONCE = 4
CAP_BYTES = 20 << 30
CAP_SHARE = 0.25  # share of the disk
TRIES = 3  # to unpack, despite damaged blobs or a disk that other processes fill
PROGRESS_S = 0.5

Progress = Callable[[str], None]


class Blobs:
    """The blob folder of this host."""

    def __init__(self, home: Path, transfers: Transfers) -> None:
        self._folder = home / "blobs"
        self._transfers = transfers
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._needed: dict[str, frozenset[str]] = {}  # job -> blobs

    def path(self, digest: str) -> Path:
        return self._folder / digest

    def keep(self, digest: str, data: bytes) -> None:
        """Write a blob that was made here, unless it is here already. DiskFull or OSError without room."""
        if self.path(digest).exists():
            return
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic.replacing(self.path(digest), sync=False) as file:
            file.write(data)

    def is_complete(self, bundle: str) -> bool:
        """Return whether all blobs of `bundle` are here."""
        here = set(os.listdir(self._folder)) if self._folder.is_dir() else set()
        return bundle in here and self._blobs_of(bundle) <= here

    def need(self, job: str, bundle: str) -> None:
        """Protect the blobs of `job` from removal until `release`."""
        self._needed[job] = self._blobs_of(bundle)

    def release(self, job: str) -> None:
        self._needed.pop(job, None)

    async def fill(self, job: str, bundle: str, into: Path, progress: Progress) -> None:
        """Fetch `bundle` and unpack it into the empty folder `into`. Waits for the dispatcher without limit.

        ValueError if it is no bundle, OSError or DiskFull if there is no room.
        """
        for left in reversed(range(TRIES)):
            try:
                await self._fetch(job, bundle, progress)
                progress("unpacking the working directory")
                await asyncio.to_thread(unpack, self.path(bundle), self._use, into)
                break
            except (DamagedPiece, OSError, DiskFull) as error:
                again = isinstance(error, DamagedPiece) or (is_full(error) and self._make_room(0))
                if not (left and again):
                    raise
                log.warning("bundle %s: %s; trying again", bundle[:12], error)
                if isinstance(error, DamagedPiece):
                    self.path(error.sha256).unlink(missing_ok=True)
                await asyncio.to_thread(_empty, into)
        cap_bytes = min(CAP_BYTES, int(CAP_SHARE * shutil.disk_usage(self._folder).total))
        await asyncio.to_thread(self._make_room, cap_bytes)

    async def send(self, bundles: Iterable[str]) -> None:
        """Upload the blobs of `bundles` that are here and that the dispatcher does not have."""
        for bundle in bundles:
            if not self.path(bundle).exists():
                continue
            if await self._transfers.missing([bundle]):
                log.info("bundle %s: sent again, answered %s", bundle[:12],
                         await self._transfers.put_bundle(bundle, self.path(bundle)))
            for digest in await self._transfers.missing(sorted(self._blobs_of(bundle) - {bundle})):
                if self.path(digest).exists():
                    await self._transfers.put_bundle(digest, self.path(digest))

    # ----

    def _blobs_of(self, bundle: str) -> frozenset[str]:
        """Return the known digests of `bundle`: only its own, until its list of pieces is here."""
        try:
            return frozenset({bundle, *(piece.sha256 for piece in pieces_of(self.path(bundle)))})
        except (OSError, ValueError):
            return frozenset({bundle})

    def _use(self, digest: str) -> Path:
        path = self.path(digest)
        with suppress(OSError):
            os.utime(path)
        return path

    async def _fetch(self, job: str, bundle: str, progress: Progress) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        progress("fetching the working directory")
        self.need(job, bundle)
        await self._one(bundle, lambda size: None)
        self.need(job, bundle)
        pieces = await asyncio.to_thread(pieces_of, self.path(bundle))
        wanted = [p for p in dict.fromkeys(pieces) if not self.path(p.sha256).exists()]
        await self._several(wanted, DownloadProgress(sum(p.bytes for p in wanted), progress))

    async def _several(self, wanted: Sequence[BundlePiece], on_bytes: DownloadProgress) -> None:
        left = iter(wanted)

        async def some() -> None:
            for piece in left:
                await self._one(piece.sha256, on_bytes)

        runs = [asyncio.create_task(some()) for _ in range(min(AT_ONCE, len(wanted)))]
        try:
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _one(self, digest: str, on_bytes: Callable[[int], None]) -> None:
        async with self._locks.setdefault(digest, asyncio.Lock()):  # two jobs may share it
            if not self.path(digest).exists():
                await self._transfer(digest, on_bytes)

    async def _transfer(self, digest: str, on_bytes: Callable[[int], None]) -> None:
        async def once() -> None:
            async with self._slots:  # for one try: a blob that the dispatcher lost must not delay others
                await self._transfers.bundle(digest, self.path(digest), on_bytes)

        what = f"working directory, blob {digest[:12]}"
        try:
            await retry_until_answered(what, once)
        except DiskFull:
            if not self._make_room(0):
                raise
            await retry_until_answered(what, once)

    def _make_room(self, cap_bytes: int) -> bool:
        """Remove blobs that no job here needs, oldest first, down to `cap_bytes`; return whether any was removed."""
        needed = frozenset().union(*list(self._needed.values()))
        found = sorted((s.st_mtime, s.st_size, p) for p in self._folder.glob("*") if (s := _stat(p)))
        kept, removed = sum(size for _, size, _ in found), False
        for _, size, path in found:
            if kept > cap_bytes and path.name not in needed and not path.name.endswith(".part"):
                path.unlink(missing_ok=True)
                kept, removed = kept - size, True
        return removed


class DownloadProgress:
    """Progress of a download, reported to `progress` every PROGRESS_S."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._received, self._reported_at = total, progress, 0, 0.0

    def __call__(self, size: int) -> None:
        self._received += size
        now = asyncio.get_running_loop().time()
        if now - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._progress(f"fetching the working directory: {min(self._received, self._total) / 1e6:.0f} of "
                      f"{self._total / 1e6:.0f} MB")


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
