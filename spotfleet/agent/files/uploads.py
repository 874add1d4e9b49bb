"""Uploads from a host: logs while they grow, and the newest checkpoints. Output folders: see outputs.py."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from spotfleet.agent.transfer import (
    FIRST_BACKOFF_S,
    LAST_BACKOFF_S,
    NOT_THERE,
    RETRYABLE,
    Transfers,
    retry_until_answered,
)
from spotfleet.protocol.messages import Checkpoint, Unsent
from spotfleet.retry import Backoff
from spotfleet.storage.checkpoint_folder import link_files

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
    checkpoint: Checkpoint  # as the worker reported it; its path is a link
    files: list[Checkpoint]  # all that it stands for, in the order in which they are sent
    mounted: bool = False  # they are written to the mounted target
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    body: BinaryIO | None = None  # the file that is being sent
    arrived: int = 0  # bytes of the files that have arrived
    reached: int = 0  # the most bytes that were sent in one try

    @property
    def folder(self) -> Path:
        return Path(self.checkpoint.path).parent

    @property
    def bytes(self) -> int:
        return sum(_size(Path(file.path)) for file in self.files)

    def progress(self) -> int:
        """Return `reached`, updated."""
        try:
            self.reached = max(self.reached, self.arrived + (self.body.tell() if self.body is not None else 0))
        except ValueError:  # closed: the try is over
            self.body = None
        return self.reached

    def opened(self, body: BinaryIO) -> None:
        self.body = body

    def sent(self, file: Checkpoint) -> None:
        self.body, self.arrived = None, self.arrived + _size(Path(file.path))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@dataclass
class _Newest:
    """Newest offer of a job, with its parts so far."""

    age: tuple[int, int, int] = (-1, -1, -1)
    parts: set[int] = field(default_factory=set)


class CheckpointShipper:
    """Uploader of each job's newest checkpoint, or of the pieces on this host, one writer's after another's.

        offered --> waiting --> arrived, refused (409: a newer generation exists; 400, _TRIES times: the received
                                digest differs from the written one) or overtaken by a newer one

    Pieces of one version wait side by side. A newer version overtakes them all, and so does one of their version by a
    single writer. An upload under way is never interrupted. Hard links keep the files while the worker prunes its own.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._waiting: dict[tuple[str, int], _Upload] = {}  # by job and part
        self._newest: dict[str, _Newest] = {}
        self._work = asyncio.Event()

    def offer(self, job: str, checkpoint: Checkpoint, folder: Path, mounted: bool = False) -> None:
        """Queue a checkpoint that a worker has written; `folder` holds the uploader's link to the file. `mounted`: it
        goes to the mounted target, and what cannot be written there to the dispatcher."""
        newest, age = self._newest.get(job) or _Newest(), _age(checkpoint)
        known = age < newest.age or (age == newest.age and checkpoint.part in newest.parts)
        if known or not checkpoint.path or checkpoint.url:  # workers write to the object store themselves
            return
        into = folder / f"{checkpoint.generation}-{checkpoint.version}-{checkpoint.part}-{checkpoint.parts}"
        try:
            files = link_files(checkpoint, into)
        except OSError as error:
            log.warning("checkpoint %s of %s: %s", checkpoint.version, job, error)
            return
        if age > newest.age:
            newest = _Newest(age)
        newest.parts.add(checkpoint.part)
        self._newest[job] = newest
        for key, other in list(self._waiting.items()):
            if key == (job, checkpoint.part) or (key[0] == job and _age(other.checkpoint) != age):
                if other.folder != into:  # the same one may be offered again
                    shutil.rmtree(other.folder, ignore_errors=True)
                del self._waiting[key]
                other.settled.set()
        own = next(file for file in files if file.name == checkpoint.name)
        self._waiting[job, checkpoint.part] = _Upload(own, files, mounted)
        self._work.set()

    def waiting(self) -> list[tuple[str, Checkpoint]]:
        """Return the jobs and checkpoints that have not arrived; each path leads to links that stay until then."""
        return [(job, upload.checkpoint) for (job, _), upload in self._waiting.items()]

    def unsent(self, stored: Callable[[str, Checkpoint], bool]) -> tuple[Unsent, ...]:
        """Return what has not arrived. `stored` returns whether a checkpoint of a job is in the target."""
        return tuple(Unsent(job, "checkpoint", max(0, u.bytes - u.progress()), u.progress(),
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
        for file in upload.files:
            if not await self._send(key, upload, file):
                break
            upload.sent(file)
        self._settle(key, upload)

    async def _send(self, key: tuple[str, int], upload: _Upload, file: Checkpoint) -> bool:
        """Send one file; return False once the others need not follow."""
        job, backoff, tries = key[0], Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S), 0
        while self._waiting.get(key) is upload:
            try:
                status = NOT_THERE
                if upload.mounted:
                    status = await self._transfers.put_at_target(job, file, Path(file.path), upload.opened)
                if status == NOT_THERE:
                    status = await self._transfers.put_checkpoint(job, file, Path(file.path), upload.opened)
            except FileNotFoundError:  # overtaken or removed: a retry would loop
                return False
            except RETRYABLE as error:
                log.warning("checkpoint %s of %s: %s", file.version, job, error or type(error).__name__)
                await asyncio.sleep(backoff.next_s())
                continue
            if status < 400:
                return True
            tries += 1
            log.warning("checkpoint %s of %s: refused with %s", file.version, job, status)
            if status != _SPOILT or tries == _TRIES:
                return False
            await asyncio.sleep(backoff.next_s())
        return False

    def _settle(self, key: tuple[str, int], upload: _Upload) -> None:
        """Remove an upload that has arrived or never will."""
        if self._waiting.get(key) is upload:
            shutil.rmtree(upload.folder, ignore_errors=True)
            del self._waiting[key]
        upload.settled.set()


def _age(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Order of checkpoints: newer is greater; of one version, the one by fewer writers."""
    return (checkpoint.generation, checkpoint.version, -checkpoint.parts)
