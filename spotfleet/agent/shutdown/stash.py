"""Checkpoint stash: checkpoints kept on this host while no dispatcher takes them, and their transfer to the target.

    HOME/legacy/JOB-GENERATION-VERSION-PART-PARTS/FILE    hard links to the files of one writer
    HOME/legacy/JOB-GENERATION-VERSION-PART-PARTS.json    a `StashedCheckpoint`, written last

Where several ranks write one checkpoint, each host has its workers' pieces. The newest two versions of them are kept,
because the other pieces of the newest may be lost with their hosts. The folder keeps its name for compatibility.

In the target (see `storage/folder.py`) a checkpoint lies in quarantine until a dispatcher has judged it. The output
folder and log of an ended worker become jobs/JOB/left/WORKER.tar.gz.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import shutil
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.files.bundles import folder_name
from spotfleet.codec import from_json, to_json
from spotfleet.protocol.messages import Checkpoint, dump
from spotfleet.storage import atomic, json_file
from spotfleet.storage.checkpoint_folder import files_of, link_files
from spotfleet.storage.folder import FolderStore, fleet_store, quarantine_name, read_range, record_name

log = logging.getLogger("spotfleet.agent")

FIRST_AGAIN_S, LAST_AGAIN_S = 0.25, 5.0
FOLDER = "legacy"
STORED = 2  # most checkpoints of one job in the target by one host, which may be alone for an hour
PARTED = 2  # number of versions in parts that are kept here
LOST_NAMES = 5  # most lost files that are named in the log
T = TypeVar("T")


@dataclass(frozen=True)
class StashedCheckpoint:
    job: str
    checkpoint: Checkpoint  # `path` is in the stash

    @property
    def age(self) -> tuple[int, int, int]:
        """Order of stashed checkpoints: newer is greater; of one version, the one by fewer writers."""
        return self.checkpoint.generation, self.checkpoint.version, -self.checkpoint.parts

    @property
    def what(self) -> str:
        made = self.checkpoint
        part = f"part {made.part} of {made.parts} of " if made.parts > 1 else ""
        return f"{part}checkpoint {made.version}"


class CheckpointStash:
    """The stash of one host, and its copies in the target."""

    def __init__(self, boot: AgentBoot, home: Path) -> None:
        self._home, self._folder, self._target = home, home / FOLDER, boot.target
        in_store = "://" in boot.target  # only workers write to an object store
        self._durable = fleet_store(boot.target, boot.fleet, boot.ca) if boot.target and not in_store else None
        self._no_target = f"{boot.target} takes checkpoints alone" if in_store else "the fleet has no checkpoint.target"
        self._kept = sorted(self._read(), key=lambda k: k.age)
        self._stored: dict[StashedCheckpoint, list[str]] = {}  # by this host, oldest first, with their keys
        self._writing = threading.Lock()  # an abandoned writer thread may still be running
        self.problem = ""  # why a checkpoint is not in the target yet

    def kept(self) -> list[StashedCheckpoint]:
        """List each job's newest checkpoint that no dispatcher has taken, or pieces of the newest two; oldest first."""
        return list(self._kept)

    def keep(self, job: str, made: Checkpoint) -> None:
        """Stash the checkpoint `made` that a worker has written, in case no dispatcher fetches it."""
        folder = self._folder / f"{folder_name(job)}-{made.generation}-{made.version}-{made.part}-{made.parts}"
        path = folder / (made.name or Path(made.path).name)
        kept, own = StashedCheckpoint(job, replace(made, path=str(path))), [k for k in self._kept if k.job == job]
        known = any(k.age > kept.age or k.checkpoint.path == str(path) for k in own)
        if known or not made.path or made.url:
            return
        try:
            link_files(made, folder)
            atomic.write(_record(kept), json_file.text_of(to_json(kept)), mode=atomic.BY_UMASK,
                         draft=_record(kept).with_suffix(".new"), sync=False)
        except OSError as error:  # such as a worker that has removed it for a newer one
            self._set_problem(f"checkpoint {made.version} of {job}: {error}")
            return
        self._kept = sorted([*self._kept, kept], key=lambda k: k.age)
        ages = sorted({k.age for k in own} | {kept.age})
        oldest = ages[-PARTED:][0] if made.parts > 1 else kept.age
        for old in [k for k in own if k.age < oldest]:
            self.drop(old)

    def drop(self, kept: StashedCheckpoint) -> None:
        """Remove `kept` from the stash: a dispatcher has it, or newer ones are here."""
        self._kept = [k for k in self._kept if k != kept]
        self._remove(kept)

    @property
    def unstored(self) -> str:
        """The checkpoint that is still to be copied to the target, in words; "" for none, and without a target."""
        left = [k for k in self.kept() if k not in self._stored] if self._durable else []
        return f"{left[0].what}: {self.problem or 'on its way'}" if left else ""

    async def store(self) -> None:
        """Copy stashed checkpoints, and each new one, to the target until cancelled."""
        again_s = FIRST_AGAIN_S
        while self._durable is not None:
            for kept in [k for k in self.kept() if k not in self._stored]:
                try:
                    names = await in_thread(lambda kept=kept: self._put(kept), self._writing)
                except OSError as error:
                    self._set_problem(f"the target {self._target} cannot be written: {error}")
                    again_s = min(2 * again_s, LAST_AGAIN_S)
                    continue
                log.info("%s of %s is in %s", kept.what, kept.job, self._target)
                self._stored[kept] = names
                self.problem, again_s = "", FIRST_AGAIN_S
            await asyncio.sleep(again_s)

    def is_stored(self, job: str, made: Checkpoint) -> bool:
        """Return whether this host has put the checkpoint into the target."""
        age = (made.generation, made.version, -made.parts)
        return any((k.job, k.age, k.checkpoint.part) == (job, age, made.part) for k in self._stored)

    async def put_worker(self, folder: Path) -> bool:
        """Copy the files of an ended worker to the target; return whether they are there."""
        if self._durable is None:
            return False
        try:
            await in_thread(lambda: self._put_worker(folder), self._writing)
        except OSError as error:
            self._set_problem(f"the target {self._target} cannot be written: {error}")
            return False
        return True

    async def leave(self, bound_s: float) -> None:
        """Copy the files of ended workers to the target within `bound_s`, and log what is lost."""
        folders = [f for f in sorted(self._home.glob("jobs/*/workers/*")) if _files(f)]
        lost = [f"{k.what} of {k.job} ({k.checkpoint.bytes} bytes)" for k in self.kept() if k not in self._stored]
        try:
            async with asyncio.timeout(bound_s):
                while self._durable is not None and folders:
                    await in_thread(lambda: self._put_worker(folders[0]), self._writing)
                    del folders[0]
        except (OSError, TimeoutError) as error:
            self._set_problem(f"the target {self._target} cannot be written: {error or type(error).__name__}")
        lost += [f"output of {f.name}: {', '.join(_files(f / 'output')[:LOST_NAMES])}" for f in folders
                 if _files(f / "output")]
        for what in lost:
            log.error("lost with this host, as no dispatcher was there and %s: %s",
                      "its target cannot be written" if self._durable else self._no_target, what)

    def _put(self, kept: StashedCheckpoint) -> list[str]:
        durable = self._reachable()
        names = _put(durable, kept)
        own = [k for k in self._stored if k.job == kept.job]
        ages = sorted({k.age for k in own} | {kept.age})
        for old in [k for k in own if k.age not in ages[-STORED:]]:
            for name in reversed(self._stored[old]):
                durable.delete(name)
        return names

    def _put_worker(self, folder: Path) -> None:
        durable, packed = self._reachable(), folder.with_name(f"{folder.name}.tar.gz")
        with tarfile.open(packed, "w:gz", compresslevel=1) as tar:
            for name in ("output", "log"):
                if (folder / name).exists():
                    tar.add(folder / name, arcname=name)
        durable.put(f"jobs/{folder.parents[1].name}/left/{packed.name}", read_range(packed))
        packed.unlink()

    def _reachable(self) -> FolderStore:
        """Return the target's store; OSError where it is not mounted, since this host's own disk will be lost."""
        if not Path(self._target).is_dir():
            raise FileNotFoundError(f"{self._target} is no folder on this host")
        assert self._durable is not None
        return self._durable

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _remove(self, kept: StashedCheckpoint) -> None:
        _record(kept).unlink(missing_ok=True)
        place = _place(kept)
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)

    def _read(self) -> list[StashedCheckpoint]:
        found = []
        for path in self._folder.glob("*.json"):
            try:
                found.append(from_json(StashedCheckpoint, json_file.read(path)))
            except (OSError, ValueError) as error:
                log.warning("%s is not used: %s", path, error)
        return [k for k in found if Path(k.checkpoint.path).is_file()]


def _place(kept: StashedCheckpoint) -> Path:
    """Return the folder of a stashed checkpoint, or the file that an earlier release kept."""
    path = Path(kept.checkpoint.path)
    return path if path.parent.name == FOLDER else path.parent


def _record(kept: StashedCheckpoint) -> Path:
    place = _place(kept)
    return place.with_name(f"{place.name.removesuffix('.ckpt')}.json")


def _put(durable: FolderStore, kept: StashedCheckpoint) -> list[str]:
    """Copy a checkpoint, or one writer's files of it, into quarantine, where a dispatcher judges mark and grant; return
    the keys, the record's last."""
    made, files = kept.checkpoint, files_of(kept.checkpoint)
    names = [quarantine_name(kept.job, file) for file in files]
    about, record = dump(replace(made, path="")).encode(), record_name(quarantine_name(kept.job, made))
    there = durable.find(record)
    if there is None or there.read_bytes() != about or not all(map(durable.find, names)):
        for file, name in zip(files, names, strict=True):
            durable.put(name, read_range(Path(file.path)))
        durable.put(record, [about])
    return [*names, record]


def in_thread(work: Callable[[], T], alone: threading.Lock) -> asyncio.Future[T]:
    """Run `work` in a daemon thread: a hung file system cannot delay the end of this process."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            with alone:
                done.set_result(work())
        except OSError as error:
            done.set_exception(error)

    threading.Thread(target=run, name="legacy", daemon=True).start()
    return asyncio.wrap_future(done)


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
