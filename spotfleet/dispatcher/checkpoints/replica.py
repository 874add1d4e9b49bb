"""Replica of checkpoints at the target, a folder that outlives this machine: copied there, and fetched when needed.

    kept here, not there --copy--> there, its record last; then all but the newest `keep` are dropped there
    written there by hosts --take--> in place there, its record last, and kept here without its files
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
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spotfleet.dispatcher.checkpoints.store import CheckpointStore, Outdated
from spotfleet.dispatcher.checkpoints.target_folder import TargetFolder
from spotfleet.dispatcher.disk.records import age, lies_at_target, name_of
from spotfleet.errors import DiskFull
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.folder import PROBE, PROBE_BYTES, fleet_store
from spotfleet.transport.boot import DispatcherBoot

log = logging.getLogger(__name__)
LOOK_LIMIT_S = 30.0
STALL_S = 60.0
AGAIN_S = 10.0  # pause after a copy that failed
LOOK_AGAIN_S = 1.0
LAST = 10**15  # above every version
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


class Replica:
    """Synchronisation with the target. Used on the loop; three threads access the target: one for each direction, and
    one for what hosts have written there."""

    def __init__(self, boot: DispatcherBoot) -> None:
        self._target = boot.spec.checkpoint.folder
        self._durable = fleet_store(self._target, boot.fleet, boot.ca)
        self._out, self._in = ThreadPoolExecutor(1, "replica-out"), ThreadPoolExecutor(1, "replica-in")
        self._take = ThreadPoolExecutor(1, "replica-take")
        self._copied: dict[str, tuple[Checkpoint, ...]] = {}  # job -> the checkpoints kept here when all were copied
        self._again_at: dict[str, float] = {}
        self._moved_at = 0.0
        self._probe_at = 0.0  # monotonic: when to look at it again
        self.probe = ""  # what the probe at the target has; "" until it is there

    def close(self) -> None:
        for pool in (self._out, self._in, self._take):
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

    async def show_probe(self) -> None:
        """Write the probe, by which hosts recognise this target, and look each AGAIN_S whether it is still there.
        Without its mount a folder looks empty: then another probe is written, which hosts on the mount do not have."""
        if time.monotonic() < self._probe_at:
            return
        try:
            self.probe = await asyncio.get_running_loop().run_in_executor(self._take, self._keep_probe)
        except OSError as error:
            log.warning("%s: hosts send checkpoints to the dispatcher: %s", self._target, error)
            self.probe = ""
        self._probe_at = time.monotonic() + AGAIN_S

    def _keep_probe(self) -> str:
        if not Path(self._target).is_dir():
            raise FileNotFoundError(f"{self._target} is no folder; is it mounted?")
        with contextlib.suppress(FileNotFoundError):
            if self.probe and b"".join(self._durable.get(PROBE, end=PROBE_BYTES)) == self.probe.encode():
                return self.probe
        probe = secrets.token_hex(PROBE_BYTES // 2)
        self._durable.put(PROBE, [probe.encode()])
        return probe

    async def take(self, job: str, store: CheckpointStore, fence: Callable[[], int]) -> Checkpoint | None:
        """Take the newest checkpoint that hosts have written to the target, once it is complete; return it."""
        store.to_look, newest, written = False, store.newest, store.written
        above = max(age(newest) if newest is not None else (-1, -1), (fence() - 1, LAST))
        folder = TargetFolder(self._durable, self._target, job, store.seals)
        try:
            taken = await asyncio.get_running_loop().run_in_executor(
                self._take, folder.take, above, store.parts.pieces())
            for refused, why in folder.refused:
                store.refuse(refused, f"at {self._target} {why}")
            for late in folder.late:
                store.parts.is_late(age(late), age(folder.newest or late))
            if taken is not None:
                store.add_at_target(taken, fence())
                store.to_look = True  # what is left of its arrival can be removed now
        except Outdated:
            taken = None  # a newer generation has begun meanwhile: it is pruned there
        except (OSError, DiskFull) as error:
            store.to_look = True
            store.remark = f"{self._target} cannot be read: {error}"
            log.warning("checkpoints of %s: %s", job, store.remark)
            await asyncio.sleep(AGAIN_S)
            return None
        store.looked = written
        return taken

    async def copy(self, job: str, store: CheckpointStore) -> None:
        """Copy the kept checkpoints to the target; a failure is reported in `store.remark`, and tried again."""
        kept = store.kept
        files = {c: store.path(c) for c in kept if not lies_at_target(c)}
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
        wanted = store.to_bring
        if wanted is not None and name_of(wanted) not in map(name_of, remote):
            if not remote:  # it may be another folder, without its mount
                store.remark = f"checkpoint {wanted.version} is not at {self._target}: is it mounted?"
                return False
            store.set_aside(wanted, f"its record at {self._target} is gone or carries no right seal")
            wanted = None
        try:
            for checkpoint in reversed(remote):
                if store.newest is not None and age(checkpoint) <= age(store.newest) and (
                        wanted is None or name_of(checkpoint) != name_of(wanted)):
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
        kept = next((c for c in store.kept if lies_at_target(c) and name_of(c) == name_of(checkpoint)), None)
        (store.lose if kept is None else store.set_aside)(
            kept or checkpoint, f"its copy at {self._target}, {folder.wrong}, has another digest")
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
