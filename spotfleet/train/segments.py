"""A rank's part of a checkpoint as a file: written under another name, synced, renamed, so it is whole or absent.

    ckpt-VERSION.tar                 all of it, by one process
    ckpt-VERSION.PART-of-PARTS.tar   a segment; see distcp.py
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

from spotfleet.messages import Checkpoint
from spotfleet.train import distcp
from spotfleet.train.distcp import Shard
from spotfleet.train.exchange import Refused, Told


@dataclass
class Times:
    """How long the parts of one checkpoint took, in seconds."""

    copy_s: float = 0.0  # training stood still
    write_s: float = 0.0
    wait_s: float = 0.0  # for the other ranks
    sync_s: float = 0.0

    @property
    def whole_s(self) -> float:
        return self.copy_s + self.write_s + self.wait_s + self.sync_s


# What ranks 1, 2, ... have written; waits for it, knowing how long this rank took.
Others = Callable[[float], list[Told]]


def alone(own_s: float) -> list[Told]:
    return []


def write(shard: Shard, folder: Path, others: Others = alone, times: Times | None = None) -> tuple[Checkpoint, Told]:
    """The shard as a file in `folder`. OSError, and nothing is left, when the disk refuses it or `others` raises."""
    times = times or Times()
    part, parts = ((shard.rank - 1) % shard.world, shard.world)
    name = f"ckpt-{shard.version}.tar" if parts == 1 else f"ckpt-{shard.version}.{part}-of-{parts}.tar"
    items = distcp.items_of(shard)
    with _whole(folder / name, times) as file:
        begun = time.monotonic()
        size = _member(file, distcp.file_name(shard.rank), items.chunks())
        times.write_s = time.monotonic() - begun
        if shard.rank == 0:
            begun = time.monotonic()
            told = agreed(shard, others(times.write_s))
            times.wait_s = time.monotonic() - begun
            _member(file, distcp.METADATA, [distcp.metadata(shard, items, [t.lengths for t in told])])
            file.write(distcp.TAR_END)
    begun = time.monotonic()
    digest = digest_of(folder / name)
    times.write_s += time.monotonic() - begun
    path = folder / name
    done = Checkpoint(shard.version, digest, path.stat().st_size, shard.generation, str(path), part, parts)
    return done, Told(0, shard.version, size, digest, tuple(items.lengths), distcp.layout(shard))


def agreed(shard: Shard, told: list[Told]) -> list[Told]:
    """`told`; Refused if somebody wrote pieces of another version or of other tensors."""
    mine = (shard.version, distcp.layout(shard))
    for rank, theirs in enumerate(told, 1):
        if (theirs.version, theirs.layout) != mine:
            raise Refused(f"rank {rank} holds other tensors than rank 0, or those of another version")
    return told


def _member(file: BinaryIO, name: str, chunks: Iterable[Any]) -> int:
    """Append a member of a tar; its size. The header comes last, since a size is known only afterwards."""
    begin, size = file.tell(), 0
    file.write(bytes(distcp.BLOCK))
    for chunk in chunks:
        file.write(chunk)
        size += len(chunk)
    file.write(distcp.padding(size))
    end = file.tell()
    file.seek(begin)
    file.write(distcp.header(name, size))
    file.seek(end)
    return size


@contextmanager
def _whole(path: Path, times: Times) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole and synced, and is gone when anything fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            yield file
            begun = time.monotonic()
            file.flush()
            os.fsync(file.fileno())
            times.sync_s = time.monotonic() - begun
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    folder_fd = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder_fd)
    os.close(folder_fd)


def digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
