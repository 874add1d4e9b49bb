"""The agent's parts, put together: see ARCHITECTURE.md for what it does, and each module for how."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from pathlib import Path

from spotfleet.agent import disk
from spotfleet.agent.boot import Boot, host_address, metadata_url
from spotfleet.agent.bundles import Bundles, clear_leftovers
from spotfleet.agent.keeper import Around, Keeper, moment, read_life
from spotfleet.agent.link import Link
from spotfleet.agent.notices import NoticeWatch, tag_reader
from spotfleet.agent.orphan import Phase
from spotfleet.agent.ship import CheckpointShipper
from spotfleet.agent.sockets import WorkerSockets
from spotfleet.agent.transfer import Transfers, open_session
from spotfleet.agent.whereabouts import Whereabouts
from spotfleet.agent.worker import Host
from spotfleet.agent.workers import Workers
from spotfleet.agent.zygote_client import ZygoteClient
from spotfleet.messages import AgentOrders, AgentReport
from spotfleet.providers import DISPATCHER_TAG

log = logging.getLogger("spotfleet.agent")

_CLOSE_S = 2.0


class Agent:
    """One agent process: its incarnation is its identity, so that a new one means that the old one's workers ended."""

    def __init__(self, boot: Boot, home: Path) -> None:
        self._boot, self._home = boot, home
        self._incarnation = secrets.token_hex(6)
        self._address = host_address()
        self._session = open_session(boot, self._address)
        where = Whereabouts(boot.dispatcher, tag_reader(boot.provider, metadata_url(), DISPATCHER_TAG))
        transfers = Transfers(self._session, where)
        self._link = Link(self._session, where, self._report, self._receive)
        self._zygote = ZygoteClient(self._link.changed)
        self._notices = NoticeWatch(boot.provider, metadata_url(), self._link.changed)
        self._checkpoints = CheckpointShipper(transfers)
        self._workers = Workers(Host(
            home, transfers, self._zygote, Bundles(home, transfers), self._checkpoints, self._link.changed,
            connected=lambda: self._link.connected and not self._workers.asked,
            socket=lambda: self._sockets.path, address=lambda: self._address))
        self._sockets = WorkerSockets(self._workers, home)
        self._workers.on_orders(self._sockets.push)
        self._keeper = Keeper(boot, home, Around(self._workers, self._link, self._checkpoints, self._notices.notice))

    async def run(self) -> None:
        """Work until SIGTERM, SIGINT or this host's own end. Raises Refused when the dispatcher will not have it."""
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        await self._sockets.start()
        parts = [asyncio.create_task(part.run(), name=type(part).__name__)
                 for part in (self._zygote, self._link, self._sockets, self._checkpoints, self._notices, self._keeper)]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *parts], return_when=asyncio.FIRST_COMPLETED)
            for part in done - {stopped}:
                part.result()  # the keeper alone ends without an error
        finally:
            await self._workers.close(_CLOSE_S)
            for task in (*parts, stopped):
                task.cancel()
            await asyncio.gather(*parts, stopped, return_exceptions=True)
            await self._sockets.close()
            await self._zygote.close(1.0)
            await self._session.close()

    def _report(self, address: str) -> AgentReport:
        self._address = self._address or address
        return AgentReport(
            self._boot.host, self._incarnation, self._address, self._boot.slots, self._workers.states(),
            self._notices.notice(),
            why="; ".join(w for w in (self._zygote.why, self._workers.why(), disk.why(self._home)) if w),
            held=self._workers.held(), damaged=self._workers.damaged())

    def _receive(self, orders: AgentOrders) -> None:
        if orders.host == self._boot.host:
            self._workers.order(orders)


async def serve(boot: Boot, home: Path) -> None:
    if read_life(home, moment()).phase is not Phase.OFF:  # then they are all that is left to be brought away
        clear_leftovers(home)
    await Agent(boot, home).run()
