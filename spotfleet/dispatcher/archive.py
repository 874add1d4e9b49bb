"""What is brought home before a fleet ends: ledger, logs, newest checkpoints, outputs. Never secrets or boot files."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from spotfleet.fleet.ledger import Ledger


def members(home: Path) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file) for everything but the ledger, which is copied while others write to it."""
    for job in sorted((home / "jobs").glob("*")):
        for folder in ("logs", "outputs"):
            for path in sorted((job / folder).glob("*")):
                if not path.name.startswith("."):  # a part that is still on its way
                    yield f"jobs/{job.name}/{folder}/{path.name}", path
        newest = _newest_checkpoint(job / "checkpoints")
        if newest is not None:
            yield f"jobs/{job.name}/checkpoints/{newest.name}", newest


def _newest_checkpoint(folder: Path) -> Path | None:
    """By (generation, version), as its name says."""
    return max(folder.glob("*.ckpt"), default=None,
               key=lambda p: tuple(reversed([int(n) for n in p.stem.split("-")])))


def write_tar(home: Path, ledger: Ledger, target: Path) -> None:
    """The archive as .tar.gz; blocking, call it off the loop."""
    copy = target.with_name(f".{target.name}.ledger.db")
    try:
        ledger.copy_to(copy)
        with tarfile.open(target, "w:gz", compresslevel=1) as tar:
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
