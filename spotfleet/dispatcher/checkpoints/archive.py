"""Archive of a fleet, fetched before it ends: ledger, logs, newest checkpoints, outputs. No secrets or boot files."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spotfleet.dispatcher.disk.records import age, digest_of, read_record
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.errors import DiskFull
from spotfleet.fleet.ledger import Ledger
from spotfleet.storage import atomic

PIECE_BYTES = 1 << 18  # sent at once


def members(home: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name in the archive, file) for everything but the ledger, which needs a copy as others write to it."""
    for job in sorted((home / "jobs").glob("*")):
        for path in sorted((job / "logs").glob("*.log")):
            yield f"jobs/{job.name}/logs/{path.name}", path
        for name, path in outputs(job):
            yield f"jobs/{job.name}/outputs/{name}", path
        newest = _newest_checkpoint(job / "checkpoints")
        if newest is not None:
            yield f"jobs/{job.name}/checkpoints/{newest.name}", newest


def outputs(job: Path) -> Iterator[tuple[str, Path]]:
    """Yield ("HOST@SLOT@INCARNATION/NAME", file) for all collected outputs of this job's folder, without drafts."""
    for folder in sorted((job / "outputs").glob("[!.]*@*")):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(folder.parent)), path


def _newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint file that has the digest of its record."""
    found = [(c, path) for path in folder.glob("*.ckpt") if (c := read_record(path.with_suffix(".json"))) is not None]
    for checkpoint, path in sorted(found, key=lambda pair: age(pair[0]), reverse=True):
        if digest_of(path) == checkpoint.digest:
            return path
    return None


class _Outlet:
    """Writable file object that passes its data on in pieces."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send, self._held = send, bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        if len(self._held) >= PIECE_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        piece, self._held = bytes(self._held), bytearray()
        if piece:
            self._send(piece)


def send_tar(home: Path, ledger: Ledger, send: Callable[[bytes], None]) -> None:
    """Send the archive as .tar.gz, piece by piece: even a large one starts at once and needs no second copy on disk.
    Blocking: call it off the loop."""
    with _tar(send) as tar:
        _add_ledger(tar, home, ledger)
        for name, path in members(home):
            tar.add(path, name)


def send_outputs(job: Path, send: Callable[[bytes], None]) -> None:
    """Send the outputs collected in this job's folder as .tar.gz; more may arrive meanwhile."""
    with _tar(send) as tar:
        for name, path in outputs(job):
            with path.open("rb") as file:  # open: a file that replaces it now has no effect
                member = tarfile.TarInfo(name)
                stat = os.fstat(file.fileno())
                member.size, member.mode, member.mtime = stat.st_size, 0o600, int(stat.st_mtime)
                tar.addfile(member, file)


@contextmanager
def _tar(send: Callable[[bytes], None]) -> Iterator[tarfile.TarFile]:
    outlet = _Outlet(send)
    with gzip.GzipFile("", "wb", compresslevel=1, fileobj=outlet) as zipped:  # type: ignore[arg-type]
        with tarfile.open(fileobj=zipped, mode="w|", dereference=True) as tar:
            yield tar
    outlet.flush()


def _add_ledger(tar: tarfile.TarFile, home: Path, ledger: Ledger) -> None:
    """Add a copy of the ledger: made on our disk, or in memory if the disk is full, so that the history is never
    missing."""
    try:
        with tempfile.TemporaryDirectory(dir=home, prefix=".archive-") as folder:
            copy = Path(folder, "ledger.db")
            ledger.copy_to(copy)
            tar.add(copy, "ledger.db")
    except (OSError, DiskFull) as error:
        if not is_full(error):
            raise
        data = ledger.copy_of()
        member = tarfile.TarInfo("ledger.db")
        member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
        tar.addfile(member, io.BytesIO(data))


def write_folder(home: Path, ledger: Ledger, target: Path) -> None:
    """Write the archive as a plain folder, whole or not at all. Blocking: call it off the loop."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    part.mkdir(parents=True)
    ledger.copy_to(part / "ledger.db")
    for name, path in members(home):
        place = part / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    atomic.sync_tree(part)  # its machine ends next
    shutil.rmtree(target, ignore_errors=True)
    atomic.rename(part, target)
