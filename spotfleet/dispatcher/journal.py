"""Journal: asynchronous access of the loop to the ledger. A thread writes the events in the order of `note`.

Only the state folded from the events is in memory: a fleet of a thousand hosts writes a hundred thousand events a day.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from spotfleet.dispatcher.signal import Signal
from spotfleet.errors import DiskFull
from spotfleet.fleet.domain.events import Event
from spotfleet.fleet.domain.state import FleetState
from spotfleet.fleet.ledger import Ledger

log = logging.getLogger(__name__)
AGAIN_S = 1.0
POLL_S = 0.05


class Journal:
    """Writer and reader of the ledger for the loop.

    One thread writes, so that a slow disk never blocks the loop. The reconciler writes to the same ledger. While the
    disk is full, noted events wait in memory, are tried again each AGAIN_S, and `full` holds the error.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.signal = Signal()  # notified when the ledger has grown
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._last, self.state = self._read()
        self.full: DiskFull | None = None
        self._noted: list[Event] = []
        self._writer: asyncio.Task[None] | None = None

    @property
    def last(self) -> int:
        """Number of the newest event in `state`."""
        return self._last

    def note(self, *events: Event) -> None:
        """Queue `events` to be written soon."""
        self._noted.extend(events)
        if self._noted and (self._writer is None or self._writer.done()):
            self.check()
            self._writer = asyncio.create_task(self._write())

    def check(self) -> None:
        """Raise the error of the last write: a dispatcher must not continue without its ledger."""
        if self._writer is not None and self._writer.done() and self._writer.exception():
            raise self._writer.exception()  # type: ignore[misc]

    async def flush(self) -> None:
        """Return when everything noted is on disk and in `state`. Raises DiskFull while the disk is full."""
        while self._writer is not None and not self._writer.done():
            await asyncio.wait([self._writer], timeout=POLL_S)
            if self.full is not None:
                raise self.full
        self.check()
        await self.catch_up()

    async def catch_up(self) -> None:
        """Update `state` with events of other writers, such as the reconciler."""
        last, state = await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
        if last > self._last:
            self._last, self.state = last, state
            self.signal.notify()

    def after(self, seq: int) -> list[tuple[int, Event]]:
        """Return all events above `seq`. Blocks on the disk."""
        return self.ledger.events(seq)

    def each(self) -> Iterator[Event]:
        """Yield all events. Blocks on the disk: only for the start of a process."""
        return (event for _, event in self.ledger.each())

    async def page(self, seq: int, limit: int) -> list[tuple[int, Event]]:
        """Return the next `limit` events above `seq`. Return [] at once, without an await that
        could miss one, if there is none."""
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
                self._set_full(error)
                await asyncio.sleep(AGAIN_S)
                continue
            self._set_full(None)
            await self.catch_up()

    def _set_full(self, error: DiskFull | None) -> None:
        if (error is None) != (self.full is None):
            log.warning("%s", "the ledger can be written again" if error is None else f"{error}; tried again")
        self.full = error

    def _read(self) -> tuple[int, FleetState]:
        last = self.ledger.append()  # returns the newest number; read first, so that the state is no older
        return last, self.ledger.state()
