"""Archive of a fleet, fetched before it ends: ledger, logs, newest checkpoints, outputs. No secrets or boot files.

NOT_COLLECTED lists the results that are missing, the partial files, and files that lie under other names; it is absent
if there are none.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import os
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spotfleet.bundle import unpack
from spotfleet.codec import to_json
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.logs import whole_logs
from spotfleet.dispatcher.disk.partials import SUFFIX, PartialMarkers, files_in
from spotfleet.dispatcher.disk.records import age, digest_of, name_of, read_record
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.errors import DiskFull
from spotfleet.fleet.domain.events import ResultsLost
from spotfleet.fleet.ledger import Ledger
from spotfleet.protocol.archive import RefusedFile
from spotfleet.protocol.messages import NOT_COLLECTED
from spotfleet.protocol.ray_cluster import DRIVER_LOGS
from spotfleet.storage import atomic, names
from spotfleet.storage.checkpoint_folder import problem_in
from spotfleet.storage.folder import read_range

log = logging.getLogger(__name__)
FOLDER = "checkpoint-folder"  # among a job's outputs: the folder that followed a job which was started anew
_unpacking = threading.Lock()
PIECE_BYTES = 1 << 18  # sent at once
LISTED_BYTES = 4 << 20  # limit for names of partial files in NOT_COLLECTED, which is made in memory


@dataclass(frozen=True)
class Content:
    """Content of a file in the archive: some bytes, then files one after the other."""

    files: Sequence[Path]
    head: bytes = b""

    def add_to(self, tar: tarfile.TarFile, name: str) -> None:
        if len(self.files) == 1 and not self.head:
            tar.add(self.files[0], name)
            return
        with ExitStack() as stack:
            opened = [stack.enter_context(path.open("rb")) for path in self.files]
            stats = [os.fstat(file.fileno()) for file in opened]
            member = tarfile.TarInfo(name)
            member.size = len(self.head) + sum(stat.st_size for stat in stats)
            member.mode, member.mtime = 0o600, int(stats[-1].st_mtime)
            tar.addfile(member, _Chain([io.BytesIO(self.head), *opened]))  # type: ignore[arg-type]

    def size(self) -> int:
        return len(self.head) + sum(path.stat().st_size for path in self.files)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes in [start, end), in chunks. Raises FileNotFoundError if the content ends before."""
        at = len(self.head)
        if start < at:
            yield self.head[start:end]
        for path in self.files:
            if at >= end:
                break
            size = path.stat().st_size
            if start < at + size:
                yield from read_range(path, max(0, start - at), min(size, end - at))
            at += size
        if at < end:
            raise FileNotFoundError(errno.ENOENT, f"it has only {at} bytes", str(self.files[-1:]))

    def copy_to(self, place: Path) -> None:
        with place.open("wb") as out:
            out.write(self.head)
            for path in self.files:
                with path.open("rb") as file:
                    shutil.copyfileobj(file, out)


class _Chain:
    """Readable file object over several, one after the other."""

    def __init__(self, files: Sequence[BinaryIO]) -> None:
        self._files = list(files)

    def read(self, size: int) -> bytes:
        found = bytearray()
        while self._files and len(found) < size:
            data = self._files[0].read(size - len(found))
            found += data
            if not data:
                del self._files[0]
        return bytes(found)


def job_folders(home: Path) -> list[Path]:
    """Return the folders of all jobs, in memory or not."""
    return sorted([*(home / "jobs").glob("*"), *(home / "past").glob("*")], key=lambda folder: folder.name)


def members(home: Path) -> Iterator[tuple[str, Content]]:
    """Yield (name in the archive, content) for everything but the ledger, which needs a copy as others write to it."""
    for job in job_folders(home):
        for name, head, files in logs_in(job):
            yield f"jobs/{job.name}/logs/{name}", Content(files, head)
        for name, path in outputs(job):
            yield f"jobs/{job.name}/outputs/{name}", Content([path])
        for path in _newest_checkpoint(job / "checkpoints"):
            yield f"jobs/{job.name}/{path.relative_to(job)}", Content([path])


def logs_in(job: Path) -> Iterator[tuple[str, bytes, list[Path]]]:
    """Yield the logs of a job's workers, and of the scripts that ran beside its Ray head, as `whole_logs` does."""
    yield from whole_logs(job / "logs")
    yield from whole_logs(job / "drivers" / DRIVER_LOGS)


def outputs(job: Path) -> Iterator[tuple[str, Path]]:
    """Yield ("HOST@SLOT@INCARNATION/NAME", file) for all collected outputs of this job's folder, without drafts. A
    partial file has another name."""
    for folder in _workers(job):
        markers = PartialMarkers(folder)
        for name in files_in(folder):
            yield f"{folder.name}/{markers.public_name(name)}", folder / name
    place = _checkpoint_folder(job)
    for name in files_in(place) if place is not None else ():
        yield f"{FOLDER}/{name}", place / name


def _checkpoint_folder(job: Path) -> Path | None:
    """Return the newest state of the job's checkpoint folder, unpacked beside its outputs; None if it has none.
    Blocking."""
    with _unpacking:
        try:
            saved = jobfile.load_record(job).saved[:1]
        except (OSError, ValueError):
            return None
        place, blobs = job / FOLDER, job.parents[1] / "bundles"
        marker = place.with_suffix(".digest")
        if not saved or (marker.exists() and marker.read_text() == saved[0]):
            return place if saved else None
        fresh = place.with_name(f".{FOLDER}.part")
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            unpack(blobs / saved[0], lambda digest: blobs / digest, fresh)
        except (OSError, ValueError) as error:
            log.warning("%s: its checkpoint folder cannot be unpacked: %s", job.name, error)
            shutil.rmtree(fresh, ignore_errors=True)
            return place if place.is_dir() else None
        shutil.rmtree(place, ignore_errors=True)
        atomic.rename(fresh, place, sync=False)
        atomic.write(marker, saved[0], sync=False)
        return place


def not_collected(home: Path, lost: Iterable[ResultsLost], refused: Sequence[RefusedFile] = ()
                  ) -> dict[str, Any] | None:
    """Return the content of NOT_COLLECTED; None if nothing is missing. Of very many partial files it lists a part: all
    are in the archive by their names. Files with shortened names come first."""
    found: dict[str, Any] = {"lost": [to_json(event) for event in lost], "partial_files": []}
    size = 0
    for row in (row for short in (True, False) for row in _partial_files(home) if ("at" in row) is short):
        size += sum(map(len, row.values()))
        if size > LISTED_BYTES:
            found["more_partial_files"] = True
            break
        found["partial_files"].append(row)
    if refused:
        found["refused"] = to_json(tuple(refused))
    return found if any(found.values()) else None


def _partial_files(home: Path) -> Iterator[dict[str, str]]:
    """Yield the rows about partial files. `at`: the name in the archive, where it is not the file's with SUFFIX."""
    for job in job_folders(home):
        for folder in _workers(job):
            markers = PartialMarkers(folder)
            for name in markers.files():
                row = {"job": job.name, "worker": folder.name.replace("@", "/"), "file": name}
                at = markers.public_name(name)
                yield row if at == name + SUFFIX else {**row, "at": at}


def _workers(job: Path) -> list[Path]:
    return sorted((job / "outputs").glob("[!.]*@*"))


def _newest_checkpoint(folder: Path) -> list[Path]:
    """Return the files of the newest checkpoint that has the digest of its record."""
    found = [c for path in folder.glob("*.json") if (c := read_record(path)) is not None and not c.url]
    for checkpoint in sorted(found, key=age, reverse=True):
        place = folder / name_of(checkpoint)
        tar = folder / f"{name_of(checkpoint)}.ckpt"
        if checkpoint.name and place.is_dir() and not problem_in(place, checkpoint.digest):
            return sorted(place.iterdir())
        if not checkpoint.name and tar.is_file() and digest_of(tar) == checkpoint.digest:
            return [tar]
    return []


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
        if (missing := not_collected(home, ledger.state().lost)) is not None:
            _add_bytes(tar, NOT_COLLECTED, json.dumps(missing, indent=1).encode())
        for name, content in members(home):
            content.add_to(tar, name)


def send_outputs(job: Path, send: Callable[[bytes], None]) -> None:
    """Send the outputs collected in this job's folder as .tar.gz; more may arrive meanwhile. Raises FileNotFoundError
    if the folder is not there at the end: some files may be missing."""
    with _tar(send) as tar:
        for name, path in outputs(job):
            with path.open("rb") as file:  # open: a file that replaces it now has no effect
                member = tarfile.TarInfo(name)
                stat = os.fstat(file.fileno())
                member.size, member.mode, member.mtime = stat.st_size, 0o600, int(stat.st_mtime)
                tar.addfile(member, file)
        if not job.is_dir():
            raise FileNotFoundError(errno.ENOENT, "removed while its outputs were sent", str(job))


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
        _add_bytes(tar, "ledger.db", ledger.copy_of())


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
    tar.addfile(member, io.BytesIO(data))


def write_folder(home: Path, ledger: Ledger, target: Path) -> None:
    """Write the archive as a plain folder, whole or not at all. Blocking: call it off the loop.

    A file that cannot be written under its name is set aside, and one that cannot be read is left out; NOT_COLLECTED
    lists both. Raises OSError or DiskFull where the disk of `target` fails.
    """
    part = _part(target)
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    part.mkdir(parents=True)
    ledger.copy_to(part / "ledger.db")
    refused = [found for name, content in members(home) if (found := _write_member(part, name, content)) is not None]
    _put_in_place(home, ledger, target, refused, "")


def write_incomplete(home: Path, ledger: Ledger, target: Path, why: str) -> None:
    """Leave what `write_folder` has written before it failed, with the reason: an archive that is given up must not be
    taken for one without results. Raises OSError if not even that can be written."""
    _part(target).mkdir(parents=True, exist_ok=True)
    _put_in_place(home, ledger, target, (), why)


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _put_in_place(home: Path, ledger: Ledger, target: Path, refused: Sequence[RefusedFile], why: str) -> None:
    missing = not_collected(home, ledger.state().lost, refused)
    if why:
        missing = {"incomplete": why, **(missing or {"lost": [], "partial_files": []})}
    if missing is not None:
        (_part(target) / NOT_COLLECTED).write_text(json.dumps(missing, indent=1))
    atomic.sync_tree(_part(target))  # its machine ends next
    shutil.rmtree(target, ignore_errors=True)
    atomic.rename(_part(target), target)


def _write_member(part: Path, name: str, content: Content) -> RefusedFile | None:
    """Write one file of the archive; return None, or what became of one that is refused."""
    try:
        return _copy(content, part / name)
    except OSError as error:
        if is_full(error):
            raise
        why = error.strerror or str(error)
    try:
        _copy(content, part / names.aside(name))
        return RefusedFile(name, names.aside(name), why)
    except OSError as error:
        if is_full(error):
            raise
        return RefusedFile(name, "", error.strerror or str(error))


def _copy(content: Content, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        content.copy_to(place)
    except OSError:
        if place.is_file():
            place.unlink()
        raise
