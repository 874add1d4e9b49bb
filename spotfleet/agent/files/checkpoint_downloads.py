"""Checkpoint downloads: a worker that must restore receives its assignment only once the file is on this host."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import aiohttp

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, RETRYABLE, Transfers
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.protocol.messages import Checkpoint, DamagedCheckpoint, WorkerOrders
from spotfleet.retry import Backoff
from spotfleet.storage import verified

log = logging.getLogger("spotfleet.agent")

TRIES = 3  # with a wrong digest, or broken off in a row, before it is reported to the dispatcher
HOST_TRIES = 6  # with a wrong digest while the orders name the same file: the dispatcher has found its own whole
SPOILT = 3  # times that a file which came whole was changed or removed here, before this host is blamed
FULL_S = 20.0  # wait for a full disk, before the workers are ended and this host is blamed
AGAIN_S = 30.0  # period after TRIES, while the orders name the same file: the dispatcher may have recovered it


class CheckpointDownloads:
    """Downloads of one checkpoint per job, shared by the job's workers on this host.

        wanted --fetch, again with backoff--> here       ended by a newer `restore`, or by none
           ^ |-- no room on this host for FULL_S: `blame` ends the job's workers here, and another host is tried
           | '-- TRIES times another digest, or broken off: `damaged` until another file is wanted; fetched each
           |     AGAIN_S. HOST_TRIES times another digest: `blame`, as with no room
           '---- the file here was changed or removed: a worker found it damaged. SPOILT times: `blame`
    """

    def __init__(self, transfers: Transfers, folder: Callable[[str], Path], changed: Callable[[], None],
                 blame: Callable[[str, str], None]) -> None:
        """`blame`: called with the job and the reason when this host cannot hold the checkpoint: another one may."""
        self._transfers = transfers
        self._folder = folder
        self._changed, self._blame = changed, blame
        self._fetching: dict[str, tuple[Checkpoint, asyncio.Task[None]]] = {}
        self._here: dict[str, tuple[Checkpoint, Path, verified.State]] = {}
        self._damaged: dict[str, DamagedCheckpoint] = {}
        self._received: dict[str, int] = {}  # bytes received of the current download
        self._full: dict[str, str] = {}
        self._spoilt: dict[str, tuple[Checkpoint, int]] = {}  # the newest file that was changed here, and how often

    def why(self, job: str) -> str:
        wanted = self._fetching.get(job)
        if wanted is None:
            return ""
        damaged = ", which is damaged" if job in self._damaged else ""
        full = f", for which there is no room: {self._full[job]}" if job in self._full else ""
        return f"fetching checkpoint {wanted[0].version}{damaged}{full}"

    def fetched(self, job: str) -> int:
        """Return the bytes received so far, in the transfer that got furthest; 0 without a download."""
        return self._received.get(job, 0) if job in self._fetching else 0

    def damaged(self) -> tuple[DamagedCheckpoint, ...]:
        """Return the checkpoints that cannot be fetched whole, for the report."""
        return tuple(self._damaged.values())

    def resolve(self, job: str, orders: WorkerOrders, delivered: WorkerOrders) -> WorkerOrders:
        """Return `orders` as they may be sent now to a worker that last received `delivered`."""
        wanted = orders.restore
        if wanted is None or wanted.url:  # a worker reads it from the object store itself
            self._drop(job)
            return orders
        held = self._here.get(job)
        if held and _same(held[0], wanted) and _file_state(held[1]) == held[2]:
            return replace(orders, restore=replace(wanted, path=str(held[1])))
        if held and _same(held[0], wanted):
            del self._here[job]
            self._count_spoilt(job, wanted)
        self._fetch(job, wanted)
        return replace(orders, restore=None, assignment=delivered.assignment)

    def forget(self, job: str) -> None:
        """Drop the job's download: no worker of it is here any more."""
        self._drop(job)

    def _count_spoilt(self, job: str, wanted: Checkpoint) -> None:
        before, times = self._spoilt.get(job, (wanted, 0))
        self._spoilt[job] = wanted, times = wanted, 1 + (times if _same(before, wanted) else 0)
        if times >= SPOILT:
            self._blame(job, f"checkpoint {wanted.version} arrived damaged here: it came whole {times} times, and its "
                             "file was changed on this host's disk each time")

    def _drop(self, job: str) -> None:
        self._damaged.pop(job, None)
        self._full.pop(job, None)
        self._received.pop(job, None)
        if fetching := self._fetching.pop(job, None):
            fetching[1].cancel()

    def _fetch(self, job: str, wanted: Checkpoint) -> None:
        fetching = self._fetching.get(job)
        if fetching and _same(fetching[0], wanted):
            return
        self._drop(job)
        self._fetching[job] = (wanted, asyncio.create_task(self._download(job, wanted)))

    async def _download(self, job: str, wanted: Checkpoint) -> None:
        folder = self._folder(job) / "restore"
        target = folder / f"{wanted.version}-{wanted.digest[:16]}{'' if wanted.name else '.pt'}"
        backoff, wrong, broken, full_since, here = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S), 0, 0, 0.0, 0

        def on_bytes(size: int) -> None:
            nonlocal here
            here += size
            self._received[job] = max(here, self._received.get(job, 0))

        while True:
            here = 0
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                for left in folder.glob("*.part"):
                    if left.name != f"{target.name}.part":
                        verified.remove(left)  # the beginning of another one
                await self._transfers.checkpoint(job, wanted, target, on_bytes)
                state = _file_state(target)
                _note(target, wanted.digest)
                break
            except RETRYABLE as error:
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
                broken = broken + 1 if isinstance(error, aiohttp.ClientPayloadError) else 0
            except DiskFull as error:  # the checkpoint is not to blame
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
                full_since = full_since if job in self._full else time.monotonic()
                self._full[job] = str(error)
                if time.monotonic() - full_since >= FULL_S:
                    self._blame(job, f"checkpoint {wanted.version} finds no room here: {error}")
                    full_since = time.monotonic()
            except SpotfleetError as error:
                wrong += 1
                log.warning("checkpoint %s of %s: %s; that was try %d", wanted.version, job, error, wrong)
            if wrong == HOST_TRIES:
                self._blame(job, f"checkpoint {wanted.version} arrived damaged here {wrong} times, and the "
                                 "dispatcher's file is whole")
            if TRIES in (wrong, broken):  # a file that breaks off at each try cannot be read there
                self._damaged[job] = DamagedCheckpoint(job, wanted.version, wanted.digest)
                self._changed()
            pause_s = backoff.next_s()
            await asyncio.sleep(AGAIN_S if max(wrong, broken) >= TRIES else pause_s)
        older = self._here.get(job)
        self._here[job] = (wanted, target, state or (0, 0))
        self._fetching.pop(job, None)
        for entries in (self._damaged, self._full, self._received):
            entries.pop(job, None)
        if older and older[1] != target:
            verified.remove(older[1])
        self._changed()


def _note(target: Path, digest: str) -> None:
    """Spare the workers here the comparison of the digest; without a note each compares it."""
    try:
        verified.note(target, digest)
    except OSError as error:
        log.warning("%s: %s", target, error)


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (one.version, one.digest) == (other.version, other.digest)


def _file_state(path: Path) -> verified.State | None:
    try:
        return verified.state_of(path)
    except OSError:
        return None
