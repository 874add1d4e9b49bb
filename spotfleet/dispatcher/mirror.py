"""Checkpoints at the target, the folder that outlives this machine: copied there, and brought back when one is needed.

    kept here, not there --copy--> there, its record last; then all but the newest `keep` are dropped there
    nobody holds the state --look--> a newer one is there --fetch--> read on its way; wrong twice: dropped there

A newer one is there when hosts that had lost their dispatcher left it, or when this machine is new. Where something is
kept here, whatever stands in the way is gone on without. Where nothing is, a target that does not answer is waited for
LOOK_LIMIT_S, and a checkpoint that is or was known to be there until it is here: room on this disk, a target that
answers, or `cancel` frees the job, whose `why` says what it waits for. A copy that stands still for STALL_S is begun
anew. Training never waits for any of this, but for a restore.
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

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.boot import DispatcherBoot
from spotfleet.dispatcher.checkpoints import CheckpointStore
from spotfleet.dispatcher.records import age, digest_of, name_of, named
from spotfleet.durable import Durable, checkpoint_name, part_called
from spotfleet.messages import Checkpoint

log = logging.getLogger(__name__)
LOOK_LIMIT_S = 30.0
STALL_S = 60.0
AGAIN_S = 10.0  # a copy that was refused
LOOK_AGAIN_S = 1.0
CHUNK_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """What is to be done at the target for one job."""

    copy: tuple[Checkpoint, ...]  # newest first
    drop: tuple[Checkpoint, ...]


def change(here: Iterable[Checkpoint], there: Iterable[Checkpoint], names: Iterable[Checkpoint], keep: int) -> Change:
    """`there`: whole with their records; `names`: all that lies there, records or files alone too."""
    there = {(name_of(c), c.digest): c for c in there}
    kept = sorted({(name_of(c), c.digest): c for c in [*there.values(), *here]}.values(), key=age)[-keep:]
    copy = tuple(c for c in reversed(kept) if (name_of(c), c.digest) not in there)
    oldest = age(kept[0]) if len(kept) == keep else (-1, -1)
    return Change(copy, tuple(c for c in names if age(c) < oldest))


class Shelf:
    """One job's checkpoints at the target. Blocking; any method may raise OSError."""

    def __init__(self, durable: Durable, target: str, job: str) -> None:
        self._durable, self._target, self._job = durable, target, job

    def whole(self) -> list[Checkpoint]:
        """Those with a record, oldest first."""
        found = (self._record(c) for c in self.names() if self._durable.find(self._name(c)) is not None)
        return sorted((c for c in found if c is not None), key=age)

    def names(self) -> list[Checkpoint]:
        """All that lies there, as far as names tell."""
        found = [part_called(n) or named(Path(n).stem) for n in self._all()]
        return [c for c in map(named, sorted({name_of(c) for c in found if c is not None})) if c is not None]

    def parted(self) -> list[list[Checkpoint]]:
        """Those of which all parts are there, each in its order, with its path."""
        held: dict[tuple[str, int], dict[int, Checkpoint]] = {}
        for name in self._all():
            if part := part_called(name):
                part = replace(part, path=str(self._durable.folder / name))
                held.setdefault((name_of(part), part.parts), {})[part.part] = part
        return [[mine[part] for part in range(parts)] for (_, parts), mine in held.items() if len(mine) == parts]

    def offers(self) -> list[Checkpoint]:
        """What could be brought back, oldest first; in parts where `parts` is above 1, and then without a digest."""
        whole = {name_of(c): c for c in self.whole()}
        joined = {name_of(p[0]): replace(p[0], digest="", part=0, path="") for p in self.parted()}
        return sorted((joined | whole).values(), key=age)

    def _all(self) -> list[str]:
        if not Path(self._target).is_dir():
            raise FileNotFoundError(f"{self._target} is no folder; is it mounted?")
        return self._durable.names(f"jobs/{self._job}/checkpoints")

    def put(self, checkpoint: Checkpoint, file: Path) -> bool:
        """False where our own file is not the one that its record says."""
        if digest_of(file) != checkpoint.digest:
            return False
        self._durable.put(self._name(checkpoint), file)
        self._durable.write(self._name(checkpoint, "json"), json.dumps(to_json(checkpoint)).encode())
        return True

    def drop(self, checkpoint: Checkpoint) -> None:
        self._durable.drop(self._name(checkpoint, "json"))
        self._durable.drop(self._name(checkpoint))
        parts = self._name(checkpoint, "parts")
        for name in self._durable.names(parts):
            self._durable.drop(name)
        with contextlib.suppress(FileNotFoundError):
            (self._durable.folder / parts).rmdir()

    def fetch(self, checkpoint: Checkpoint, file: Path, moved: Callable[[], None]) -> Checkpoint | None:
        """Copy one of `offers` to `file`, joined if it lies there in parts; as it is here. None, and no file, if it has
        another digest."""
        sources = [replace(checkpoint, path=str(self._durable.folder / self._name(checkpoint)))]
        if checkpoint.parts > 1:
            sources = next((p for p in self.parted() if _same(p[0], checkpoint)), [])
        part = file.with_name(f".{file.name}.target.part")  # `files.sweep` knows such names
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = hashlib.sha256()
        try:
            with part.open("wb") as out:
                right = bool(sources) and all(_copy(source, out, whole, moved) for source in sources)
                size = out.tell()
            if not right:
                return None
            part.replace(file)
            return replace(checkpoint, digest=whole.hexdigest(), bytes=size, parts=1)
        finally:
            part.unlink(missing_ok=True)

    def _record(self, checkpoint: Checkpoint) -> Checkpoint | None:
        path = self._durable.find(self._name(checkpoint, "json"))
        try:
            found = from_json(Checkpoint, json.loads(path.read_text())) if path else None
        except ValueError:
            return None
        return found if found is not None and name_of(found) == name_of(checkpoint) else None

    def _name(self, checkpoint: Checkpoint, ending: str = "ckpt") -> str:
        name = checkpoint_name(self._job, checkpoint.version, checkpoint.generation)
        return f"{name.removesuffix('ckpt')}{ending}"


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (name_of(one), one.parts) == (name_of(other), other.parts)


def _copy(source: Checkpoint, out: BinaryIO, whole: Any, moved: Callable[[], None]) -> bool:
    """Append it to `out`; whether it has its digest."""
    mine = hashlib.sha256()
    with open(source.path, "rb") as data:
        while chunk := data.read(CHUNK_BYTES):
            out.write(chunk)
            mine.update(chunk)
            whole.update(chunk)
            moved()
    return mine.hexdigest() == source.digest


class Mirror:
    """On the loop; what touches the target is done in two threads, one for each direction."""

    def __init__(self, boot: DispatcherBoot) -> None:
        self._target = boot.spec.checkpoint.folder
        self._durable = Durable(self._target, boot.fleet, boot.ca)
        self._out, self._in = ThreadPoolExecutor(1, "mirror-out"), ThreadPoolExecutor(1, "mirror-in")
        self._copied: dict[str, tuple[Checkpoint, ...]] = {}  # job -> what was kept here when all was copied
        self._again_at: dict[str, float] = {}
        self._moved_at = 0.0

    def close(self) -> None:
        for pool in (self._out, self._in):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- there

    def owes(self, job: str, store: CheckpointStore) -> bool:
        due = time.monotonic() >= self._again_at.get(job, 0.0)
        return due and bool(store.kept) and self._copied.get(job) != store.kept

    async def copy(self, job: str, store: CheckpointStore) -> None:
        """Bring the target up to what is kept here; a refusal is said in `store.remark`, and tried again."""
        kept = store.kept
        files = {c: store.path(c) for c in kept}
        shelf = Shelf(self._durable, self._target, job)
        try:
            wrong = await asyncio.get_running_loop().run_in_executor(self._out, _bring_up, shelf, files, store.keep)
        except OSError as error:
            store.remark = f"not copied to {self._target}: {error.strerror or error}"
            log.warning("checkpoints of %s are %s", job, store.remark)
            self._again_at[job] = time.monotonic() + AGAIN_S
            return
        for checkpoint in wrong:
            store.suspect(checkpoint)
        if not wrong:
            self._copied[job], store.remark = kept, ""

    # ---- back

    async def look(self, job: str, store: CheckpointStore) -> None:
        """Bring back what is newer there than all that is kept here: then `store` has been looked for. Else to be
        called again."""
        if await self._looked(job, store):
            store.has_looked()
        else:
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _looked(self, job: str, store: CheckpointStore) -> bool:
        shelf = Shelf(self._durable, self._target, job)
        try:
            there = await self._within(LOOK_LIMIT_S, shelf.offers)
        except OSError as error:
            store.remark = f"{self._target} cannot be read: {error.strerror or error or 'it does not answer'}"
            log.warning("%s: %s", job, store.remark)
            late = time.monotonic() - store.seeks_since >= LOOK_LIMIT_S
            return store.newest is not None or (late and not store.awaited)
        store.remark = ""
        try:
            for checkpoint in reversed(there):
                if store.newest is not None and age(checkpoint) <= age(store.newest):
                    break
                if await self._fetch(job, shelf, checkpoint, store):
                    break
        except OSError as error:
            store.remark = (f"checkpoint {checkpoint.version} is at {self._target} and cannot be brought here: "
                            f"{error.strerror or error or 'it does not answer'}")
            log.warning("%s: %s", job, store.remark)
            return store.newest is not None  # what is there is worth waiting for
        return True

    async def _fetch(self, job: str, shelf: Shelf, checkpoint: Checkpoint, store: CheckpointStore) -> bool:
        """False where it is damaged."""
        store.seeking = f"brings checkpoint {checkpoint.version} back from {self._target}"
        for _ in range(2):  # a record that is just being replaced does not fit its file
            found = await self._moving(lambda: shelf.fetch(checkpoint, store.path(checkpoint), self._moved))
            if found is not None:
                store.add(found)
                log.info("%s: checkpoint %s is back from %s", job, checkpoint.version, self._target)
                return True
        store.lose(checkpoint, f"its copy at {self._target} has another digest")
        with contextlib.suppress(OSError):  # else it is met again, and refused again
            await self._within(LOOK_LIMIT_S, lambda: shelf.drop(checkpoint))
        return False

    async def _within(self, limit_s: float, work: Callable[[], T]) -> T:
        async with asyncio.timeout(limit_s):
            return await asyncio.get_running_loop().run_in_executor(self._in, work)

    async def _moving(self, work: Callable[[], T]) -> T:
        """TimeoutError once nothing has moved for STALL_S."""
        self._moved()
        copying = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._in, work))
        while not (await asyncio.wait([copying], timeout=STALL_S))[0]:
            if time.monotonic() - self._moved_at >= STALL_S:
                copying.cancel()
                raise TimeoutError
        return copying.result()

    def _moved(self) -> None:
        self._moved_at = time.monotonic()


def _bring_up(shelf: Shelf, files: dict[Checkpoint, Path], keep: int) -> list[Checkpoint]:
    """Those of our own files that turned out wrong."""
    wanted, wrong = change(files, shelf.whole(), shelf.names(), keep), []
    for checkpoint in wanted.copy:
        try:
            if not shelf.put(checkpoint, files[checkpoint]):
                wrong.append(checkpoint)
        except FileNotFoundError:
            if files[checkpoint].exists():
                raise
            wrong.append(checkpoint)  # pruned meanwhile, or lost
    if not wrong:
        for checkpoint in wanted.drop:
            shelf.drop(checkpoint)
    return wrong
