"""Checkpoint target: a folder that outlives the dispatcher's machine, such as a mounted file system.

    TARGET/FLEET-FINGERPRINT/ledger, jobs/JOB/sealed, bundles    see `dispatcher/checkpoints/backup.py`
    TARGET/FLEET-FINGERPRINT/jobs/JOB/checkpoints/VERSION-GENERATION/FILE    with its sealed record in a .json beside it
    TARGET/FLEET-FINGERPRINT/jobs/JOB/quarantine/VERSION-GENERATION.parts/FILE-SHA256    by hosts without a dispatcher
    TARGET/FLEET-FINGERPRINT/jobs/JOB/arriving/VERSION-GENERATION.parts/FILE-SHA256    by hosts, for the dispatcher
    TARGET/FLEET-FINGERPRINT/probe    by the dispatcher: hosts that read it see the same folder
    TARGET/FLEET-FINGERPRINT/jobs/JOB/*/VERSION-GENERATION.ckpt, .parts/PART-PARTS-SHA256    by an earlier release: read
    TARGET/FLEET-FINGERPRINT/jobs/JOB/left/WORKER.tar.gz    output and log of a worker whose host ended itself

The fingerprint is that of the fleet's own certificate, so that a later fleet of the same name finds nothing of an
earlier one. Dispatcher and hosts write here, so a checkpoint counts only with the proofs of
`dispatcher/checkpoints/seals.py`. A file appears whole or not at all, and is replaced, never changed in place.
"""

from __future__ import annotations

import errno
import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic
from spotfleet.storage.store import CHUNK_BYTES, StoreEntry, check_key

FINGERPRINT_CHARS = 12
OF_CHECKPOINT = re.compile(r"(?:.*/)?(\d{1,15})-(\d{1,15})\.parts/(\d{1,4})-(\d{1,4})-([0-9a-f]{64})")
QUARANTINE = "quarantine"
ARRIVING = "arriving"
PROBE = "probe"
PROBE_BYTES = 64
PART = re.compile(r"\..+\.\d+\.part")
NO_RENAME = {errno.ENOSYS, errno.EOPNOTSUPP}  # of a bucket that is mounted by mount-s3 and the like
MOUNTED_BUCKET = "files cannot be renamed there, as in a mounted bucket: name the bucket itself (s3://, gs://, az://)"
STALE_S = 3600.0  # age after which an unfinished file counts as abandoned


class FolderStore:
    """Store in a folder: one fleet's folder in a target (`fleet_store`), or any other. Every method may raise OSError:
    such a file system may be away for a while."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, key: str, chunks: Iterable[bytes], *, size: int | None = None, at_most: int | None = None) -> str:
        """Store the content; returns its sha256 once it is safe from a power failure."""
        path, sha, written = self.path(key), hashlib.sha256(), 0
        atomic.make_folder(path.parent)
        try:
            with atomic.replacing(path) as out:
                for chunk in chunks:
                    out.write(chunk)
                    sha.update(chunk)
                    written += len(chunk)
                if size is not None and written != size:
                    raise OSError(errno.EIO, f"it has {written} bytes instead of {size}", str(path))
        except OSError as error:
            if {error.errno, getattr(error.__context__, "errno", None)} & NO_RENAME:  # its removal may be refused, too
                raise OSError(error.errno, MOUNTED_BUCKET, str(path)) from error
            raise
        return sha.hexdigest()

    def get(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        yield from read_range(self.path(key), start, end)

    def list(self, prefix: str = "") -> Iterator[StoreEntry]:
        """Yield what is stored below the folder `prefix`, or the file of that name; nothing where there is neither."""
        start = self.path(prefix) if prefix else self.folder
        found = [start] if start.is_file() else start.rglob("*")
        for path in sorted(p for p in found if p.is_file() and not PART.fullmatch(p.name)):
            with suppress(FileNotFoundError):  # removed meanwhile
                stat = path.stat()
                yield StoreEntry(str(path.relative_to(self.folder)), stat.st_size, mtime=stat.st_mtime)

    def delete(self, key: str) -> None:
        self.path(key).unlink(missing_ok=True)

    def path(self, key: str) -> Path:
        """Return the path of the file `key`, whether there is one or not."""
        return self.folder / check_key(key)

    def find(self, key: str) -> Path | None:
        """Return the path of the file `key`; None when there is none."""
        path = self.path(key)
        return path if path.is_file() else None

    def names(self, prefix: str = "") -> list[str]:
        """Return the keys of `list`; [] also when nothing is stored yet."""
        return [entry.key for entry in self.list(prefix)]

    def sweep(self) -> None:
        """Remove unfinished files of machines that are gone: each may be as large as a checkpoint."""
        stale = time.time() - STALE_S
        for part in [p for p in self.folder.rglob("*.part") if PART.fullmatch(p.name)]:
            with suppress(FileNotFoundError):
                if part.stat().st_mtime < stale:
                    part.unlink()


def read_range(path: Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file in [start, end), to its end without `end`, in chunks of CHUNK_BYTES."""
    with path.open("rb") as file:
        file.seek(start)
        left = end - start if end is not None else None
        while data := file.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left)):
            yield data
            left = None if left is None else left - len(data)


def fleet_store(target: str, fleet: str, ca: str) -> FolderStore:
    """Return the store of one fleet in a target. `ca`: the fleet's certificate, PEM."""
    return FolderStore(Path(target) / name_of_fleet(fleet, ca))


def name_of_fleet(fleet: str, ca: str) -> str:
    """Return the name of this fleet's folder in a target, also in an object store."""
    return f"{fleet}-{hashlib.sha256(ca.encode()).hexdigest()[:FINGERPRINT_CHARS]}"


def checkpoint_name(job: str, version: int, generation: int) -> str:
    """Return the file name of a checkpoint of an earlier release; its record follows as .json instead of .ckpt."""
    return f"jobs/{job}/checkpoints/{version}-{generation}.ckpt"


def quarantine_name(job: str, made: Checkpoint) -> str:
    """Return the name of one file of a checkpoint that a host without a dispatcher has left, or of a tar or part by
    an earlier release.

    The `messages.Checkpoint` of a manifest, a tar or a part follows under `record_name`, with the mark of its writer.
    The hosts with the other pieces do the same; a dispatcher judges the manifest and takes the pieces that it names.
    """
    stem = f"jobs/{job}/{QUARANTINE}/{made.version}-{made.generation}"
    if made.name:
        return f"{stem}.parts/{made.name}-{made.digest}"
    return f"{stem}.parts/{made.part}-{made.parts}-{made.digest}" if made.parts > 1 else f"{stem}.ckpt"


def arriving_name(job: str, made: Checkpoint) -> str:
    """Return the name of one file of a checkpoint that a host has written, until the dispatcher puts it in place."""
    return f"jobs/{job}/{ARRIVING}/{made.version}-{made.generation}.parts/{made.name}-{made.digest}"


def record_name(name: str) -> str:
    """Return the name of the record of a checkpoint's file, or of a part."""
    return f"{name.removesuffix('.ckpt')}.json"


def part_called(name: str) -> Checkpoint | None:
    """Parse the name of a part in `quarantine_name`; fields that the name does not hold stay at their defaults."""
    found = OF_CHECKPOINT.fullmatch(name)
    if found is None or not 0 <= int(found[3]) < int(found[4]):
        return None
    return Checkpoint(int(found[1]), found[5], 0, int(found[2]), part=int(found[3]), parts=int(found[4]))
