"""Uploads from a host: logs while they grow, and the newest checkpoints. Output folders: see outputs.py."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, RETRYABLE, Transfers, retry_until_answered
from spotfleet.protocol.messages import Checkpoint, Unsent
from spotfleet.retry import Backoff

log = logging.getLogger("spotfleet.agent")

PERIOD_S = 0.2
_CHUNK = 256 * 1024
_SPOILT, _TRIES = 400, 3


class LogShipper:
    """Uploader of one growing file. The dispatcher's size decides the offset, so a lost answer loses nothing."""

    def __init__(self, transfers: Transfers, job: str, worker: str, path: Path) -> None:
        self._transfers = transfers
        self._job, self._worker, self._path = job, worker, path
        self._held = 0  # bytes that the dispatcher holds
        self._dispatcher = transfers.dispatcher  # the one that reported `_held`
        self._complete = asyncio.Event()
        self._end = 0  # size of the file when it was declared complete

    def complete(self) -> None:
        """Declare the file complete: `run` ends when all of it has arrived, even if another process still writes."""
        self._end = self._size()
        self._complete.set()

    @property
    def sent(self) -> int:
        """Bytes that have arrived."""
        return self._held

    @property
    def left(self) -> int:
        """Bytes that have not arrived."""
        return max(0, (self._end if self._complete.is_set() else self._size()) - self._held)

    async def run(self) -> None:
        while True:
            complete = self._complete.is_set()  # before the read, so that nothing written in between is missed
            more = await self._send_some()
            if complete and (not more or self._held >= self._end):
                return
            if more:
                continue
            try:
                async with asyncio.timeout(PERIOD_S):
                    await self._complete.wait()
            except TimeoutError:
                pass

    async def _send_some(self) -> bool:
        """Send the next chunk; return whether there was one."""
        if (now := self._transfers.dispatcher) != self._dispatcher:
            self._held = await retry_until_answered(  # a new one may hold less, even if this file never grows again
                f"log of {self._worker}", lambda: self._transfers.append_log(self._job, self._worker, 0, b""))
            self._dispatcher = now
        data = self._read()
        if not data:
            return False
        offset = self._held
        self._held = await retry_until_answered(
            f"log of {self._worker}", lambda: self._transfers.append_log(self._job, self._worker, offset, data))
        if self._held <= offset:
            await asyncio.sleep(PERIOD_S)  # it lost data or refuses: never in a tight loop
        return True

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._held)
                return file.read(_CHUNK)
        except FileNotFoundError:
            return b""


@dataclass
class _Upload:
    checkpoint: Checkpoint
    file: Path
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    body: BinaryIO | None = None  # the file, while it is being sent
    reached: int = 0  # the most bytes that were sent in one try

    def progress(self) -> int:
        """Return `reached`, updated."""
        try:
            self.reached = max(self.reached, self.body.tell() if self.body is not None else 0)
        except ValueError:  # closed: the try is over
            self.body = None
        return self.reached

    def file_bytes(self) -> int:
        try:
            return self.file.stat().st_size
        except FileNotFoundError:
            return 0

    def opened(self, body: BinaryIO) -> None:
        self.body = body


@dataclass
class _Newest:
    """Newest offer of a job, with its parts so far."""

    age: tuple[int, int, int] = (-1, -1, -1)
    parts: set[int] = field(default_factory=set)


class CheckpointShipper:
    """Uploader of each job's newest checkpoint, or of its parts on this host, one after another.

        offered --> waiting --> arrived, refused (409: a newer generation exists; 400, _TRIES times: the received
                                digest differs from the written one) or overtaken by a newer one

    Parts of one version wait side by side. A newer version overtakes them all, and so does a whole file of their
    version. An upload under way is never interrupted. A hard link keeps the file while the worker prunes its own.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._waiting: dict[tuple[str, int], _Upload] = {}  # by job and part
        self._newest: dict[str, _Newest] = {}
        self._work = asyncio.Event()

    def offer(self, job: str, checkpoint: Checkpoint, folder: Path) -> None:
        """Queue a checkpoint that a worker has written; `folder` holds the uploader's link to the file."""
        newest, age = self._newest.get(job) or _Newest(), _age(checkpoint)
        known = age < newest.age or (age == newest.age and checkpoint.part in newest.parts)
        if known or not checkpoint.path or checkpoint.url:  # workers write to the object store themselves
            return
        part = f"-{checkpoint.part}-{checkpoint.parts}" if checkpoint.parts > 1 else ""
        link = folder / f"{checkpoint.generation}-{checkpoint.version}{part}.pt"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            link.unlink(missing_ok=True)
            os.link(checkpoint.path, link)
        except OSError as error:
            log.warning("checkpoint %s of %s: %s", checkpoint.version, job, error)
            return
        if age > newest.age:
            newest = _Newest(age)
        newest.parts.add(checkpoint.part)
        self._newest[job] = newest
        for key, other in list(self._waiting.items()):
            if key == (job, checkpoint.part) or (key[0] == job and _age(other.checkpoint) != age):
                if other.file != link:  # the same file may be offered again
                    other.file.unlink(missing_ok=True)
                del self._waiting[key]
                other.settled.set()
        self._waiting[job, checkpoint.part] = _Upload(checkpoint, link)
        self._work.set()

    def waiting(self) -> list[tuple[str, Checkpoint]]:
        """Return the jobs and checkpoints that have not arrived; each path leads to a link that stays until then."""
        return [(job, replace(u.checkpoint, path=str(u.file))) for (job, _), u in self._waiting.items()]

    def unsent(self, stored: Callable[[str, Checkpoint], bool]) -> tuple[Unsent, ...]:
        """Return what has not arrived. `stored` returns whether a checkpoint of a job is in the target."""
        return tuple(Unsent(job, "checkpoint", max(0, u.file_bytes() - u.progress()), u.progress(),
                            stored=stored(job, u.checkpoint)) for (job, _), u in self._waiting.items())

    def again(self, job: str) -> None:
        """Accept the next offer of `job`, however old: the dispatcher may have lost its checkpoints."""
        self._newest.pop(job, None)

    async def settled(self, job: str) -> None:
        """Wait until no upload of `job` is queued."""
        while upload := next((u for (its, _), u in self._waiting.items() if its == job), None):
            await upload.settled.wait()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                key, upload = next(iter(self._waiting.items()))
                await self._upload(key, upload)

    async def _upload(self, key: tuple[str, int], upload: _Upload) -> None:
        job, made, backoff, tries = key[0], upload.checkpoint, Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S), 0
        while self._waiting.get(key) is upload:
            try:
                status = await self._transfers.put_checkpoint(job, made, upload.file, upload.opened)
            except FileNotFoundError:  # overtaken or removed: a retry would loop
                return self._settle(key, upload)
            except RETRYABLE as error:
                log.warning("checkpoint %s of %s: %s", made.version, job, error or type(error).__name__)
                await asyncio.sleep(backoff.next_s())
                continue
            tries += 1
            if status >= 400:
                log.warning("checkpoint %s of %s: refused with %s", made.version, job, status)
            if status == _SPOILT and tries < _TRIES:
                await asyncio.sleep(backoff.next_s())
                continue
            return self._settle(key, upload)

    def _settle(self, key: tuple[str, int], upload: _Upload) -> None:
        """Remove an upload that has arrived or never will."""
        if self._waiting.get(key) is upload:
            upload.file.unlink(missing_ok=True)
            del self._waiting[key]
        upload.settled.set()


def _age(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Order of checkpoints: newer is greater; of one version, the one in fewer parts."""
    return (checkpoint.generation, checkpoint.version, -checkpoint.parts)
