"""Copy of a store's keys into a folder, by several streams, which resumes after an interruption.

    FOLDER/files/KEY      the whole content, with the digest of its entry
    FOLDER/parts/NAME     the first bytes of a large content; NAME is a hash of the key and its digest

    a wanted key
      --its whole content is here, or in another folder--> done
      --its first bytes are here--> the rest is read ------------+
      --nothing is here--> all is read; one request brings many  |
                           small keys, or a piece of a large one +--the digest is right--> files/KEY, done
                                                                 '--wrong, or the source lacks the key-->
                                                                    `copy` returns the key; the caller calls it
                                                                    again with new entries from the source

A large content is read in pieces of PIECE_BYTES. Several streams request its pieces at once, which may arrive in any
order, but are written in order: what is on disk is always the first bytes, and they are not read again. A kill loses
the pieces that have not been written: three for each stream at most, which is also the most that memory holds.

A key that this file system refuses as a name is set aside under another one; all others are copied. So is a key whose
name is that of another one there, as on most laptops' disks, where names that differ only in case are one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from spotfleet.errors import SpotfleetError
from spotfleet.storage import atomic, names
from spotfleet.storage.store import CHUNK_BYTES, DurableStore, StoreEntry, UnsafeKey, check_key

PIECE_BYTES = 4 << 20
KEYS_AT_ONCE, KEY_CHARS = 500, 200_000  # small keys in one request, and their characters together
STREAMS = 4
REPORT_S = 1.0


@dataclass(frozen=True)
class Piece:
    """Range of a key's bytes."""

    key: str
    start: int
    end: int


class Reader(Protocol):
    """Source of one stream's pieces."""

    def read(self, pieces: Sequence[Piece]) -> bytes:
        """Return the bytes of all pieces, one after the other. FileNotFoundError: the source does not have them."""

    def abort(self) -> None:
        """End a `read` of another thread soon, and refuse later ones."""


class StoreReader:
    """Reader of a store."""

    def __init__(self, store: DurableStore) -> None:
        self._store = store

    def read(self, pieces: Sequence[Piece]) -> bytes:
        return b"".join(chunk for p in pieces for chunk in self._store.get(p.key, start=p.start, end=p.end))

    def abort(self) -> None:
        """A range of a store ends soon anyway."""


@dataclass
class Tally:
    """Progress of a copy, in bytes."""

    total: int = 0
    present: int = 0  # here before
    moved: int = 0
    files: int = 0  # whole ones

    @property
    def here(self) -> int:
        return self.present + self.moved


class Mirror:
    """Copy into one folder, in as many rounds as the caller needs."""

    def __init__(self, folder: Path, report: Callable[[Tally], None] = lambda tally: None, *,
                 seed: Callable[[str], Path] | None = None) -> None:
        """`report` is called about once in REPORT_S while a copy runs. `seed` returns the path where a key may be
        already; that file stays as it is."""
        self.files, self._parts, self._seed = folder / "files", folder / "parts", seed
        self.tally, self._report, self._reported_at = Tally(), report, 0.0
        self._lock = threading.Lock()
        self._whole: dict[str, StoreEntry] = {}  # keys that this process has verified
        self._wanted: set[str] = set()
        self.refused: dict[str, str] = {}  # key that is set aside -> why
        self._failed: set[str] = set()
        self._same_names: names.SameNames | None = None  # where this disk does not distinguish all names
        self._stopped = False
        self._before = 0  # bytes that earlier rounds have moved

    @property
    def moved(self) -> int:
        """Bytes that all rounds have read from the source."""
        return self._before + self.tally.moved

    def copy(self, entries: Iterable[StoreEntry | None], readers: Sequence[Reader]) -> list[str]:
        """Copy all entries, by one stream for each of `readers`; return the keys that are not whole: the source lacks
        them, or sent something else. Other files go from `files`. None among the entries: the next ones take a while,
        so the small keys so far are read before they change. Raises UnsafeKey for an entry that leads out of the
        folder, OSError if this disk or a reader fails; what is here by then counts when it is called again."""
        self._wanted, self._failed = set(), set()
        self._before = self.moved
        self.tally.present, self.tally.moved, self.tally.files = 0, 0, 0
        for folder in (self.files, self._parts):
            atomic.make_folder(folder)
        self._same_names = names.SameNames() if folds_names(self._parts) else None
        loads = self._loads(entries)
        if len(readers) == 1:
            for load in loads:
                self._carry(load, readers[0])
                self._tell()
        else:
            self._carry_all(loads, readers)
        self._remove_others()
        self.refused = {key: why for key, why in self.refused.items() if key in self._wanted}
        self._report(self.tally)
        return sorted(self._failed)

    # ---- what is to be read

    def _loads(self, entries: Iterable[StoreEntry | None]) -> Iterator[list[_Share]]:
        """Yield loads of about PIECE_BYTES each, for one request."""
        small: list[_Share] = []
        for entry in entries:
            if entry is None:
                if small:
                    yield small
                small = []
                continue
            check_key(entry.key)
            if entry.key in self._wanted or entry.bytes < 0:
                raise UnsafeKey(f"{entry.key[:200]!r} is listed twice, or without a size")
            self._wanted.add(entry.key)
            if self._same_names is not None and (other := self._same_names.other(entry.key)):
                self.refused[entry.key] = f"this disk does not distinguish it from {other!r}"
            if self._is_whole(entry):
                self._count(present=entry.bytes, files=1)
            elif entry.bytes <= PIECE_BYTES // 2:
                small.append(_Share(Piece(entry.key, 0, entry.bytes), _Small(entry)))
            else:
                yield from self._shares_of_large(entry)
            if len(small) >= KEYS_AT_ONCE or sum(s.piece.end for s in small) >= PIECE_BYTES or sum(
                    len(s.piece.key) for s in small) >= KEY_CHARS:
                yield small
                small = []
            self._tell()
        if small:
            yield small

    def _shares_of_large(self, entry: StoreEntry) -> Iterator[list[_Share]]:
        large = _Large(entry, self._part_of(entry))
        at = large.resume()
        self._count(present=at)
        if at == entry.bytes:  # killed before the rename
            self._settle(entry, large.take(at, b""), large.part)
        while at < entry.bytes and entry.key not in self._failed:
            end = min(at + PIECE_BYTES, entry.bytes)
            yield [_Share(Piece(entry.key, at, end), large)]
            at = end

    def path_in_files(self, key: str) -> str:
        """Return where the content of a key is, relative to `files`."""
        return names.aside(key) if key in self.refused else key

    def _is_whole(self, entry: StoreEntry) -> bool:
        path = self.files / self.path_in_files(entry.key)
        seed = self._seed(entry.key) if self._seed is not None else None
        known = self._whole.get(entry.key)
        if known is not None and (known.bytes, known.sha256) == (entry.bytes, entry.sha256) and path.is_file():
            return True  # else a list in between lacked it
        if not _holds(path, entry):
            if seed is None or not _holds(seed, entry):
                return False
            _link(seed, self._make_way(entry.key))
        self._whole[entry.key] = entry
        return True

    def _part_of(self, entry: StoreEntry) -> Path:
        return self._parts / hashlib.sha256(f"{entry.key}\0{entry.sha256}\0{entry.bytes}".encode()).hexdigest()

    # ---- streams

    def _carry_all(self, loads: Iterator[list[_Share]], readers: Sequence[Reader]) -> None:
        free: SimpleQueue[Reader] = SimpleQueue()
        for reader in readers:
            free.put(reader)

        def carry(load: list[_Share]) -> None:
            reader = free.get()
            try:
                self._carry(load, reader)
            finally:
                free.put(reader)

        pool, running = ThreadPoolExecutor(len(readers), "mirror"), set[Future[None]]()
        try:
            for load in loads:
                while running and load[0].is_early(2 * len(readers) * PIECE_BYTES):
                    running = self._wait(running, len(running))
                running.add(pool.submit(carry, load))
                running = self._wait(running, 2 * len(readers))
            self._wait(running, 1)
        except BaseException:
            self._stopped = True
            for reader in readers:
                reader.abort()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            self._stopped = False

    def _wait(self, running: set[Future[None]], below: int) -> set[Future[None]]:
        """Wait until fewer than `below` loads are on their way; raise the error of one that failed."""
        while len(running) >= below:
            done, running = wait(running, timeout=REPORT_S, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            self._tell()
        return running

    def _carry(self, load: list[_Share], reader: Reader) -> None:
        """Read one load and deliver its shares."""
        load = [share for share in load if share.piece.key not in self._failed]
        if not load or self._stopped:
            return
        if (data := _read(load, reader)) is None:
            if len(load) == 1:
                return self._fail(load[0].piece.key)
            middle = len(load) // 2  # one key that is gone or shorter fails a request for many
            self._carry(load[:middle], reader)
            return self._carry(load[middle:], reader)
        at = 0
        for share in load:
            size = share.piece.end - share.piece.start
            self._deliver(share, data[at:at + size])
            at += size
        self._count(moved=len(data))

    def _deliver(self, share: _Share, data: memoryview) -> None:
        entry, into = share.into.entry, share.into
        if isinstance(into, _Large):
            try:
                with into.lock:
                    if not self._stopped:
                        self._settle(entry, into.take(share.piece.start, data), into.part)
            except OSError as error:
                raise _cannot_write(error) from None
        elif entry.sha256 and hashlib.sha256(data).hexdigest() != entry.sha256:
            self._fail(entry.key)
        else:
            try:
                with atomic.replacing(self._make_way(entry.key), draft=self._part_of(entry), sync=False) as out:
                    out.write(data)
            except OSError as error:
                raise _cannot_write(error) from None
            self._done(entry)

    def _settle(self, entry: StoreEntry, digest: str | None, part: Path) -> None:
        """Put a large key in its place once `digest`, that of all its bytes, is known."""
        if digest is None:
            return
        if entry.sha256 and digest != entry.sha256:
            part.unlink()
            return self._fail(entry.key)
        atomic.rename(part, self._make_way(entry.key), sync=False)  # `sync_tree` of the caller
        self._done(entry)

    def _make_way(self, key: str) -> Path:
        """Return the path of a key, with the folders above it. What an earlier list had in its way goes."""
        with self._lock:
            try:
                return self._made(key)
            except OSError as error:
                if not names.refuses_name(error):
                    raise
                self.refused[key] = error.strerror or str(error)
                return self._made(key)

    def _made(self, key: str) -> Path:
        path = self.files / self.path_in_files(key)
        if key not in self.refused:
            for above in [p for p in path.parents if p.is_relative_to(self.files) and p != self.files]:
                if above.is_file() and str(above.relative_to(self.files)) not in self._wanted:
                    above.unlink()
            if os.path.isdir(path) and not any(other.startswith(f"{key}/") for other in list(self._wanted)):
                shutil.rmtree(path)
        for above in reversed(path.relative_to(self.files).parents):
            (self.files / above).mkdir(exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(path.lstat().st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return path

    def _remove_others(self) -> None:
        """Remove files that an earlier list had, and the beginnings of replaced contents."""
        fold = names.folded if self._same_names is not None else str  # a folder may have another spelling here
        wanted = {fold(self.path_in_files(key)) for key in self._wanted}
        for path in sorted(self.files.rglob("*"), reverse=True):
            if path.is_dir():
                with suppress(OSError):  # not empty
                    path.rmdir()
            elif fold(str(path.relative_to(self.files))) not in wanted:
                path.unlink()
        if not self._failed:
            shutil.rmtree(self._parts)

    # ---- results

    def _done(self, entry: StoreEntry) -> None:
        self._whole[entry.key] = entry
        self._count(files=1)

    def _fail(self, key: str) -> None:
        with self._lock:
            self._failed.add(key)

    def _count(self, *, present: int = 0, moved: int = 0, files: int = 0) -> None:
        with self._lock:
            self.tally.present += present
            self.tally.moved += moved
            self.tally.files += files

    def _tell(self) -> None:
        if time.monotonic() - self._reported_at >= REPORT_S:
            self._reported_at = time.monotonic()
            self._report(self.tally)


@dataclass
class _Small:
    """A key that one request reads whole."""

    entry: StoreEntry


class _Large:
    """A key that grows on disk from its beginning; a piece that arrives early waits in memory."""

    def __init__(self, entry: StoreEntry, part: Path) -> None:
        self.entry, self.part, self.lock = entry, part, threading.Lock()
        self.at, self._sha = 0, hashlib.sha256()
        self._early: dict[int, Any] = {}

    def resume(self) -> int:
        """Read the beginning that is here; return its size."""
        with suppress(FileNotFoundError):
            if self.part.stat().st_size > self.entry.bytes:
                self.part.unlink()
            with self.part.open("rb") as file:
                while data := file.read(CHUNK_BYTES):
                    self._sha.update(data)
                    self.at += len(data)
        return self.at

    def take(self, start: int, data: Any) -> str | None:
        """Write the piece and all that waited for it; return the digest of the whole once it is complete."""
        self._early[start] = data
        if start == self.at:
            descriptor = os.open(self.part, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with open(descriptor, "ab", buffering=0) as file:
                while (ready := self._early.pop(self.at, None)) is not None and len(ready):
                    _write_all(file, ready)
                    self._sha.update(ready)
                    self.at += len(ready)
        return self._sha.hexdigest() if self.at == self.entry.bytes else None


@dataclass(frozen=True)
class _Share:
    """Piece of a request, and where it goes."""

    piece: Piece
    into: _Small | _Large

    def is_early(self, window_bytes: int) -> bool:
        """Return whether so many bytes before it have not arrived: it would wait in memory."""
        return isinstance(self.into, _Large) and self.piece.start - self.into.at >= window_bytes


def _read(load: Sequence[_Share], reader: Reader) -> memoryview | None:
    """Return the bytes of all shares; None if the source does not have all of them."""
    try:
        data = memoryview(reader.read([share.piece for share in load]))
    except FileNotFoundError:
        return None
    return data if len(data) == sum(share.piece.end - share.piece.start for share in load) else None


def _write_all(file: Any, data: Any) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left):]


def folds_names(folder: Path) -> bool:
    """Return whether the file system of a folder takes names that differ only in case for one."""
    probe = folder / ".case"
    probe.touch(mode=0o600)
    try:
        return probe.with_name(".CASE").exists()
    finally:
        probe.unlink()


def _holds(path: Path, entry: StoreEntry) -> bool:
    """Return whether the file is the whole content of the entry."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except OSError:  # it cannot be read here: it is fetched
        return False


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; a second copy where the file system has no such links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o600)


def _cannot_write(error: OSError) -> SpotfleetError:
    return SpotfleetError(f"what was received cannot be written here: {error.strerror or error}",
                          hint="make room on this machine's disk and try again")
