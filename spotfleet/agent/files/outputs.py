"""Upload of a worker's output folder to the dispatcher while the worker runs, so that it outlives this host.

    each PERIOD_S, at once at a notice, and at the worker's end:  scan --> changed files --> pieces --> dispatcher

A file that has grown is sent from the end of the dispatcher's copy. A file with any other change is sent again as a
whole, and only once it is quiet: a file that is being written must not replace a whole one. A rename is sent as a
rename. A file that is removed here stays there. Links and special files are skipped, and nothing behind them is read.

Limits protect training: a folder is scanned for at most a fiftieth of the time, a file that is rewritten repeatedly is
read at most at READ_BYTES_S, and reading and sending take a quarter of the time. At a notice and at the end there are
no limits. The reading thread has the agent's own priority: with a lower one it could wait for the processor while it
holds the interpreter's lock, and stall the whole agent. After the end every file's sha256 is compared with the copy's.

The dispatcher's answer decides what it holds: a lost answer is requested again, and a new dispatcher, which may hold
less, is asked about every file.
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

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, RETRYABLE, Transfers
from spotfleet.protocol.messages import OutputPiece, pack_pieces
from spotfleet.retry import Backoff

log = logging.getLogger("spotfleet.agent")

PERIOD_S, HURRY_S, POLL_S = 3.0, 0.5, 0.2
SCAN_SHARE, SEND_SHARE = 50, 3  # length of a pause, in durations of the scan or batch before it
READ_BYTES_S = 32 << 20
QUIET_S, PATIENCE_S = 1.0, 15.0  # a file that is not quiet for PATIENCE_S is read anyway, and sent if it did not change
BATCH_BYTES, BATCH_PIECES, CHUNK = 1 << 20, 500, 1 << 18
CHECK_BYTES = 128 << 20
SAMPLE = 4096
MOST_FILES = 100_000
NAMED = 20
ROUNDS = 3  # number of comparisons at the end
PATH_BYTES, MOST_PARTS = 3000, 100  # the dispatcher refuses longer names
FULL_STATUS = 507

T = TypeVar("T")
Seen = tuple[int, int, int]  # inode, size, time of the last change in ns


@dataclass
class UploadedState:
    """State of the dispatcher's copy of a file, as sent from here."""

    inode: int
    size: int
    changed_ns: int
    head: bytes = b""  # digests of its first and its last bytes
    tail: bytes = b""
    wanted_since: float = 0.0  # since when a new version waits to be quiet; monotonic
    not_before: float = 0.0  # earliest time of the next read; monotonic


@dataclass
class _Batch:
    pieces: list[OutputPiece] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)


class UploadRefused(Exception):
    """The dispatcher's refusal of further output, with its reason."""


class OutputShipper:
    """Uploader of one worker's output folder.

    `hurry` returns whether this host is about to end; `write_log` writes to the worker's log.
    """

    def __init__(self, transfers: Transfers, job: str, worker: str, folder: Path, hurry: Callable[[], bool],
                 write_log: Callable[[str], None]) -> None:
        self.why = ""  # why it cannot be sent now
        self.sent = 0  # grows with each answered batch
        self.left = 0  # bytes that the last scan found and that have not arrived
        self._transfers, self._job, self._worker, self._folder = transfers, job, worker, folder
        self._hurry, self._write_log = hurry, write_log
        self._complete, self._in_a_hurry = asyncio.Event(), False
        self._dispatcher = transfers.dispatcher
        self._held: dict[str, UploadedState] = {}
        self._stale: set[str] = set()  # files whose copies differ from the recorded state
        self._left_out: dict[str, str] = {}  # name -> why
        self._thread = ThreadPoolExecutor(1, f"output {worker}")

    def complete(self) -> None:
        """Declare the folder complete: `run` ends when all of it has arrived."""
        self._complete.set()

    async def run(self) -> None:
        try:
            while not self._complete.is_set():
                begun = time.monotonic()
                seen = await self._in_thread(self._scan)
                scan_s = time.monotonic() - begun
                await self._ship(seen, last=False)
                await self._rest(max(HURRY_S if self._in_a_hurry else PERIOD_S, SCAN_SHARE * scan_s))
            await self._finish()
        except UploadRefused as error:
            self._write_log(str(error))
        finally:
            self.why, self.left = "", 0
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _finish(self) -> None:
        await self._compare()
        if self._left_out:
            named = [f"{name!r}"[1:-1] + f" ({why})" for name, why in sorted(self._left_out.items())[:NAMED]]
            more = f" and {len(self._left_out) - NAMED} more" if len(self._left_out) > NAMED else ""
            self._write_log(f"output: not collected: {', '.join(named)}{more}")

    async def _compare(self) -> None:
        for _ in range(ROUNDS):
            seen = await self._in_thread(self._scan)
            await self._ship(seen, last=True)
            if not await self._differs(seen):
                return
        self._write_log("output: the dispatcher's copies differ from what lies here, though they were sent again")

    async def _rest(self, rest_s: float) -> None:
        until = time.monotonic() + rest_s
        while not self._complete.is_set() and (left_s := until - time.monotonic()) > 0:
            if self._hurry() and not self._in_a_hurry:
                self._in_a_hurry = True
                return
            try:
                async with asyncio.timeout(min(POLL_S, left_s)):
                    await self._complete.wait()
            except TimeoutError:
                pass

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- scanning

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

    # ---- sending

    async def _ship(self, seen: dict[str, Seen], *, last: bool) -> None:
        if (now := self._transfers.dispatcher) != self._dispatcher:
            await self._compare_all()
            self._dispatcher = now
        self._forget()
        self.left = await self._in_thread(lambda: sum(self._unsent(name, now) for name, now in seen.items()))
        pieces = self._pieces(seen, last)
        while batch := await self._in_thread(lambda: _take(pieces)):
            begun = time.monotonic()
            for piece, held, expected in zip(batch.pieces, await self._send(batch), batch.expected, strict=True):
                if held != expected:
                    self._stale.add(piece.to or piece.name)
            self.left = max(0, self.left - sum(map(len, batch.data)))
            if not (last or self._in_a_hurry or self._complete.is_set()):
                await self._rest(min(2.0, SEND_SHARE * (time.monotonic() - begun)))
        self._forget()

    def _unsent(self, name: str, now: Seen) -> int:
        """Return the bytes of a file that the dispatcher's copy lacks."""
        held = self._held.get(name)
        if held is None or held.size < 0:
            return now[1]
        if (held.inode, held.size, held.changed_ns) == now:
            return 0
        return now[1] - held.size if held.inode == now[0] and now[1] > held.size else now[1]

    def _forget(self) -> None:
        for name in self._stale:
            log.info("output of %s: %s is sent anew", self._worker, name)
            self._held[name] = UploadedState(0, -1, 0)
        self._stale.clear()

    def _pieces(self, seen: dict[str, Seen], last: bool) -> Iterator[tuple[OutputPiece, bytes, int]]:
        """Yield the pieces to send, each with the expected answer. Runs in the thread.

        The recorded states assume that the expected answers arrive.
        """
        gone = {held.inode: name for name, held in self._held.items() if name not in seen}
        for name, now in seen.items():
            held = self._held.get(name)
            if held is not None and (held.inode, held.size, held.changed_ns) == now:
                continue
            try:
                with open(self._folder / name, "rb", opener=_open_plain) as file:
                    old = gone.pop(now[0], "") if held is None or held.inode != now[0] else ""
                    if old and now[1] >= self._held[old].size >= 0 and _is_longer(file, self._held[old]):
                        self._held[name] = self._held.pop(old)
                        yield OutputPiece("rename", old, to=name), b"", self._held[name].size
                    yield from self._of_file(name, now, file, last)
            except OSError as error:  # removed, renamed or unreadable: the next scan decides
                log.info("output of %s: %s: %s", self._worker, name, error)

    def _of_file(self, name: str, now: Seen, file: BinaryIO, last: bool) -> Iterator[tuple[OutputPiece, bytes, int]]:
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = UploadedState(now[0], 0, -1)
            yield from self._append(name, held, file, now)
        elif (held.inode, held.size, held.changed_ns) == now:
            return  # it has only been renamed
        elif held.inode == now[0] and now[1] > held.size >= 0 and _is_longer(file, held):
            yield from self._append(name, held, file, now)
        elif last or self._is_quiet(held, now):
            yield from self._draft(name, held, file, now, last)

    def _is_quiet(self, held: UploadedState, now: Seen) -> bool:
        clock = time.monotonic()
        if held.size < 0:
            return True  # the dispatcher's copy is useless
        if clock < held.not_before:
            return False
        held.wanted_since = held.wanted_since or clock
        return time.time() - now[2] / 1e9 >= QUIET_S or clock - held.wanted_since >= PATIENCE_S

    def _append(self, name: str, held: UploadedState, file: BinaryIO,
                now: Seen) -> Iterator[tuple[OutputPiece, bytes, int]]:
        """Yield the new end of a file, up to the scanned size; later bytes are left to the next scan."""
        file.seek(held.size)
        while held.size < now[1] or now[1] == 0:
            data = file.read(min(CHUNK, now[1] - held.size))
            if not data and now[1] > 0:
                break  # truncated meanwhile
            at, held.size = held.size, held.size + len(data)
            yield OutputPiece("append", name, at, len(data), whole=now[1]), data, held.size
            if now[1] == 0:
                break
        held.head, held.tail = _samples(file, held.size)
        held.changed_ns, held.wanted_since = now[2], 0.0

    def _draft(self, name: str, held: UploadedState, file: BinaryIO, now: Seen,
               last: bool) -> Iterator[tuple[OutputPiece, bytes, int]]:
        """Yield the whole file; if it changes meanwhile, the draft is abandoned and the old copy stays."""
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
        self._held[name] = UploadedState(now[0], size, now[2], *_samples(file, size), not_before=held.not_before)
        yield OutputPiece("draft", name, at, len(data), last=True, sha256=sha.hexdigest()), data, size

    # ---- comparing

    async def _compare_all(self) -> None:
        """Compare the recorded states with a new dispatcher's copies: it may hold less, or nothing."""
        await self._check((OutputPiece("check", name, bytes=held.size, last=True), b"", held.size)
                          for name, held in list(self._held.items()) if held.size >= 0)

    async def _differs(self, seen: dict[str, Seen]) -> bool:
        """Return whether any copy differs from the file here now; such files are then sent again."""
        return await self._check(self._sealed(seen))

    def _sealed(self, seen: dict[str, Seen]) -> Iterator[tuple[OutputPiece, bytes, int]]:
        for name in seen:
            try:
                with open(self._folder / name, "rb", opener=_open_plain) as file:
                    yield from _ranges(name, file)
            except OSError as error:
                log.warning("output of %s: %s cannot be read: %s", self._worker, name, error)

    async def _check(self, pieces: Iterator[tuple[OutputPiece, bytes, int]]) -> bool:
        differs = False
        while batch := await self._in_thread(lambda: _take(pieces)):
            for piece, held, expected in zip(batch.pieces, await self._send(batch), batch.expected, strict=True):
                if held != expected:
                    self._stale.add(piece.name)
                    differs = True
        return differs

    # ---- the wire

    async def _send(self, batch: _Batch) -> list[int]:
        body, backoff = pack_pieces(batch.pieces, b"".join(batch.data)), Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S)
        while True:
            try:
                status, answer = await self._transfers.post_output(self._job, self._worker, body)
                break
            except RETRYABLE as error:
                full = isinstance(error, aiohttp.ClientResponseError) and error.status == FULL_STATUS
                self.why = "its output waits: the dispatcher's disk is full" if full else ""
                if backoff.is_fresh:
                    log.warning("output of %s: %s; trying again", self._worker, error or type(error).__name__)
            await asyncio.sleep(backoff.next_s())
        self.why = ""
        if status >= 400:
            log.warning("output of %s: refused with %s: %s", self._worker, status, answer)
            raise UploadRefused(str(answer.get("error") or f"output: the dispatcher refuses it with {status}"))
        held = answer.get("held")
        if not isinstance(held, list) or len(held) != len(batch.pieces):
            raise UploadRefused(f"output: the dispatcher answers {str(answer)[:200]}")
        self.sent += len(body)
        return held


def _take(pieces: Iterator[tuple[OutputPiece, bytes, int]]) -> _Batch | None:
    """Collect the next pieces to send together; None when there are no more."""
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
    """Yield checks of a file in parts, small enough for a slow disk to read within the request's timeout."""
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


def _open_plain(path: str, flags: int) -> int:
    """Open a plain file; never follow a link of this name, never wait for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file any more")
    return descriptor


def _why_not(name: str, about: os.stat_result, files: int) -> str:
    """Explain why this file is not collected; "" if it is."""
    if not stat.S_ISREG(about.st_mode):
        return "no plain file"
    if files >= MOST_FILES:
        return f"there are more than {MOST_FILES} files"
    try:
        return "" if len(name.encode()) < PATH_BYTES and name.count("/") < MOST_PARTS else "its name is too long"
    except UnicodeEncodeError:
        return "its name is no text"


def _seen(about: os.stat_result) -> Seen:
    return (about.st_ino, about.st_size, about.st_mtime_ns)


def _samples(file: BinaryIO, size: int) -> tuple[bytes, bytes]:
    """Return digests of the first and the last bytes of the first `size` bytes."""
    file.seek(0)
    head = file.read(min(SAMPLE, size))
    file.seek(max(0, size - SAMPLE))
    tail = file.read(min(SAMPLE, size))
    return hashlib.sha256(head).digest(), hashlib.sha256(tail).digest()


def _is_longer(file: BinaryIO, held: UploadedState) -> bool:
    """Return whether samples suggest that the file begins with the copy. The comparison at the end is exact."""
    return held.size == 0 or _samples(file, held.size) == (held.head, held.tail)
