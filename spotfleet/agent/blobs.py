"""The blobs of working directories on this host's disk, kept for the next job and for a dispatcher that loses its own.

    wanted --fetched, four at a time; what is here is not asked for--> here --used--> newest
                                                                        '-- oldest, beyond the cap or on a full disk,
                                                                            unless a job here needs it --> gone

A transfer that breaks off goes on with the pieces that are still missing. What is unpacked is compared with its digest
once more; a blob that was damaged here is fetched again.
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

from spotfleet.agent.transfer import Transfers, patiently
from spotfleet.bundle import DamagedPiece, Piece, pieces_of, unpack
from spotfleet.errors import DiskFull, is_full

log = logging.getLogger("spotfleet.agent")
AT_ONCE = 4
CAP_BYTES = 20 << 30
CAP_SHARE = 0.25  # of the disk
TRIES = 3  # to unpack, with blobs that turn out to be damaged, or a disk that others fill
SAY_S = 0.5

Say = Callable[[str], None]


class Blobs:
    def __init__(self, home: Path, transfers: Transfers) -> None:
        self._folder = home / "blobs"
        self._transfers = transfers
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._needed: dict[str, frozenset[str]] = {}  # job -> blobs

    def path(self, digest: str) -> Path:
        return self._folder / digest

    def whole(self, bundle: str) -> bool:
        """Is all of it here?"""
        here = set(os.listdir(self._folder)) if self._folder.is_dir() else set()
        return bundle in here and self._blobs_of(bundle) <= here

    def need(self, job: str, bundle: str) -> None:
        """Keep what `job` is made of until `release`."""
        self._needed[job] = self._blobs_of(bundle)

    def release(self, job: str) -> None:
        self._needed.pop(job, None)

    async def fill(self, job: str, bundle: str, into: Path, say: Say) -> None:
        """Unpack `bundle` into the empty folder `into`. Waits for the dispatcher as long as it takes.

        ValueError for what is no bundle, an OSError or DiskFull where it finds no room.
        """
        for left in reversed(range(TRIES)):
            try:
                await self._fetch(job, bundle, say)
                say("unpacking the working directory")
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
        """Upload what the dispatcher lacks of them and is here."""
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
        """As far as is known here."""
        try:
            return frozenset({bundle, *(piece.sha256 for piece in pieces_of(self.path(bundle)))})
        except (OSError, ValueError):
            return frozenset({bundle})

    def _use(self, digest: str) -> Path:
        path = self.path(digest)
        with suppress(OSError):
            os.utime(path)
        return path

    async def _fetch(self, job: str, bundle: str, say: Say) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        say("fetching the working directory")
        self.need(job, bundle)
        await self._one(bundle, lambda size: None)
        self.need(job, bundle)
        pieces = await asyncio.to_thread(pieces_of, self.path(bundle))
        wanted = [p for p in dict.fromkeys(pieces) if not self.path(p.sha256).exists()]
        await self._several(wanted, Came(sum(p.bytes for p in wanted), say))

    async def _several(self, wanted: Sequence[Piece], came: Came) -> None:
        left = iter(wanted)

        async def some() -> None:
            for piece in left:
                await self._one(piece.sha256, came)

        runs = [asyncio.create_task(some()) for _ in range(min(AT_ONCE, len(wanted)))]
        try:
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _one(self, digest: str, came: Callable[[int], None]) -> None:
        async with self._locks.setdefault(digest, asyncio.Lock()):  # two jobs may have it in common
            if not self.path(digest).exists():
                await self._transfer(digest, came)

    async def _transfer(self, digest: str, came: Callable[[int], None]) -> None:
        async def once() -> None:
            async with self._slots:  # for one try: what the dispatcher lacks must not keep others waiting
                await self._transfers.bundle(digest, self.path(digest), came)

        what = f"working directory, blob {digest[:12]}"
        try:
            await patiently(what, once)
        except DiskFull:
            if not self._make_room(0):
                raise
            await patiently(what, once)

    def _make_room(self, cap_bytes: int) -> bool:
        """Remove what no job here needs, oldest first, until no more than `cap_bytes` are kept. Was anything?"""
        needed = frozenset().union(*list(self._needed.values()))
        found = sorted((s.st_mtime, s.st_size, p) for p in self._folder.glob("*") if (s := _stat(p)))
        kept, removed = sum(size for _, size, _ in found), False
        for _, size, path in found:
            if kept > cap_bytes and path.name not in needed and not path.name.endswith(".part"):
                path.unlink(missing_ok=True)
                kept, removed = kept - size, True
        return removed


class Came:
    """Says how much of what is fetched is here."""

    def __init__(self, total: int, say: Say) -> None:
        self._total, self._say, self._came, self._said_at = total, say, 0, 0.0

    def __call__(self, size: int) -> None:
        self._came += size
        now = asyncio.get_running_loop().time()
        if now - self._said_at >= SAY_S:
            self._said_at = now
            self._say(f"fetching the working directory: {min(self._came, self._total) / 1e6:.0f} of "
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
