"""A worker's output folder, shipped to the dispatcher while the worker runs, so that it outlives this host.

    each PERIOD_S, at once at a notice, and at the worker's end:  scan --> what changed --> pieces --> dispatcher

A file that has grown is sent from where the dispatcher's copy ends; one that was changed otherwise, anew and whole, and
then only once it is quiet: a file that is being written must not take the place of a whole one. A rename is told as
one. What is removed here stays there. Links and special files are left out, and nothing behind them is read.

It must not slow training: a folder is scanned for a fiftieth of the time at most, a file that is written again and
again is read at READ_BYTES_S at most, and reading and sending take a quarter of the time. At a notice and at the end
none of that holds. The reading thread has the agent's own priority: one of a lower would wait for the processor with
the interpreter's lock in its hand, and so would the whole agent. After the end every file's sha256 is compared with
the copy's.

The dispatcher's answer is the truth about what it holds: an answer that is lost is asked for again, and a new
dispatcher, which may hold less, is asked about all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

import aiohttp

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, TROUBLE, Transfers
from spotfleet.messages import OutputPiece, pack_pieces

log = logging.getLogger("spotfleet.agent")

PERIOD_S, HURRY_S, LOOK_S = 3.0, 0.5, 0.2
SCAN_SHARE, SEND_SHARE = 50, 3  # rest so many times as long as a scan took, or a batch
READ_BYTES_S = 32 << 20
QUIET_S, PATIENCE_S = 1.0, 15.0  # a file that is never quiet for so long is sent when it stands still while it is read
BATCH_BYTES, BATCH_PIECES, CHUNK = 1 << 20, 500, 1 << 18
CHECK_BYTES = 128 << 20
SAMPLE = 4096
MOST_FILES = 100_000
NAMED = 20
ROUNDS = 3  # of comparing at the end
PATH_BYTES = 3000
FULL_STATUS = 507

T = TypeVar("T")
Seen = tuple[int, int, int]  # inode, size, time of the last change in ns


@dataclass
class Held:
    """What the dispatcher holds of a file, as far as it was sent from here."""

    inode: int
    size: int
    changed_ns: int
    head: bytes = b""  # digests of its first and its last bytes
    tail: bytes = b""
    wanted_since: float = 0.0  # a new version of it waits to be quiet; monotonic
    not_before: float = 0.0  # read again; monotonic


@dataclass
class _Batch:
    pieces: list[OutputPiece] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)


class Refused(Exception):
    """The dispatcher will not have any more of it, and says why."""


class OutputShipper:
    """Of one worker; `hurry`: is this host about to go? `say` writes into the worker's log."""

    def __init__(self, transfers: Transfers, job: str, worker: str, folder: Path, hurry: Callable[[], bool],
                 say: Callable[[str], None]) -> None:
        self.why = ""  # it cannot be sent now
        self.sent = 0  # grows with whatever has arrived or been compared
        self._transfers, self._job, self._worker, self._folder = transfers, job, worker, folder
        self._hurry, self._say = hurry, say
        self._complete, self._in_a_hurry = asyncio.Event(), False
        self._dispatcher = transfers.dispatcher
        self._held: dict[str, Held] = {}
        self._anew: set[str] = set()  # whose copies are not what was thought
        self._left_out: dict[str, str] = {}  # name -> why
        self._thread = ThreadPoolExecutor(1, f"output {worker}")

    def complete(self) -> None:
        """The folder changes no more: `run` ends when all of it has arrived."""
        self._complete.set()

    async def run(self) -> None:
        try:
            while not self._complete.is_set():
                begun = time.monotonic()
                seen = await self._aside(self._scan)
                scan_s = time.monotonic() - begun
                await self._ship(seen, last=False)
                await self._rest(max(HURRY_S if self._in_a_hurry else PERIOD_S, SCAN_SHARE * scan_s))
            await self._finish()
        except Refused as error:
            self._say(str(error))
        finally:
            self.why = ""
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _finish(self) -> None:
        await self._compare()
        if self._left_out:
            named = [f"{name!r}"[1:-1] + f" ({why})" for name, why in sorted(self._left_out.items())[:NAMED]]
            more = f" and {len(self._left_out) - NAMED} more" if len(self._left_out) > NAMED else ""
            self._say(f"output: not collected: {', '.join(named)}{more}")

    async def _compare(self) -> None:
        for _ in range(ROUNDS):
            seen = await self._aside(self._scan)
            await self._ship(seen, last=True)
            if not await self._differs(seen):
                return
        self._say("output: the dispatcher's copies differ from what lies here, though they were sent again")

    async def _rest(self, rest_s: float) -> None:
        until = time.monotonic() + rest_s
        while not self._complete.is_set() and (left_s := until - time.monotonic()) > 0:
            if self._hurry() and not self._in_a_hurry:
                self._in_a_hurry = True
                return
            try:
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._complete.wait()
            except TimeoutError:
                pass

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- what there is

    def _scan(self) -> dict[str, Seen]:
        found: dict[str, Seen] = {}
        folders = [""]
        while folders:
            prefix = folders.pop()
            for entry in _entries(self._folder / prefix):
                name = f"{prefix}{entry.name}"
                try:
                    about = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(about.st_mode):
                    folders.append(f"{name}/")
                elif why := _why_not(name, about, len(found)):
                    self._left_out[name] = why
                else:
                    found[name] = _seen(about)
        return found

    # ---- what is to be sent

    async def _ship(self, seen: dict[str, Seen], *, last: bool) -> None:
        if (now := self._transfers.dispatcher) != self._dispatcher:
            await self._ask_anew()
            self._dispatcher = now
        self._forget()
        pieces = self._pieces(seen, last)
        while batch := await self._aside(lambda: _take(pieces)):
            begun = time.monotonic()
            for piece, held, expected in zip(batch.pieces, await self._send(batch), batch.expected, strict=True):
                if held != expected:
                    self._anew.add(piece.to or piece.name)
            if not (last or self._in_a_hurry or self._complete.is_set()):
                await self._rest(min(2.0, SEND_SHARE * (time.monotonic() - begun)))
        self._forget()

    def _forget(self) -> None:
        for name in self._anew:
            log.info("output of %s: %s is sent anew", self._worker, name)
            self._held[name] = Held(0, -1, 0)
        self._anew.clear()

    def _pieces(self, seen: dict[str, Seen], last: bool) -> Iterator[tuple[OutputPiece, bytes, int]]:
        """Each with the answer that it should get. Runs in the thread; what is held is noted as if it got that."""
        gone = {held.inode: name for name, held in self._held.items() if name not in seen}
        for name, now in seen.items():
            held = self._held.get(name)
            if held is not None and (held.inode, held.size, held.changed_ns) == now:
                continue
            try:
                with open(self._folder / name, "rb", opener=_plainly) as file:
                    old = gone.pop(now[0], "") if held is None or held.inode != now[0] else ""
                    if old and now[1] >= self._held[old].size >= 0 and _is_longer(file, self._held[old]):
                        self._held[name] = self._held.pop(old)
                        yield OutputPiece("rename", old, to=name), b"", self._held[name].size
                    yield from self._of_file(name, now, file, last)
            except OSError as error:  # removed, renamed, or unreadable: the next scan knows more
                log.info("output of %s: %s: %s", self._worker, name, error)

    def _of_file(self, name: str, now: Seen, file: BinaryIO, last: bool) -> Iterator[tuple[OutputPiece, bytes, int]]:
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = Held(now[0], 0, -1)
            yield from self._append(name, held, file, now)
        elif (held.inode, held.size, held.changed_ns) == now:
            return  # it has only been renamed
        elif held.inode == now[0] and now[1] > held.size >= 0 and _is_longer(file, held):
            yield from self._append(name, held, file, now)
        elif last or self._is_quiet(held, now):
            yield from self._draft(name, held, file, now, last)

    def _is_quiet(self, held: Held, now: Seen) -> bool:
        clock = time.monotonic()
        if held.size < 0:
            return True  # what is there is of no use
        if clock < held.not_before:
            return False
        held.wanted_since = held.wanted_since or clock
        return time.time() - now[2] / 1e9 >= QUIET_S or clock - held.wanted_since >= PATIENCE_S

    def _append(self, name: str, held: Held, file: BinaryIO, now: Seen) -> Iterator[tuple[OutputPiece, bytes, int]]:
        """Up to the size that was seen; what comes later is the next scan's."""
        file.seek(held.size)
        while held.size < now[1] or now[1] == 0:
            data = file.read(min(CHUNK, now[1] - held.size))
            if not data and now[1] > 0:
                break  # cut short meanwhile
            at, held.size = held.size, held.size + len(data)
            yield OutputPiece("append", name, at, len(data)), data, held.size
            if now[1] == 0:
                break
        held.head, held.tail = _samples(file, held.size)
        held.changed_ns, held.wanted_since = now[2], 0.0

    def _draft(self, name: str, held: Held, file: BinaryIO, now: Seen,
               last: bool) -> Iterator[tuple[OutputPiece, bytes, int]]:
        """All of it, unless it changes meanwhile: then the draft is left, and what was held stays."""
        file.seek(0)
        sha, at, data = hashlib.sha256(), 0, file.read(min(CHUNK, now[1]))
        held.not_before = time.monotonic() + now[1] / READ_BYTES_S
        while following := file.read(min(CHUNK, now[1] - at - len(data))):
            sha.update(data)
            yield OutputPiece("draft", name, at, len(data)), data, at + len(data)
            at, data = at + len(data), following
        sha.update(data)
        size, (inode, there, changed_ns) = at + len(data), _seen(os.fstat(file.fileno()))
        if not last and (inode, there, changed_ns) != now and not there > size == now[1]:
            return
        self._held[name] = Held(now[0], size, now[2], *_samples(file, size), not_before=held.not_before)
        yield OutputPiece("draft", name, at, len(data), last=True, sha256=sha.hexdigest()), data, size

    # ---- comparing

    async def _ask_anew(self) -> None:
        """Another dispatcher may hold less of what is here, or nothing."""
        await self._check((OutputPiece("check", name, bytes=held.size, last=True), b"", held.size)
                          for name, held in list(self._held.items()) if held.size >= 0)

    async def _differs(self, seen: dict[str, Seen]) -> bool:
        """Whether any copy is not the file that lies here now; such are sent anew at the next chance."""
        return await self._check(self._sealed(seen))

    def _sealed(self, seen: dict[str, Seen]) -> Iterator[tuple[OutputPiece, bytes, int]]:
        for name in seen:
            try:
                with open(self._folder / name, "rb", opener=_plainly) as file:
                    yield from _ranges(name, file)
            except OSError as error:
                log.warning("output of %s: %s cannot be read: %s", self._worker, name, error)

    async def _check(self, pieces: Iterator[tuple[OutputPiece, bytes, int]]) -> bool:
        differs = False
        while batch := await self._aside(lambda: _take(pieces)):
            for piece, held, expected in zip(batch.pieces, await self._send(batch), batch.expected, strict=True):
                if held != expected:
                    self._anew.add(piece.name)
                    differs = True
        return differs

    # ---- the wire

    async def _send(self, batch: _Batch) -> list[int]:
        body, backoff_s = pack_pieces(batch.pieces, b"".join(batch.data)), FIRST_BACKOFF_S
        while True:
            try:
                status, answer = await self._transfers.post_output(self._job, self._worker, body)
                break
            except TROUBLE as error:
                full = isinstance(error, aiohttp.ClientResponseError) and error.status == FULL_STATUS
                self.why = "its output waits: the dispatcher's disk is full" if full else ""
                if backoff_s == FIRST_BACKOFF_S:
                    log.warning("output of %s: %s; trying again", self._worker, error or type(error).__name__)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        self.why = ""
        if status >= 400:
            log.warning("output of %s: refused with %s: %s", self._worker, status, answer)
            raise Refused(str(answer.get("error") or f"output: the dispatcher refuses it with {status}"))
        held = answer.get("held")
        if not isinstance(held, list) or len(held) != len(batch.pieces):
            raise Refused(f"output: the dispatcher answers {str(answer)[:200]}")
        self.sent += len(body)
        return held


def _take(pieces: Iterator[tuple[OutputPiece, bytes, int]]) -> _Batch | None:
    """The next pieces that are sent together; None when there are no more."""
    batch, size = _Batch(), 0
    for piece, data, expected in pieces:
        batch.pieces.append(piece)
        batch.data.append(data)
        batch.expected.append(expected)
        size += len(data) if piece.do != "check" else piece.bytes * BATCH_BYTES // CHECK_BYTES
        if size >= BATCH_BYTES or len(batch.pieces) >= BATCH_PIECES:
            break
    return batch if batch.pieces else None


def _ranges(name: str, file: BinaryIO) -> Iterator[tuple[OutputPiece, bytes, int]]:
    """A file's bytes to be compared, in parts that a slow disk reads before anybody loses patience."""
    begin, size = 0, os.fstat(file.fileno()).st_size
    while begin < size or begin == 0:
        sha, end, left = hashlib.sha256(), min(size, begin + CHECK_BYTES), min(size, begin + CHECK_BYTES) - begin
        while data := file.read(min(CHUNK, left)):
            sha.update(data)
            left -= len(data)
        yield OutputPiece("check", name, begin, end - begin, last=end == size, sha256=sha.hexdigest()), b"", end
        if end == size:
            return
        begin = end


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _plainly(path: str, flags: int) -> int:
    """Open a plain file, never what a link of this name leads to, and never wait for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file any more")
    return descriptor


def _why_not(name: str, about: os.stat_result, files: int) -> str:
    """Why this file is not collected."""
    if not stat.S_ISREG(about.st_mode):
        return "no plain file"
    if files >= MOST_FILES:
        return f"there are more than {MOST_FILES} files"
    try:
        return "" if len(name.encode()) < PATH_BYTES else "its name is too long"
    except UnicodeEncodeError:
        return "its name is no text"


def _seen(about: os.stat_result) -> Seen:
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def _samples(file: BinaryIO, size: int) -> tuple[bytes, bytes]:
    """Digests of the first and the last bytes of the first `size` bytes."""
    file.seek(0)
    head = file.read(min(SAMPLE, size))
    file.seek(max(0, size - SAMPLE))
    tail = file.read(min(SAMPLE, size))
    return hashlib.sha256(head).digest(), hashlib.sha256(tail).digest()


def _is_longer(file: BinaryIO, held: Held) -> bool:
    """Does it begin with what is held, as far as samples tell? The comparison at the end tells the rest."""
    return held.size == 0 or _samples(file, held.size) == (held.head, held.tail)
