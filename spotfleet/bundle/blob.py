"""Compression of a group of files to the blob that travels, and the cache of earlier results.

The cache (`PieceCache`, a file in spotfleet's home directory) maps a group of files with these paths, sizes, times and
inodes to its blob, so that the group is not read again. Times within RACY_S of the scan are not trusted: a second write
of the same size within one tick of the file system's clock would not show. A file with a `stat` that changed while it
was read is not trusted either. A file that changes meanwhile travels as it was read, with that length and digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spotfleet.bundle.grouping import Group, Slice
from spotfleet.bundle.manifest import BundlePiece
from spotfleet.bundle.tree import File, shown
from spotfleet.storage import atomic

SHORTEST_SECRET = 6  # shorter ones would occur in innocent files by chance
RACY_S = 2.5  # FAT's clock ticks every 2 s
LEVEL = 3
SAMPLE_BYTES = 64 << 10
WORTH = 0.95  # a group is stored uncompressed if the sample does not shrink below this share
CHUNK = 1 << 20
FORMAT = 1
KEEP_DAYS = 60  # an entry is removed after this time without use
ROUNDS = 50_000  # rounds of PBKDF2: the cache must not disclose the secrets


class SecretValues:
    """Secret values that must not travel."""

    def __init__(self, values: Sequence[bytes] = ()) -> None:
        self.values = tuple(values)
        self._lock = threading.Lock()
        self._searched: dict[File, bool] = {}

    @staticmethod
    def of(given: Sequence[str]) -> SecretValues:
        return SecretValues(sorted({s.encode() for s in given if len(s) >= SHORTEST_SECRET}))

    def in_data(self, data: bytes) -> bool:
        return any(value in data for value in self.values)

    def in_file(self, file: File) -> bool:
        """Search a file of several pieces, once, before the first of them travels."""
        with self._lock:
            if self.values and file not in self._searched:
                self._searched[file] = self._search(file.path)
            return self._searched.get(file, False)

    def _search(self, path: str) -> bool:
        overlap, tail = max(map(len, self.values)) - 1, b""
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                window = tail + chunk
                if self.in_data(window):
                    return True
                tail = window[len(window) - overlap:]
        return False


NONE = SecretValues()


@dataclass(frozen=True)
class PackedGroup:
    """Result of reading a group. `piece` is None if the group had no bytes."""

    piece: BundlePiece | None
    sizes: tuple[int, ...]  # length of each slice; -1 for a slice that was left out
    left_out: tuple[str, ...] = ()
    steady: bool = False  # a second read would give the same, as far as `stat` shows
    blob: bytes = b""


class PieceCache:
    """Cache from groups to pieces. If it is damaged or cannot be written, files are read again and nothing else
    happens."""

    def __init__(self, path: Path, needles: SecretValues = NONE) -> None:
        self.path = path
        self._lock = threading.Lock()
        said = _read(path)
        self._salt: str = said["salt"]
        self._pieces: dict[str, list] = said["pieces"]
        self._today = int(time.time() / 86_400)
        text = b"\0".join(needles.values)
        self._needles = hashlib.pbkdf2_hmac("sha256", text, self._salt.encode(), ROUNDS) if text else b""

    def find(self, group: Group) -> PackedGroup | None:
        key = self._key(group)
        with self._lock:
            row = self._pieces.get(key)
            if row is None:
                return None
            row[3] = self._today
        return PackedGroup(BundlePiece(*row[:3]), tuple(s.bytes for s in group), steady=True)

    def keep(self, group: Group, made: PackedGroup) -> None:
        if made.steady and made.piece is not None:
            row = [made.piece.sha256, made.piece.bytes, made.piece.unpacked_bytes, self._today]
            with self._lock:
                self._pieces[self._key(group)] = row

    def save(self) -> None:
        with self._lock:
            pieces = {k: row for k, row in self._pieces.items() if row[3] > self._today - KEEP_DAYS}
            text = json.dumps({"format": FORMAT, "salt": self._salt, "pieces": pieces})
        with suppress(OSError):
            atomic.make_folder(self.path.parent)
            atomic.write(self.path, text, sync=False)

    def _key(self, group: Group) -> str:
        seen = hashlib.sha256(b"%d %d " % (FORMAT, LEVEL) + self._needles)
        for (_, path, size, mtime_ns, ctime_ns, inode, _), start, length in group:
            seen.update(f"{size} {mtime_ns} {ctime_ns} {inode} {start} {length} {path}\0".encode(
                errors="surrogateescape"))
        return seen.hexdigest()


def _read(path: Path) -> dict:
    try:
        said = json.loads(path.read_text())
        rows = said["pieces"].values()
        if said["format"] == FORMAT and isinstance(said["salt"], str) and all(
                len(row) == 4 and isinstance(row[0], str) and all(isinstance(n, int) for n in row[1:]) for row in rows):
            return said
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # missing or damaged: every file is read again
    return {"salt": secrets.token_hex(16), "pieces": {}}


def make(group: Group, needles: SecretValues = NONE, now: float | None = None) -> PackedGroup:
    """Read a group and compress it. Files that hold a secret or cannot be read are left out and named.

    `now` is Unix time; a file that was changed within RACY_S before it makes the piece unsteady.
    """
    fresh_ns = int(((time.time() if now is None else now) - RACY_S) * 1e9)
    parts: list[bytes] = []
    sizes: list[int] = []
    left_out: list[str] = []
    steady = True
    for piece in group:
        data, why, sound = _slice(piece, needles)
        steady = steady and sound and not why and max(piece.file.mtime_ns, piece.file.ctime_ns) < fresh_ns
        if why:
            left_out.append(f"{shown(piece.file.name)}: {why}")
        parts.append(data)
        sizes.append(-1 if why else len(data))
    raw = b"".join(parts)
    if not raw:
        return PackedGroup(None, tuple(sizes), tuple(left_out))
    blob = compress(raw)
    piece_made = BundlePiece(hashlib.sha256(blob).hexdigest(), len(blob), len(raw))
    return PackedGroup(piece_made, tuple(sizes), tuple(left_out), steady, blob)


def _slice(piece: Slice, needles: SecretValues) -> tuple[bytes, str, bool]:
    """Return the bytes, the reason why they are left out, and whether `stat` was the same before and after."""
    file = piece.file
    try:
        if piece.bytes < file.bytes and needles.in_file(file):
            return b"", "holds the value of a secret", False
        with open(os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as opened:
            data = os.pread(opened.fileno(), piece.bytes, piece.start)
            sound = len(data) == piece.bytes and _same(file, os.fstat(opened.fileno()))
    except OSError as error:
        return b"", f"cannot be read ({error.strerror})", False
    if needles.in_data(data):
        return b"", "holds the value of a secret", False
    return data, "", sound


def _same(file: File, now: os.stat_result) -> bool:
    return (file.bytes, file.mtime_ns, file.ctime_ns, file.inode) == (
        now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino)


def compress(raw: bytes) -> bytes:
    """Compress with zlib, or store uncompressed data that does not shrink, such as pictures and weights."""
    middle = max(0, len(raw) // 2 - SAMPLE_BYTES // 2)
    sample = raw[middle:middle + SAMPLE_BYTES]
    worth = len(zlib.compress(sample, 1)) < WORTH * len(sample)
    return zlib.compress(raw, LEVEL if worth else 0)
