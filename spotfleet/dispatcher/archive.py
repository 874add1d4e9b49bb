"""What is brought home before a fleet ends: ledger, logs, newest checkpoints, outputs. Never secrets or boot files."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from spotfleet.bundle import extract
from spotfleet.errors import UsageError
from spotfleet.fleet.ledger import Ledger


def members(home: Path) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file) for everything but the ledger, which is copied while others write to it."""
    for job in sorted((home / "jobs").glob("*")):
        for path in sorted((job / "logs").glob("*.log")):
            yield f"jobs/{job.name}/logs/{path.name}", path
        for folder in sorted((job / "outputs").glob("*@*")):  # without those that are still on their way
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    yield f"jobs/{job.name}/outputs/{path.relative_to(folder.parent)}", path
        newest = _newest_checkpoint(job / "checkpoints")
        if newest is not None:
            yield f"jobs/{job.name}/checkpoints/{newest.name}", newest


def _newest_checkpoint(folder: Path) -> Path | None:
    """By (generation, version), as its name says."""
    return max(folder.glob("*.ckpt"), default=None,
               key=lambda p: tuple(reversed([int(n) for n in p.stem.split("-")])))


def keep_output(upload: Path, folder: Path) -> None:
    """Unpack a worker's output folder, whole or not at all; blocking. UsageError when it is no archive."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        extract(upload, part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    except ValueError as error:
        raise UsageError(f"output: {error}") from None
    finally:
        upload.unlink(missing_ok=True)
        shutil.rmtree(part, ignore_errors=True)


def write_tar(home: Path, ledger: Ledger, target: Path) -> None:
    """The archive as .tar.gz; blocking, call it off the loop."""
    copy = target.with_name(f".{target.name}.ledger.db")
    try:
        ledger.copy_to(copy)
        with tarfile.open(target, "w:gz", compresslevel=1, dereference=True) as tar:
            tar.add(copy, "ledger.db")
            for name, path in members(home):
                tar.add(path, name)
    finally:
        copy.unlink(missing_ok=True)


def write_folder(home: Path, ledger: Ledger, target: Path) -> None:
    """The archive as a plain folder; blocking, call it off the loop."""
    target.mkdir(parents=True, exist_ok=True)
    ledger.copy_to(target / "ledger.db")
    for name, path in members(home):
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
