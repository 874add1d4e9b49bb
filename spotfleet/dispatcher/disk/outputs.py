"""Copies of workers' output folders on the dispatcher's disk, which outlive their hosts.

    jobs/JOB/outputs/HOST@SLOT@INCARNATION/...          the files, as named by the worker
    jobs/JOB/outputs/.HOST@SLOT@INCARNATION.part/...    drafts: incomplete new contents of files
    jobs/JOB/outputs/.HOST@SLOT@INCARNATION.partial/... markers of files that end before the sender's did: `partials.py`

A file only grows at its end, or is replaced whole. Files that a worker removes stay here. The folder holds plain files
only, no links, and no name leads out of it. A partial file does not count as collected: the archive and downloads have
it as NAME.partial, or under a shorter name with a digest.

Each limit holds before anything is written: for bytes, for files with their markers, for folders, and for drafts.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.dispatcher.disk import space
from spotfleet.dispatcher.disk.files import TooLarge
from spotfleet.dispatcher.disk.partials import PartialMarkers, files_in
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.protocol.messages import OutputPiece
from spotfleet.storage import atomic, names

LIMIT_BYTES = 64 << 30  # limit for one worker's copies, including drafts
MOST_FILES = 100_000  # limit for one worker; the same for markers and for folders
MOST_DRAFTS = 16  # limit for one worker, which sends one file after the other; the oldest goes for a new one
COMPARED = 4  # times that a comparison of all files counts as progress; an agent makes three at the end
READ_BYTES = 256 << 20  # limit for what one request may have compared
SYNC_BYTES = 64 << 20  # bytes of a draft between two syncs, so that the last one is short
BLOCK_BYTES = 4096  # that a folder or a small file takes on a disk
PATH_BYTES, MOST_PARTS = 3000, 100  # deeper folders end a recursive walk with an error


class RequestStopped(SpotfleetError):
    """End of a request before its work is done: nobody waits for the answer, or its host is trusted no more."""


@dataclass
class _Tally:
    files: int = 0
    folders: int = 0
    bytes: int = 0
    moved: int = 0  # see `Outputs.moved`
    compared: int = 0


class Outputs:
    """Outputs of one job. Call blocking methods off the loop, for each worker from one caller at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tallies: dict[str, _Tally] = {}
        self._hashes: dict[str, dict[str, Any]] = {}
        self._partial: dict[Path, PartialMarkers] = {}  # by folder of a worker
        self._newest_at, self._counted = 0.0, False
        self._counting = threading.Lock()
        self._counter: threading.Thread | None = None
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def bytes(self) -> int:
        """Bytes counted so far: after a restart a thread counts the files, which may be many."""
        if not self._counted and self._counter is None:
            self._counter = threading.Thread(target=self._count, name="outputs", daemon=True)
            self._counter.start()
        return sum(t.bytes for t in list(self._tallies.values()))

    def age_s(self, unix: float) -> float | None:
        """Return the age of the newest output; None if none is known."""
        return max(0.0, unix - self._newest_at) if self._newest_at else None

    @property
    def is_busy(self) -> bool:
        """Whether a request applies pieces now."""
        return any(lock.locked() for lock in self._locks.values())

    def lock(self, worker: str) -> asyncio.Lock:
        """Return the lock to hold during `apply`: a retry may overlap a slow request."""
        return self._locks[worker]

    def has(self, worker: str) -> bool:
        """Return whether there is a folder of this worker."""
        return self._folder_of(worker).is_dir()

    def moved(self, worker: str) -> int:
        """Return a number that grows when bytes of this worker arrive, when a file appears, and while files that are
        here are found whole for the first times."""
        return self._tallies[worker].moved if worker in self._tallies else 0

    def _folder_of(self, worker: str) -> Path:
        return self.folder / worker.replace("/", "@")

    def apply(self, worker: str, pieces: list[tuple[OutputPiece, bytes]],
              stopped: Callable[[], bool] = lambda: False) -> list[int]:
        """Apply the pieces in order; return for each the answer that `messages.pack_pieces` defines. Blocking.

        Raises UsageError for a name that leads out or too much to compare, TooLarge beyond the limits, DiskFull, and
        RequestStopped soon after `stopped` returns True; earlier pieces stay applied.
        """
        self._count()
        for piece, _ in pieces:
            _check_name(piece.name)
            _check_name(piece.to or "x")
        if sum(piece.bytes for piece, _ in pieces if piece.do == "check" and piece.sha256) > READ_BYTES:
            raise UsageError(f"output: one request may compare {READ_BYTES} bytes")
        folder = self._folder_of(worker)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        space.refuse_if_full(folder, sum(len(data) for _, data in pieces))
        if folder not in self._partial:
            self._partial[folder] = PartialMarkers(folder)
        copy = _Copy(folder, self._tallies.setdefault(worker, _Tally()), self._hashes.setdefault(worker, {}),
                     self._partial[folder], stopped)
        held = []
        for piece, data in pieces:
            if stopped():
                raise RequestStopped(f"output of {worker}: the request was given up")
            held.append(copy.do(piece, data))
            if piece.do != "check":
                self._newest_at = time.time()
        return held

    def _count(self) -> None:
        """Count the files of earlier processes. Blocking."""
        with self._counting:
            if self._counted:
                return
            for folder in self.folder.glob("[!.]*@*"):
                tally = self._tallies.setdefault(folder.name.replace("@", "/"), _Tally())
                for path in folder.rglob("*"):
                    if path.is_dir():
                        tally.folders += 1
                    elif path.is_file():
                        stat = path.stat()
                        tally.files, tally.bytes = tally.files + 1, tally.bytes + stat.st_size
                        self._newest_at = max(self._newest_at, stat.st_mtime)
            self._counted = True


class _Copy:
    """Copy of one worker's folder."""

    def __init__(self, folder: Path, tally: _Tally, hashes: dict[str, Any], partial: PartialMarkers,
                 stopped: Callable[[], bool]) -> None:
        """`hashes`: by name, the hash of each draft so far, the oldest draft first."""
        self.folder, self._tally, self._hashes, self._partial = folder, tally, hashes, partial
        self._drafts = folder.with_name(f".{folder.name}.part")
        self._stopped, self._read = stopped, 0  # bytes compared so far

    def do(self, piece: OutputPiece, data: bytes) -> int:
        path = self.folder / piece.name
        match piece.do:
            case "append":
                held = self._append(path, piece, data)
                if held >= piece.whole > 0:
                    self._partial.discard(piece.name)
                return held
            case "draft":
                held = self._draft(path, piece, data)
                if piece.last and held >= 0:
                    self._partial.discard(piece.name)
                return held
            case "rename":
                return self._rename(piece.name, piece.to)
            case _:
                held = self._check(path, piece)
                if piece.last and piece.sha256 and held >= 0:
                    self._partial.discard(piece.name)
                return held

    def _check(self, path: Path, piece: OutputPiece) -> int:
        end, size = piece.at + piece.bytes, _size(path)
        if size < end or (piece.last and size != end):
            return -1
        if piece.sha256 and self._digest(path, piece.at, piece.bytes) != piece.sha256:
            return -1
        self._tally.compared += max(1, piece.bytes)
        if piece.sha256 and self._tally.compared <= COMPARED * (self._tally.bytes + self._tally.files):
            self._tally.moved += max(1, piece.bytes)
        return end

    def _digest(self, path: Path, at: int, size: int) -> str:
        sha = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(at)
            while size > 0 and (data := file.read(min(size, 1 << 20))):
                if self._stopped():
                    raise RequestStopped(f"output: the comparison of {path.name} was given up")
                sha.update(data)
                size, self._read = size - len(data), self._read + len(data)
        return sha.hexdigest()

    def _append(self, path: Path, piece: OutputPiece, data: bytes) -> int:
        size, at = _size(path), piece.at
        if data and at + len(data) <= size:  # it may be resent, because the answer was lost
            return at + len(data) if _holds(path, at, data) else -1
        if (size < 0 and at > 0) or not (at <= max(size, 0) <= at + len(data)) or (size == at and not data):
            return max(size, 0)
        fresh = data[max(size, 0) - at:]
        self._make_room(len(fresh), files=size < 0)
        if size < 0:
            self._make_way(path)
        if piece.whole > at + len(data):  # before the bytes: a killed dispatcher must not take them for the whole file
            self._partial.add(piece.name)
        _append(path, fresh, max(size, 0))
        self._tally.files += size < 0
        self._tally.bytes += len(fresh)
        self._tally.moved += len(fresh) + (size < 0)
        return max(size, 0) + len(fresh)

    def _draft_of(self, name: str) -> Path:
        return self._drafts / hashlib.sha256(name.encode()).hexdigest()

    def _draft(self, path: Path, piece: OutputPiece, data: bytes) -> int:
        draft, end = self._draft_of(piece.name), piece.at + len(data)
        if piece.at == 0:
            draft.unlink(missing_ok=True)
            self._hashes.pop(piece.name, None)
            while len(self._hashes) >= MOST_DRAFTS:
                oldest = next(iter(self._hashes))
                self._draft_of(oldest).unlink(missing_ok=True)
                del self._hashes[oldest]
            self._hashes[piece.name] = hashlib.sha256()
        size, sha = max(_size(draft), 0), self._hashes.get(piece.name)
        if sha is None or size != piece.at:
            return self._draft_again(path, piece, size, end)
        drafts = sum(max(_size(self._draft_of(name)), 0) for name in self._hashes)
        self._make_room(drafts + len(data), files=False)
        self._drafts.mkdir(exist_ok=True, mode=0o700)
        _append(draft, data, size)
        self._tally.moved += len(data)
        sha.update(data)
        if piece.last or size // SYNC_BYTES < end // SYNC_BYTES:
            _sync(draft)
        if not piece.last:
            return end
        del self._hashes[piece.name]
        if sha.hexdigest() != piece.sha256:
            draft.unlink()
            return -1
        before = _size(path)
        self._make_room(0, files=before < 0)
        self._make_way(path)
        atomic.rename(draft, path, sync=False)  # its host sends it again while it lives
        self._tally.files += before < 0
        self._tally.bytes += end - max(before, 0)
        return end

    def _draft_again(self, path: Path, piece: OutputPiece, size: int, end: int) -> int:
        """Return the answer to a piece that does not continue the draft: it may be resent after a lost answer."""
        if not piece.last:
            return end if end <= size else size
        if _size(path) != end or self._read > READ_BYTES:  # what is not compared is sent again
            return -1
        return end if self._digest(path, 0, end) == piece.sha256 else -1

    def _rename(self, name: str, new: str) -> int:
        path, to = self.folder / name, self.folder / new
        size = _size(path)
        if size < 0 or name == new:
            return _size(to)
        before = _size(to)
        if f"{new}/".startswith(f"{name}/") or f"{name}/".startswith(f"{new}/"):  # one is to be a folder of the other
            path = self._out_of_the_way(path)
        self._make_way(to)
        if name in self._partial:
            self._partial.add(new)
        atomic.rename(path, to, sync=False)
        if name not in self._partial:
            self._partial.discard(new)
        self._partial.discard(name)
        self._tally.files -= before >= 0
        self._tally.bytes -= max(before, 0)
        return size

    def _out_of_the_way(self, path: Path) -> Path:
        """Move a file among the drafts; return its path there. If it gets no further, its sender finds it missing."""
        self._drafts.mkdir(exist_ok=True, mode=0o700)
        draft = self._draft_of(str(path.relative_to(self.folder)))
        atomic.rename(path, draft, sync=False)
        return draft

    def _make_room(self, size: int, *, files: bool) -> None:
        if self._tally.bytes + size > LIMIT_BYTES:
            raise TooLarge(f"output: a worker's files may take {LIMIT_BYTES} bytes; what is beyond is not collected")
        if files and max(self._tally.files, len(self._partial)) >= MOST_FILES:
            raise TooLarge(f"output: a worker may have {MOST_FILES} files; what is beyond is not collected")

    def _make_way(self, path: Path) -> None:
        """Create the folders above `path`. A conflicting entry is one that the worker has replaced by another kind
        (file or folder): it is kept under another name."""
        above = [p for p in path.parents if p.is_relative_to(self.folder) and p != self.folder]
        missing = sum(not p.is_dir() for p in above)
        if missing and self._tally.folders + missing > MOST_FILES:
            raise TooLarge(f"output: a worker may have {MOST_FILES} folders; what is beyond is not collected")
        space.refuse_if_full(self.folder, BLOCK_BYTES * (missing + 2))  # folders, file and marker
        for folder in reversed(above):
            if folder.is_file():
                self._put_aside(folder)
            folder.mkdir(exist_ok=True, mode=0o700)
        self._tally.folders += missing
        if path.is_dir():
            self._put_aside(path)

    def _put_aside(self, path: Path) -> None:
        name = str(path.relative_to(self.folder))
        number = next((n for n in range(1, 100) if not self._is_taken(f"{name}.{n}")), 100)
        new = names.with_suffix(name, f".{number}", self._is_taken)
        inner = [name] if path.is_file() else [f"{name}/{file}" for file in files_in(path)] if self._partial else []
        partial = {of: f"{new}{of.removeprefix(name)}" for of in inner if of in self._partial}
        for found in partial.values():
            self._partial.add(found)
        atomic.rename(path, self.folder / new, sync=False)
        for found in partial:
            self._partial.discard(found)

    def _is_taken(self, name: str) -> bool:
        return os.path.lexists(self.folder / name)


def _check_name(name: str) -> None:
    """Raise UsageError for a name that leads out of a folder, or is not a valid file name."""
    parts = name.split("/")
    try:
        data = [part.encode() for part in parts]
    except UnicodeEncodeError:
        data = [b""]
    odd = any(not part or part in (b".", b"..") or b"\0" in part or len(part) > names.NAME_BYTES for part in data)
    if odd or sum(map(len, data)) + len(data) > PATH_BYTES or len(data) > MOST_PARTS:
        raise UsageError(f"output: {name[:200]!r} is no name of a file inside a folder")


def _append(path: Path, data: bytes, before: int) -> None:
    """Append all of `data` or nothing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(path, flags, 0o600), "ab") as file:
            file.write(data)
    except OSError:
        if path.exists():
            os.truncate(path, before)
        raise


def _holds(path: Path, at: int, data: bytes) -> bool:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(len(data)) == data


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _size(path: Path) -> int:
    """Return the size of a file; -1 if there is none."""
    try:
        return path.stat().st_size if not path.is_dir() else -1
    except (FileNotFoundError, NotADirectoryError):
        return -1
