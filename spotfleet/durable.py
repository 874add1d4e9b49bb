"""The checkpoint target: a folder that outlives the dispatcher's machine, such as a mounted file system.

    TARGET/FLEET-FINGERPRINT/ledger, jobs/JOB/sealed, bundles    as `dispatcher/keeper.py` says
    TARGET/FLEET-FINGERPRINT/jobs/JOB/checkpoints/VERSION-GENERATION.ckpt    with its digest in a .json beside it
    TARGET/FLEET-FINGERPRINT/jobs/JOB/checkpoints/VERSION-GENERATION.parts/PART-PARTS-SHA256    see `part_name`
    TARGET/FLEET-FINGERPRINT/jobs/JOB/left/WORKER.tar.gz    output and log of a worker whose host ended itself

The fingerprint is that of the fleet's own certificate, so that a later fleet of the same name finds nothing of an
earlier one. Dispatcher and hosts write here; a file is there whole or not at all, and is never changed afterwards but
replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from spotfleet.messages import Checkpoint

FINGERPRINT_CHARS = 12
OF_CHECKPOINT = re.compile(r"(?:.*/)?(\d{1,15})-(\d{1,15})\.parts/(\d{1,4})-(\d{1,4})-([0-9a-f]{64})")
PART = re.compile(r"\..+\.\d+\.part")
STALE_S = 3600.0  # what has been written is not written any more when nothing has come for so long


class Durable:
    """One fleet's part of a target. Every method may raise OSError: such a file system may be away for a while."""

    def __init__(self, target: str, fleet: str, ca: str) -> None:
        """`ca`: the fleet's certificate, PEM."""
        self.folder = Path(target) / name_of_fleet(fleet, ca)

    def put(self, name: str, source: Path) -> None:
        """Keep a copy of the file `source` as `name`; returns when a power failure cannot take it any more."""

        def copy(out: BinaryIO) -> None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)

        self._whole(name, copy)

    def write(self, name: str, data: bytes) -> None:
        """As `put`, of `data`."""
        self._whole(name, lambda out: out.write(data))

    def find(self, name: str) -> Path | None:
        """The file called `name`; None when there is none."""
        path = self.folder / name
        return path if path.is_file() else None

    def names(self, under: str = "") -> list[str]:
        """What is kept under `under`, a folder, sorted; [] also when nothing has been kept yet."""
        start = self.folder / under
        found = (p for p in start.rglob("*") if p.is_file() and not PART.fullmatch(p.name))
        return sorted(str(p.relative_to(self.folder)) for p in found)

    def drop(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what machines that are gone were just writing: it may be as large as a checkpoint."""
        stale = time.time() - STALE_S
        for part in [p for p in self.folder.rglob("*.part") if PART.fullmatch(p.name)]:
            with suppress(FileNotFoundError):
                if part.stat().st_mtime < stale:
                    part.unlink()

    def _whole(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = f"{os.getpid()}{secrets.randbelow(10**9):09d}"  # processes of two machines may bear one number
        part = path.with_name(f".{path.name}.{mine}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(descriptor, "wb") as out:
                fill(out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def name_of_fleet(fleet: str, ca: str) -> str:
    """What this fleet's part of a target is called, in an object store too."""
    return f"{fleet}-{hashlib.sha256(ca.encode()).hexdigest()[:FINGERPRINT_CHARS]}"


def checkpoint_name(job: str, version: int, generation: int) -> str:
    """The file of a checkpoint; its `messages.Checkpoint` as JSON, written after it, ends in .json instead of .ckpt."""
    return f"jobs/{job}/checkpoints/{version}-{generation}.ckpt"


def part_name(job: str, part: Checkpoint) -> str:
    """The file of one rank's part of a checkpoint, left by a host that has lost its dispatcher: the hosts with the
    other parts do the same, and whoever finds all of them joins them in their order."""
    folder = checkpoint_name(job, part.version, part.generation).removesuffix("ckpt")
    return f"{folder}parts/{part.part}-{part.parts}-{part.digest}"


def part_called(name: str) -> Checkpoint | None:
    """What `part_name` made into `name`, as far as names tell."""
    found = OF_CHECKPOINT.fullmatch(name)
    if found is None or not 0 <= int(found[3]) < int(found[4]):
        return None
    return Checkpoint(int(found[1]), found[5], 0, int(found[2]), part=int(found[3]), parts=int(found[4]))
