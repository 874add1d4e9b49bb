"""Checkpoint target: a folder that outlives the dispatcher's machine, such as a mounted file system.

    TARGET/FLEET-FINGERPRINT/ledger, jobs/JOB/sealed, bundles    see `dispatcher/checkpoints/backup.py`
    TARGET/FLEET-FINGERPRINT/jobs/JOB/checkpoints/VERSION-GENERATION.ckpt    with its digest in a .json beside it
    TARGET/FLEET-FINGERPRINT/jobs/JOB/checkpoints/VERSION-GENERATION.parts/PART-PARTS-SHA256    see `part_name`
    TARGET/FLEET-FINGERPRINT/jobs/JOB/left/WORKER.tar.gz    output and log of a worker whose host ended itself

The fingerprint is that of the fleet's own certificate, so that a later fleet of the same name finds nothing of an
earlier one. Dispatcher and hosts write here. A file appears whole or not at all, and is replaced, never changed in
place.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic

FINGERPRINT_CHARS = 12
OF_CHECKPOINT = re.compile(r"(?:.*/)?(\d{1,15})-(\d{1,15})\.parts/(\d{1,4})-(\d{1,4})-([0-9a-f]{64})")
PART = re.compile(r"\..+\.\d+\.part")
STALE_S = 3600.0  # age after which an unfinished file counts as abandoned


class FolderStore:
    """One fleet's folder in a target. Every method may raise OSError: such a file system may be away for a while."""

    def __init__(self, target: str, fleet: str, ca: str) -> None:
        """`ca`: the fleet's certificate, PEM."""
        self.folder = Path(target) / name_of_fleet(fleet, ca)

    def put(self, name: str, source: Path) -> None:
        """Store a copy of the file `source` as `name`; returns once the copy is safe from a power failure."""

        def copy(out: BinaryIO) -> None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)

        self._whole(name, copy)

    def write(self, name: str, data: bytes) -> None:
        """Store `data` as `name`, as `put` does."""
        self._whole(name, lambda out: out.write(data))

    def find(self, name: str) -> Path | None:
        """Return the path of the file `name`; None when there is none."""
        path = self.folder / name
        return path if path.is_file() else None

    def names(self, under: str = "") -> list[str]:
        """List the files in the folder `under`, sorted; [] also when nothing is stored yet."""
        start = self.folder / under
        found = (p for p in start.rglob("*") if p.is_file() and not PART.fullmatch(p.name))
        return sorted(str(p.relative_to(self.folder)) for p in found)

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove unfinished files of machines that are gone: each may be as large as a checkpoint."""
        stale = time.time() - STALE_S
        for part in [p for p in self.folder.rglob("*.part") if PART.fullmatch(p.name)]:
            with suppress(FileNotFoundError):
                if part.stat().st_mtime < stale:
                    part.unlink()

    def _whole(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self.folder / name
        atomic.make_folder(path.parent)
        with atomic.replacing(path) as out:
            fill(out)


def name_of_fleet(fleet: str, ca: str) -> str:
    """Return the name of this fleet's folder in a target, also in an object store."""
    return f"{fleet}-{hashlib.sha256(ca.encode()).hexdigest()[:FINGERPRINT_CHARS]}"


def checkpoint_name(job: str, version: int, generation: int) -> str:
    """Return the file name of a checkpoint; its `messages.Checkpoint` follows as .json instead of .ckpt."""
    return f"jobs/{job}/checkpoints/{version}-{generation}.ckpt"


def part_name(job: str, part: Checkpoint) -> str:
    """Return the file name of one rank's part of a checkpoint, stored by a host that has lost its dispatcher.

    The hosts with the other parts do the same. A reader that finds all of them joins them in order.
    """
    folder = checkpoint_name(job, part.version, part.generation).removesuffix("ckpt")
    return f"{folder}parts/{part.part}-{part.parts}-{part.digest}"


def part_called(name: str) -> Checkpoint | None:
    """Parse a name made by `part_name`; fields that the name does not hold stay at their defaults."""
    found = OF_CHECKPOINT.fullmatch(name)
    if found is None or not 0 <= int(found[3]) < int(found[4]):
        return None
    return Checkpoint(int(found[1]), found[5], 0, int(found[2]), part=int(found[3]), parts=int(found[4]))
