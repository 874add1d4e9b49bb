"""A rank's part of a checkpoint as a file: written under another name, synced, renamed, so it is whole or absent.

    ckpt-VERSION.tar                 a whole checkpoint, by one process
    ckpt-VERSION.PART-of-PARTS.tar   a segment; see format.py
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic
from spotfleet.train.checkpoint import format
from spotfleet.train.checkpoint.exchange import PartReport, PeerFailed
from spotfleet.train.checkpoint.format import Shard

CHUNK_BYTES = 1 << 20


@dataclass
class Times:
    """Durations of the phases of one checkpoint, in seconds."""

    copy_s: float = 0.0  # training waited
    write_s: float = 0.0
    wait_s: float = 0.0  # for the other ranks
    sync_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.copy_s + self.write_s + self.wait_s + self.sync_s


# Waits for the reports of ranks 1, 2, ... and returns them; the argument is the time that this rank's own part took.
Others = Callable[[float], list[PartReport]]


def no_others(own_s: float) -> list[PartReport]:
    return []


def write(shard: Shard, folder: Path, others: Others = no_others,
          times: Times | None = None) -> tuple[Checkpoint, PartReport]:
    """Write the shard as a file in `folder`. No file is left when the disk fails (OSError) or `others` raises."""
    times = times or Times()
    part, parts = ((shard.rank - 1) % shard.world, shard.world)
    name = f"ckpt-{shard.version}.tar" if parts == 1 else f"ckpt-{shard.version}.{part}-of-{parts}.tar"
    items = format.items_of(shard)
    with _replacing(folder / name, times) as file:
        begun = time.monotonic()
        size = _member(file, format.file_name(shard.rank), items.chunks())
        times.write_s = time.monotonic() - begun
        if shard.rank == 0:
            begun = time.monotonic()
            reports = check_parts(shard, others(times.write_s))
            times.wait_s = time.monotonic() - begun
            _member(file, format.METADATA, [format.metadata(shard, items, [t.lengths for t in reports])])
            file.write(format.TAR_END)
    begun = time.monotonic()
    digest = digest_of(folder / name)
    times.write_s += time.monotonic() - begun
    path = folder / name
    done = Checkpoint(shard.version, digest, path.stat().st_size, shard.generation, str(path), part, parts)
    return done, PartReport(0, shard.version, size, digest, tuple(items.lengths), format.layout(shard))


def check_parts(shard: Shard, reports: list[PartReport]) -> list[PartReport]:
    """Return `reports`; PeerFailed if a rank wrote pieces of another version or of other tensors."""
    expected = (shard.version, format.layout(shard))
    for rank, report in enumerate(reports, 1):
        if (report.version, report.layout) != expected:
            raise PeerFailed(f"rank {rank} holds other tensors than rank 0, or those of another version")
    return reports


def _member(file: BinaryIO, name: str, chunks: Iterable[Any]) -> int:
    """Append a member of a tar and return its size. The header is written last, when the size is known."""
    begin, size = file.tell(), 0
    file.write(bytes(format.BLOCK))
    for chunk in chunks:
        file.write(chunk)
        size += len(chunk)
    file.write(format.padding(size))
    end = file.tell()
    file.seek(begin)
    file.write(format.header(name, size))
    file.seek(end)
    return size


@contextmanager
def _replacing(path: Path, times: Times) -> Iterator[BinaryIO]:
    """Open a file that gets its name when it is whole and synced, and is removed when anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(path, mode=atomic.BY_UMASK, draft=path.with_name(f".{path.name}.part"),
                          data_synced=True) as file:
        yield file
        begun = time.monotonic()
        file.flush()
        os.fsync(file.fileno())
        times.sync_s = time.monotonic() - begun


def digest_of(path: Path, progress: Callable[[int], None] = lambda size: None) -> str:
    """Return the sha256 of a file in hex; `progress` is called with the size of each piece read."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            progress(len(chunk))
    return found.hexdigest()
