"""Checkpoints on their way in: a worker that must restore gets its assignment only when the file lies here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, TROUBLE, Transfers
from spotfleet.errors import SpotfleetError
from spotfleet.messages import Checkpoint, WorkerOrders

log = logging.getLogger("spotfleet.agent")


class Restores:
    """One file per job, shared by the job's workers on this host.

        wanted --fetch, again with backoff--> here       freed by a newer `restore`, or by none
    """

    def __init__(self, transfers: Transfers, folder: Callable[[str], Path], changed: Callable[[], None]) -> None:
        self._transfers = transfers
        self._folder = folder
        self._changed = changed
        self._fetching: dict[str, tuple[Checkpoint, asyncio.Task[None]]] = {}
        self._here: dict[str, tuple[Checkpoint, Path]] = {}

    def why(self, job: str) -> str:
        wanted = self._fetching.get(job)
        return f"fetching checkpoint {wanted[0].version}" if wanted else ""

    def resolve(self, job: str, orders: WorkerOrders, delivered: WorkerOrders) -> WorkerOrders:
        """`orders` as the worker may see them now, having last seen `delivered`."""
        wanted = orders.restore
        if wanted is None:
            self._drop(job)
            return orders
        held = self._here.get(job)
        if held and (held[0].version, held[0].digest) == (wanted.version, wanted.digest):
            return replace(orders, restore=replace(wanted, path=str(held[1])))
        self._fetch(job, wanted)
        return replace(orders, restore=None, assignment=delivered.assignment)

    def _drop(self, job: str) -> None:
        if fetching := self._fetching.pop(job, None):
            fetching[1].cancel()

    def _fetch(self, job: str, wanted: Checkpoint) -> None:
        fetching = self._fetching.get(job)
        if fetching and (fetching[0].version, fetching[0].digest) == (wanted.version, wanted.digest):
            return
        self._drop(job)
        self._fetching[job] = (wanted, asyncio.create_task(self._bring(job, wanted)))

    async def _bring(self, job: str, wanted: Checkpoint) -> None:
        folder = self._folder(job) / "restore"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        target = folder / f"{wanted.version}-{wanted.digest[:16]}.pt"
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._transfers.checkpoint(job, wanted.version, wanted.digest, target)
                break
            except (SpotfleetError, *TROUBLE) as error:
                log.warning("checkpoint %s of %s: %s; trying again", wanted.version, job, error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
        older = self._here.get(job)
        self._here[job] = (wanted, target)
        self._fetching.pop(job, None)
        if older and older[1] != target:
            older[1].unlink(missing_ok=True)
        self._changed()
