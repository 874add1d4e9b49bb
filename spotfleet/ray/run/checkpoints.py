"""Checkpoints of a run on Ray: the target that its workers write to, and the newest one there.

    reported --newer--> newest --a worker reports damage--> refused; the newest that lies beside it takes its place

The ranks write, check and remove the files themselves (`train/checkpoint/store_folder.py`). The coordinator knows them
by the reports of its workers, and by one look at the target when the run begins.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.protocol.checkpoint_files import MANIFEST, METADATA, parse_manifest
from spotfleet.protocol.messages import Checkpoint, WorkerReport
from spotfleet.storage.object_store import ObjectStore
from spotfleet.storage.schemes import ANY_URL, SCHEMES
from spotfleet.storage.store import DurableStore
from spotfleet.version import install

_FOLDER = re.compile(rf"(\d{{1,15}})-(\d{{1,15}})/{re.escape(METADATA)}")

WORK = "SPOTFLEET_WORK"


@dataclass(frozen=True)
class CheckpointTarget:
    """Folder of one run that all nodes and the coordinator reach. An empty `url`: the run has no checkpoints."""

    url: str = ""
    every_s: float = 60.0
    keep: int = 2

    def __bool__(self) -> bool:
        return bool(self.url)


def target_of(given: str, every_s: float) -> CheckpointTarget:
    """Return the target that the user gives: a folder's absolute path, or a URL. UsageError for another text."""
    scheme, separator, rest = given.partition("://")
    if not given:
        return CheckpointTarget()
    if every_s <= 0:
        raise UsageError(f"checkpoint_every_s is {every_s!r}", hint="set it to a number of seconds above 0")
    if separator and (scheme not in (*SCHEMES, "file") or not rest):
        raise UsageError(f"checkpoint_target is {given!r}", hint=f"give {ANY_URL}, or the path of a shared folder")
    path = rest if scheme == "file" and separator else given
    if (not separator or scheme == "file") and not Path(path).is_absolute():
        raise UsageError(f"checkpoint_target is {given!r}, which is not an absolute path",
                         hint="give the path of a folder that every node has mounted at the same place")
    return CheckpointTarget(f"file://{Path(path)}" if not separator or scheme == "file" else given.rstrip("/"), every_s)


def work_folder(key: str) -> str:
    """Return a run's folder on each node, as WORK. Workers there share one copy of a checkpoint that they restore."""
    return f"{tempfile.gettempdir()}/spotfleet-ray-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def remove_work_folder() -> None:
    """Remove the folder at a worker's end: a copy there has been read long since."""
    if folder := os.environ.get(WORK):
        shutil.rmtree(folder, ignore_errors=True)


def newest(target: CheckpointTarget) -> Checkpoint | None:
    """Return the newest whole checkpoint at the target. UsageError without obstore; SpotfleetError where the target
    cannot be read."""
    try:
        return next(_whole(ObjectStore(target.url), target.url), None)
    except ImportError as error:
        raise UsageError(f"checkpoints go to {target.url}, and obstore cannot be imported: {error}",
                         hint=install("ray")) from error
    except OSError as error:
        raise SpotfleetError(f"checkpoint_target {target.url} cannot be read: {error}",
                             hint="check that it exists and that this machine may read it") from error


def _whole(store: DurableStore, url: str) -> Iterator[Checkpoint]:
    """Yield the whole checkpoints in a store, the newest first."""
    found = [(int(m[2]), int(m[1])) for entry in store.list() if (m := _FOLDER.fullmatch(entry.key))]
    for generation, version in sorted(found, reverse=True):
        name = f"{version}-{generation}"
        try:
            data = b"".join(store.get(f"{name}/{MANIFEST}"))
            listed = parse_manifest(data)
        except (FileNotFoundError, ValueError):
            continue  # removed meanwhile, or damaged: the one before it counts
        if (listed.version, listed.generation) == (version, generation):
            yield Checkpoint(version, hashlib.sha256(data).hexdigest(), len(data) + listed.bytes, generation,
                             url=f"{url}/{name}")


class RunCheckpoints:
    """The newest checkpoint of one run."""

    def __init__(self, target: CheckpointTarget = CheckpointTarget(), found: Checkpoint | None = None) -> None:
        """`found`: the newest one at the target when the run begins."""
        self.target, self.newest = target, found
        self._remarks = [f"begins with the checkpoint of version {found.version} at {found.url}"] if found else []
        self._refused: set[str] = set()  # digests

    @property
    def version(self) -> int:
        return self.newest.version if self.newest is not None else 0

    def take_remarks(self) -> list[str]:
        """Return, once, for people: which checkpoint the run begins with, and which could not be used."""
        found, self._remarks = self._remarks, []
        return found

    def take(self, report: WorkerReport) -> None:
        """Take a worker's report of a checkpoint that it has written, or that it could not use."""
        damaged, made = report.damaged, report.checkpoint
        if damaged is not None and damaged.digest not in self._refused:
            self._refused.add(damaged.digest)
            if self.newest is not None and self.newest.digest == damaged.digest:
                self.newest = None
            self._remarks.append(f"checkpoint of version {damaged.version} cannot be used: "
                                f"{report.damaged_why or 'damaged'}")
        if made is not None and made.url and made.digest not in self._refused and _age(made) > _age(self.newest):
            self.newest = made


def _age(checkpoint: Checkpoint | None) -> tuple[int, int]:
    """A later generation may have gone back to an earlier version, so the generation counts first."""
    return (checkpoint.generation, checkpoint.version) if checkpoint is not None else (-1, -1)
