"""Replica of checkpoints at the target, a folder that outlives this machine: copied there, and fetched when needed.

    kept here, not there --copy--> there, its record last; then all but the newest `keep` are dropped there
    no worker holds the state --look--> a newer one is there --fetch--> checked in transfer; wrong twice: dropped there
                                   '-- without the proofs of `seals.py`: refused, stays there, and an event names it

A newer one is there if hosts that lost their dispatcher left it in quarantine, or if this machine is new. If some
checkpoint is kept here, a job continues with it despite any problem at the target. If none is kept, the job waits
LOOK_LIMIT_S for a target that does not answer. It waits without limit for a checkpoint that is, or was, known to be
there: room on this disk, a target that answers, or `cancel` ends the wait; the job's `why` names it. A copy without
progress for STALL_S is
started again. Training waits only for a restore.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from spotfleet.codec import from_json, parse, to_json
from spotfleet.dispatcher.checkpoints.seals import JobSeals
from spotfleet.dispatcher.checkpoints.store import SHA256, CheckpointStore
from spotfleet.dispatcher.disk.records import age, digest_of, name_of, named
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic
from spotfleet.storage.folder import (
    QUARANTINE,
    FolderStore,
    checkpoint_name,
    fleet_store,
    part_called,
    quarantine_name,
    read_range,
    record_name,
)
from spotfleet.transport.boot import DispatcherBoot

log = logging.getLogger(__name__)
LOOK_LIMIT_S = 30.0
STALL_S = 60.0
AGAIN_S = 10.0  # pause after a copy that failed
LOOK_AGAIN_S = 1.0
CHUNK_BYTES = 1 << 20
RECORD_BYTES = 1 << 16  # a longer record is none
T = TypeVar("T")


@dataclass(frozen=True)
class SyncPlan:
    """Changes to make at the target for one job."""

    copy: tuple[Checkpoint, ...]  # newest first
    drop: tuple[Checkpoint, ...]


def diff(here: Iterable[Checkpoint], remote: Iterable[Checkpoint], names: Iterable[Checkpoint],
         keep: int) -> SyncPlan:
    """Plan the synchronisation. `remote`: whole ones with records; `names`: all files, including a lone record or
    file."""
    remote = {(name_of(c), c.digest): c for c in remote}
    kept = sorted({(name_of(c), c.digest): c for c in [*remote.values(), *here]}.values(), key=age)[-keep:]
    copy = tuple(c for c in reversed(kept) if (name_of(c), c.digest) not in remote)
    oldest = age(kept[0]) if len(kept) == keep else (-1, -1)
    return SyncPlan(copy, tuple(c for c in names if age(c) < oldest))


class TargetFolder:
    """Checkpoints of one job at the target. Blocking; any method may raise OSError.

    Those among `checkpoints` are a dispatcher's, with its seal. Those in quarantine were left by hosts without one;
    here they have a `mark`.
    """

    def __init__(self, durable: FolderStore, target: str, job: str, seals: JobSeals | None = None) -> None:
        """`seals`: None: every record counts, and nothing in quarantine does."""
        self._durable, self._target, self._job, self._seals = durable, target, job, seals
        self.wrong = ""  # name of the file with another digest that ended the last `fetch`
        self.refused: list[tuple[Checkpoint, str]] = []  # at the last `offers`, with the reasons

    def whole(self) -> list[Checkpoint]:
        """Return the dispatchers' checkpoints that count, oldest first."""
        return self._judge()[0]

    def names(self) -> list[Checkpoint]:
        """Return all checkpoints outside quarantine, as parsed from file names."""
        found = [part_called(n) or named(Path(n).stem) for n in self._all()]
        return [c for c in map(named, sorted({name_of(c) for c in found if c is not None})) if c is not None]

    def offers(self) -> list[Checkpoint]:
        """Return the checkpoints that can be fetched, oldest first; with `parts` above 1 in parts, without a digest."""
        kept, self.refused = self._judge()
        whole = {name_of(c): c for c in kept}
        unsealed = self._seals is None or (self._seals.takes_unsealed and not any(c.seal for c in kept))
        groups = [*self._left(), *(self._parted() if unsealed else ())]
        found = {name_of(p[0]): replace(p[0], path="", **({"digest": "", "part": 0} if len(p) > 1 else {}))
                 for p in groups}
        return sorted((found | whole).values(), key=age)

    def _judge(self) -> tuple[list[Checkpoint], list[tuple[Checkpoint, str]]]:
        """Return the dispatchers' checkpoints that count, oldest first, and the others with the reasons."""
        named = {name: c for name in self.names() if self._durable.find(self._name(name)) and (c := self._record(name))}
        found = [c for name, c in named.items() if name_of(c) == name_of(name)]
        if self._seals is None:
            return sorted(found, key=age), []
        whys = {c: self._seals.problem(c) for c in found}
        counted = sorted((c for c in found if not whys[c]), key=age)
        for checkpoint in counted:
            self._seals.note(checkpoint.serial)
        if self._seals.takes_unsealed:  # older ones of the release before are no news, and count if there are no others
            unsealed = [c for c in found if not c.seal and (not counted or age(c) < age(counted[-1]))]
            whys = {c: why for c, why in whys.items() if c not in unsealed}
            counted = counted or sorted(unsealed, key=age)
        others = {at: f"its record is that of {name_of(c)}" for at, c in named.items() if name_of(c) != name_of(at)}
        return counted, [(c, why) for c, why in (whys | others).items() if why]

    def _parted(self) -> list[list[Checkpoint]]:
        """Return the checkpoints that hosts of an earlier release left, with all parts there, in order, with paths."""
        return _complete(replace(part, path=str(self._durable.folder / name))
                         for name in self._all() if (part := part_called(name)))

    def _left(self) -> list[list[Checkpoint]]:
        """Return the checkpoints in quarantine that count, as one file or with all parts, in order, with paths; add
        the others to `refused`."""
        if self._seals is None:
            return []
        found = []
        for name in self._durable.names(f"jobs/{self._job}/{QUARANTINE}"):
            made = self._read(name) if name.endswith(".json") else None
            if made is None or record_name(quarantine_name(self._job, made)) != name:
                continue  # a file of a checkpoint, or no record of one
            path = self._durable.find(quarantine_name(self._job, made))
            if path is None or not 0 <= made.part < made.parts:
                continue
            if why := self._seals.problem_in_quarantine(made):
                self.refused.append((made, why))
            else:
                found.append(replace(made, path=str(path)))
        return _complete(found)

    def _all(self) -> list[str]:
        if not Path(self._target).is_dir():
            raise FileNotFoundError(f"{self._target} is no folder; is it mounted?")
        return self._durable.names(f"jobs/{self._job}/checkpoints")

    def put(self, checkpoint: Checkpoint, file: Path) -> bool:
        """Copy a checkpoint to the target; return False if our own file has another digest than its record."""
        if digest_of(file) != checkpoint.digest:
            return False
        self._durable.put(self._name(checkpoint), read_range(file))
        self._durable.put(self._name(checkpoint, "json"), [json.dumps(to_json(checkpoint)).encode()])
        return True

    def drop(self, checkpoint: Checkpoint) -> None:
        stem = f"jobs/{self._job}/{QUARANTINE if checkpoint.mark else 'checkpoints'}/{name_of(checkpoint)}"
        self._durable.delete(f"{stem}.json")
        self._durable.delete(f"{stem}.ckpt")
        for name in self._durable.names(f"{stem}.parts"):
            self._durable.delete(name)
        with contextlib.suppress(FileNotFoundError):
            (self._durable.folder / f"{stem}.parts").rmdir()

    def release(self) -> None:
        """Empty the quarantine of all that is no newer than the newest kept one."""
        newest = next(map(age, reversed(self.whole())), (-1, -1))
        folder = f"jobs/{self._job}/{QUARANTINE}/"
        for stem in {name.removeprefix(folder).partition(".")[0] for name in self._durable.names(folder[:-1])}:
            if (left := named(stem)) is not None and age(left) <= newest:
                self.drop(replace(left, mark=QUARANTINE))

    def fetch(self, checkpoint: Checkpoint, file: Path, moved: Callable[[], None]) -> Checkpoint | None:
        """Copy one of `offers` to `file`, joining its parts; return its new record. None, and no file, if its digest is
        wrong."""
        sources = self._sources(checkpoint)
        part = file.with_name(f".{file.name}.target.part")  # `files.sweep` removes such files
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = hashlib.sha256()
        try:
            with part.open("wb") as out:
                wrong = next((s for s in sources if not _copy(s, out, whole, moved)), None)
                size = out.tell()
            self.wrong = "" if wrong is None else str(Path(wrong.path).relative_to(self._durable.folder))
            if wrong is not None or not sources:
                return None
            atomic.rename(part, file, sync=False)  # the target has it
            return replace(checkpoint, digest=whole.hexdigest(), bytes=size, parts=1, grant="", mark="")
        finally:
            part.unlink(missing_ok=True)

    def _sources(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        if checkpoint.mark or checkpoint.parts > 1:
            groups = self._left() if checkpoint.mark else self._parted()
            return next((p for p in groups if _same(p[0], checkpoint)), [])
        return [replace(checkpoint, path=str(self._durable.folder / self._name(checkpoint)))]

    def _record(self, checkpoint: Checkpoint) -> Checkpoint | None:
        return self._read(self._name(checkpoint, "json"))

    def _read(self, name: str) -> Checkpoint | None:
        """Read a record; None if there is none, or one that no dispatcher or host of ours has written."""
        try:
            data = b"".join(self._durable.get(name, end=RECORD_BYTES))
            found = from_json(Checkpoint, parse(data.decode()))
        except (FileNotFoundError, ValueError):
            return None
        return found if SHA256.fullmatch(found.digest) and named(name_of(found)) is not None else None

    def _name(self, checkpoint: Checkpoint, ending: str = "ckpt") -> str:
        name = checkpoint_name(self._job, checkpoint.version, checkpoint.generation)
        return f"{name.removesuffix('ckpt')}{ending}"


def _complete(found: Iterable[Checkpoint]) -> list[list[Checkpoint]]:
    """Return the checkpoints of which all parts were found, the parts of each in order."""
    held: dict[tuple[str, int], dict[int, Checkpoint]] = {}
    for part in found:
        held.setdefault((name_of(part), part.parts), {})[part.part] = part
    return [[by_part[part] for part in range(parts)] for (_, parts), by_part in held.items() if len(by_part) == parts]


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (name_of(one), one.parts) == (name_of(other), other.parts)


def _copy(source: Checkpoint, out: BinaryIO, whole: Any, moved: Callable[[], None]) -> bool:
    """Append a file to `out`; return whether it has its digest."""
    own_sha = hashlib.sha256()
    with open(source.path, "rb") as data:
        while chunk := data.read(CHUNK_BYTES):
            out.write(chunk)
            own_sha.update(chunk)
            whole.update(chunk)
            moved()
    return own_sha.hexdigest() == source.digest


class Replica:
    """Synchronisation with the target. Used on the loop; two threads access the target, one for each direction."""

    def __init__(self, boot: DispatcherBoot) -> None:
        self._target = boot.spec.checkpoint.folder
        self._durable = fleet_store(self._target, boot.fleet, boot.ca)
        self._out, self._in = ThreadPoolExecutor(1, "replica-out"), ThreadPoolExecutor(1, "replica-in")
        self._copied: dict[str, tuple[Checkpoint, ...]] = {}  # job -> the checkpoints kept here when all were copied
        self._again_at: dict[str, float] = {}
        self._moved_at = 0.0

    def close(self) -> None:
        for pool in (self._out, self._in):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- to the target

    def lacks(self, job: str, store: CheckpointStore) -> bool:
        """Return whether a kept checkpoint is not at the target yet."""
        return bool(store.kept) and self._copied.get(job) != store.kept

    def is_behind(self, job: str, store: CheckpointStore) -> bool:
        return time.monotonic() >= self._again_at.get(job, 0.0) and self.lacks(job, store)

    def forget(self, jobs: Iterable[str]) -> None:
        """Drop what is remembered of all jobs but these."""
        known = set(jobs)
        self._copied = {job: kept for job, kept in self._copied.items() if job in known}
        self._again_at = {job: at for job, at in self._again_at.items() if job in known}

    async def copy(self, job: str, store: CheckpointStore) -> None:
        """Copy the kept checkpoints to the target; a failure is reported in `store.remark`, and tried again."""
        kept = store.kept
        files = {c: store.path(c) for c in kept}
        folder = TargetFolder(self._durable, self._target, job, store.seals)
        try:
            damaged, floor = await asyncio.get_running_loop().run_in_executor(
                self._out, _bring_up, folder, files, store.keep)
        except OSError as error:
            store.remark = f"not copied to {self._target}: {error.strerror or error}"
            log.warning("checkpoints of %s are %s", job, store.remark)
            self._again_at[job] = time.monotonic() + AGAIN_S
            return
        for checkpoint in damaged:
            store.recheck(checkpoint)
        if not damaged:
            self._copied[job], store.remark, store.floor = kept, "", floor

    # ---- from the target

    async def fetch_newer(self, job: str, store: CheckpointStore) -> None:
        """Fetch a checkpoint that is newer than all kept here, and mark the search in `store` as done. If that is not
        possible yet, return after a pause, to be called again."""
        if await self._search(job, store):
            store.mark_searched()
        else:
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _search(self, job: str, store: CheckpointStore) -> bool:
        folder = TargetFolder(self._durable, self._target, job, store.seals)
        try:
            remote = await self._within(LOOK_LIMIT_S, folder.offers)
        except OSError as error:
            store.remark = f"{self._target} cannot be read: {error.strerror or error or 'it does not answer'}"
            log.warning("%s: %s", job, store.remark)
            late = time.monotonic() - store.seeks_since >= LOOK_LIMIT_S
            return store.newest is not None or (late and not store.awaited)
        store.remark = ""
        for refused, why in folder.refused:
            store.refuse(refused, f"at {self._target} {why}")
        try:
            for checkpoint in reversed(remote):
                if store.newest is not None and age(checkpoint) <= age(store.newest):
                    break
                if await self._fetch(job, folder, checkpoint, store):
                    break
        except OSError as error:
            store.remark = (f"checkpoint {checkpoint.version} is at {self._target} and cannot be brought here: "
                            f"{error.strerror or error or 'it does not answer'}")
            log.warning("%s: %s", job, store.remark)
            return store.newest is not None  # without one here, wait for the one there
        return True

    async def _fetch(self, job: str, folder: TargetFolder, checkpoint: Checkpoint, store: CheckpointStore) -> bool:
        """Fetch a checkpoint; return False if it is damaged."""
        store.seeking = f"brings checkpoint {checkpoint.version} back from {self._target}"
        for _ in range(2):  # twice: a record that is just being replaced does not match its file
            found = await self._moving(lambda: folder.fetch(checkpoint, store.path(checkpoint), self._moved))
            if found is not None:
                store.add(found)
                log.info("%s: checkpoint %s is back from %s", job, checkpoint.version, self._target)
                return True
        store.lose(checkpoint, f"its copy at {self._target}, {folder.wrong}, has another digest")
        with contextlib.suppress(OSError):  # if it stays, it is found and rejected again
            await self._within(LOOK_LIMIT_S, lambda: folder.drop(checkpoint))
        return False

    async def _within(self, limit_s: float, work: Callable[[], T]) -> T:
        async with asyncio.timeout(limit_s):
            return await asyncio.get_running_loop().run_in_executor(self._in, work)

    async def _moving(self, work: Callable[[], T]) -> T:
        """Run a copy in the thread; TimeoutError after STALL_S without progress."""
        self._moved()
        copying = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._in, work))
        while not (await asyncio.wait([copying], timeout=STALL_S))[0]:
            if time.monotonic() - self._moved_at >= STALL_S:
                copying.cancel()
                raise TimeoutError
        return copying.result()

    def _moved(self) -> None:
        self._moved_at = time.monotonic()


def _bring_up(folder: TargetFolder, files: dict[Checkpoint, Path], keep: int) -> tuple[list[Checkpoint], int]:
    """Synchronise the target; return our own files that are wrong, and the lowest serial number there."""
    wanted, damaged = diff(files, folder.whole(), folder.names(), keep), []
    for checkpoint in wanted.copy:
        try:
            if not folder.put(checkpoint, files[checkpoint]):
                damaged.append(checkpoint)
        except FileNotFoundError:
            if files[checkpoint].exists():
                raise
            damaged.append(checkpoint)  # pruned meanwhile, or lost
    if not damaged:
        for checkpoint in wanted.drop:
            folder.drop(checkpoint)
        folder.release()
    return damaged, min((c.serial for c in folder.whole()), default=0)
