"""Dispatcher daemon: starts and stops the server, the loop and the background tasks."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

from aiohttp import web

from spotfleet.addresses import url
from spotfleet.dispatcher.disk import space, wheel
from spotfleet.dispatcher.disk.files import sweep, sync_names
from spotfleet.dispatcher.dispatcher import Dispatcher
from spotfleet.dispatcher.http.app import make_app
from spotfleet.dispatcher.http.listener import Listener
from spotfleet.dispatcher.journal import Journal
from spotfleet.dispatcher.lifecycle.fleet_clock import FleetClock
from spotfleet.dispatcher.recovery.first_start import begin
from spotfleet.errors import UsageError
from spotfleet.providers import Provider
from spotfleet.transport.boot import DispatcherBoot, server_tls

log = logging.getLogger(__name__)
IDLE_S = 30.0  # a connection without a complete request by then is closed; clients close theirs earlier
PORT_AGAIN_S = 1.0
CLOSE_S = 2.0  # time for open requests at the end


class DispatcherDaemon:
    """Server and tasks of one dispatcher process."""

    def __init__(self, boot: DispatcherBoot, home: Path, provider: Provider) -> None:
        self._boot, self._home, self._provider = boot, home, provider
        self._runner: web.AppRunner | None = None
        self.listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.dispatcher: Dispatcher | None = None
        self.listens = False  # requests reach us; until then `http/failed_start.py` explains a failure

    async def start(self, address: str, port: int) -> str:
        """Listen and start the tasks; return our URL. Waits for a provider that does not answer yet."""
        sweep(self._home)
        sync_names(self._home)
        space.create_ballast(self._home)
        space.create_spares(self._home)
        await asyncio.to_thread(wheel.keep, self._home)
        clock, first = FleetClock(self._home), not (self._home / "begun").exists()
        ledger = await begin(self._boot, self._home, self._provider, clock)
        self.dispatcher = Dispatcher(self._boot, self._home, self._provider, Journal(ledger), clock, first=first)
        self._runner = web.AppRunner(make_app(self.dispatcher, self._admit), access_log=None,
                                     shutdown_timeout=CLOSE_S, keepalive_timeout=IDLE_S, auto_decompress=False)
        await self._runner.setup()
        assert self._runner.server is not None
        self.listener = Listener(self._runner.server, server_tls(self._boot))
        port = await self._listen(self.listener, address, port)
        self.listens = True
        self.dispatcher.core.url = url(address, port)
        self._tasks = [asyncio.create_task(self.dispatcher.run()), asyncio.create_task(self.dispatcher.machines.run()),
                       asyncio.create_task(self.dispatcher.maintenance.run()),
                       asyncio.create_task(self.dispatcher.endpoint_tagger.run()),
                       asyncio.create_task(self.dispatcher.backup.run()),
                       asyncio.create_task(self.dispatcher.history.run()),
                       asyncio.create_task(self.dispatcher.notifier.run()),
                       asyncio.create_task(self.dispatcher.ray.run())]
        log.info("dispatcher of %s listens on %s", self._boot.fleet, self.dispatcher.core.url)
        return self.dispatcher.core.url

    def _admit(self, protocol: object) -> None:
        assert self.listener is not None
        self.listener.admit(protocol)

    @staticmethod
    async def _listen(listener: Listener, address: str, port: int) -> int:
        """Listen, waiting until the port is free: every host knows this one, so another would be useless."""
        logged = False
        while True:
            try:
                return listener.listen(address, port)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise UsageError(f"cannot listen on {address}: no interface of this machine has that address",
                                     hint="name one that it has as `address` of the dispatcher's machine") from error
                if error.errno != errno.EADDRINUSE:
                    raise
            if not logged:
                log.error("port %d of %s is taken by another program: end that program; tried again each %g s", port,
                          address, PORT_AGAIN_S)
            logged = True
            await asyncio.sleep(PORT_AGAIN_S)

    async def wait(self) -> None:
        """Wait until a task fails, and raise its error. The next process reads everything from disk."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.listener is not None:
            await self.listener.close()
        if self._runner is not None:
            await self._runner.cleanup()
        if self.dispatcher is not None:
            await self.dispatcher.ray.close(down=bool(self.dispatcher.shutdown.why))
            await self.dispatcher.core.journal.close()
            self.dispatcher.core.journal.ledger.close()
