"""Checkpoints on their way in: a worker that must restore gets its assignment only when the file lies here."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, TROUBLE, Transfers
from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.messages import Checkpoint, Damaged, WorkerOrders

log = logging.getLogger("spotfleet.agent")

TRIES = 3  # with a wrong digest, before the dispatcher is told
FULL_S = 20.0  # so long a full disk is waited for, before the workers are ended and this host is blamed for it
AGAIN_S = 30.0  # from then on, should it go on naming the same file: it may have got it back

Seen = tuple[int, int]  # a file's size and the time of its last change, in ns


class Restores:
    """One file per job, shared by the job's workers on this host.

        wanted --fetch, again with backoff--> here       freed by a newer `restore`, or by none
           ^ |-- no room on this host for FULL_S: `roomless` ends the job's workers here, and another host is tried
           | '-- TRIES times another digest: `damaged` until another one is wanted; fetched each AGAIN_S
           '---- the file here was changed or removed: a worker found it damaged
    """

    def __init__(self, transfers: Transfers, folder: Callable[[str], Path], changed: Callable[[], None],
                 roomless: Callable[[str, str], None]) -> None:
        """`roomless`: told the job and why, when this host has no room for what its workers need."""
        self._transfers = transfers
        self._folder = folder
        self._changed, self._roomless = changed, roomless
        self._fetching: dict[str, tuple[Checkpoint, asyncio.Task[None]]] = {}
        self._here: dict[str, tuple[Checkpoint, Path, Seen]] = {}
        self._damaged: dict[str, Damaged] = {}
        self._came: dict[str, int] = {}  # bytes of what is being fetched
        self._full: dict[str, str] = {}

    def why(self, job: str) -> str:
        wanted = self._fetching.get(job)
        if wanted is None:
            return ""
        trouble = ", which is damaged" if job in self._damaged else ""
        full = f", for which there is no room: {self._full[job]}" if job in self._full else ""
        return f"fetching checkpoint {wanted[0].version}{trouble}{full}"

    def fetched(self, job: str) -> int:
        """Bytes that have come so far, in the transfer that came furthest; 0: nothing is being fetched."""
        return self._came.get(job, 0) if job in self._fetching else 0

    def damaged(self) -> tuple[Damaged, ...]:
        """What cannot be fetched, for the dispatcher to look at."""
        return tuple(self._damaged.values())

    def resolve(self, job: str, orders: WorkerOrders, delivered: WorkerOrders) -> WorkerOrders:
        """`orders` as the worker may see them now, having last seen `delivered`."""
        wanted = orders.restore
        if wanted is None or wanted.url:  # the worker itself reads it from the object store
            self._drop(job)
            return orders
        held = self._here.get(job)
        if held and _same(held[0], wanted) and _seen(held[1]) == held[2]:
            return replace(orders, restore=replace(wanted, path=str(held[1])))
        self._fetch(job, wanted)
        return replace(orders, restore=None, assignment=delivered.assignment)

    def forget(self, job: str) -> None:
        """No worker of it is here any more."""
        self._drop(job)

    def _drop(self, job: str) -> None:
        self._damaged.pop(job, None)
        self._full.pop(job, None)
        self._came.pop(job, None)
        if fetching := self._fetching.pop(job, None):
            fetching[1].cancel()

    def _fetch(self, job: str, wanted: Checkpoint) -> None:
        fetching = self._fetching.get(job)
        if fetching and _same(fetching[0], wanted):
            return
        self._drop(job)
        self._fetching[job] = (wanted, asyncio.create_task(self._bring(job, wanted)))

    async def _bring(self, job: str, wanted: Checkpoint) -> None:
        folder = self._folder(job) / "restore"
        target = folder / f"{wanted.version}-{wanted.digest[:16]}.pt"
        backoff_s, wrong, full_since, here = FIRST_BACKOFF_S, 0, 0.0, 0

        def came(size: int) -> None:
            nonlocal here
            here += size
            self._came[job] = max(here, self._came.get(job, 0))

        while True:
            here = 0
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                await self._transfers.checkpoint(job, wanted.version, wanted.digest, target, came)
                seen = _seen(target)
                break
            except TROUBLE as error:
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
            except DiskFull as error:  # the checkpoint is not to blame
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
                full_since = full_since if job in self._full else time.monotonic()
                self._full[job] = str(error)
                if time.monotonic() - full_since >= FULL_S:
                    self._roomless(job, f"checkpoint {wanted.version} finds no room here: {error}")
                    full_since = time.monotonic()
            except SpotfleetError as error:
                wrong += 1
                log.warning("checkpoint %s of %s: %s; that was try %d", wanted.version, job, error, wrong)
            if wrong == TRIES:
                self._damaged[job] = Damaged(job, wanted.version, wanted.digest)
                self._changed()
            await asyncio.sleep(AGAIN_S if wrong >= TRIES else backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        older = self._here.get(job)
        self._here[job] = (wanted, target, seen or (0, 0))
        self._fetching.pop(job, None)
        for told in (self._damaged, self._full, self._came):
            told.pop(job, None)
        if older and older[1] != target:
            older[1].unlink(missing_ok=True)
        self._changed()


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (one.version, one.digest) == (other.version, other.digest)


def _seen(path: Path) -> Seen | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_size, stat.st_mtime_ns)
