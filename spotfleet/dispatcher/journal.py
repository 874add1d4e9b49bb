"""The ledger as the loop sees it: written in a thread, in the order of `note`. Only what follows from it is in memory:
a fleet of a thousand hosts writes a hundred thousand events a day.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from spotfleet.dispatcher.bell import Bell
from spotfleet.errors import DiskFull
from spotfleet.fleet.events import Event
from spotfleet.fleet.fold import FleetState
from spotfleet.fleet.ledger import Ledger

log = logging.getLogger(__name__)
AGAIN_S = 1.0
LOOK_S = 0.05


class Journal:
    """One thread writes, so that a slow disk never blocks the loop. The reconciler writes to the same ledger.

    While the disk is full what was noted waits in memory and is tried again each AGAIN_S; `full` says so.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.bell = Bell()  # rings when the ledger has grown
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._last, self.state = self._read()
        self.full: DiskFull | None = None
        self._noted: list[Event] = []
        self._writer: asyncio.Task[None] | None = None

    def note(self, *events: Event) -> None:
        """Have `events` written soon."""
        self._noted.extend(events)
        if self._noted and (self._writer is None or self._writer.done()):
            self.check()
            self._writer = asyncio.create_task(self._write())

    def check(self) -> None:
        """Raise what the last writing raised: without its ledger a dispatcher must not go on."""
        if self._writer is not None and self._writer.done() and self._writer.exception():
            raise self._writer.exception()  # type: ignore[misc]

    async def flush(self) -> None:
        """Return when everything noted is on disk and in `state`. Raises DiskFull as long as that cannot be."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait([self._writer], timeout=LOOK_S)
            if self.full is not None:
                raise self.full
        self.check()
        await self.catch_up()

    async def catch_up(self) -> None:
        """See what others, such as the reconciler, have written."""
        last, state = await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        if last > self._last:
            self._last, self.state = last, state
            self.bell.ring()

    def after(self, seq: int) -> list[tuple[int, Event]]:
        """All events above `seq`. For the start of a process: it waits for the disk."""
        return self.ledger.events(seq)

    async def page(self, seq: int, limit: int) -> list[tuple[int, Event]]:
        """The next `limit` events above `seq`; [], without a wait in which one could be missed, if there is none."""
        if seq >= self._last:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.ledger.events, seq, limit)

    async def close(self) -> None:
        try:
            await self.flush()
        except DiskFull as error:
            log.error("%d events are lost with this process: %s", len(self._noted), error)
            assert self._writer is not None
            self._writer.cancel()
            await asyncio.wait([self._writer])
        self._thread.shutdown()

    async def _write(self) -> None:
        while self._noted:
            batch, self._noted = self._noted, []
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self.ledger.append, *batch)
            except DiskFull as error:
                self._noted = [*batch, *self._noted]
                self._tell(error)
                await asyncio.sleep(AGAIN_S)
                continue
            self._tell(None)
            await self.catch_up()

    def _tell(self, error: DiskFull | None) -> None:
        if (error is None) != (self.full is None):
            log.warning("%s", "the ledger can be written again" if error is None else f"{error}; tried again")
        self.full = error

    def _read(self) -> tuple[int, FleetState]:
        last = self.ledger.append()  # of nothing: only the newest number, read first so that the state is no older
        return last, self.ledger.state()
