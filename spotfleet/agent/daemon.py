"""Agent process: creates the agent's components, connects them and runs them. ARCHITECTURE.md describes its tasks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from pathlib import Path

from spotfleet.agent import disk
from spotfleet.agent.address import AdvertisedAddress
from spotfleet.agent.boot import AgentBoot, host_address, local_source, metadata_url
from spotfleet.agent.containers.host_containers import ContainerHost, Containers
from spotfleet.agent.endpoint import DispatcherEndpoint
from spotfleet.agent.files.bundles import Bundles, clear_leftovers
from spotfleet.agent.files.setup import Setups
from spotfleet.agent.files.uploads import CheckpointShipper
from spotfleet.agent.gpus import GpuWatch
from spotfleet.agent.link import DispatcherLink
from spotfleet.agent.notices import NoticeWatch, tag_reader
from spotfleet.agent.policy.orphan import OrphanPhase
from spotfleet.agent.processes.zygote_client import ZygoteClient
from spotfleet.agent.shutdown.controller import ShutdownController, ShutdownDeps, moment, read_life
from spotfleet.agent.stages import BootClock
from spotfleet.agent.target_copies import TargetCopies
from spotfleet.agent.transfer import Transfers, open_session
from spotfleet.agent.workers.sockets import WorkerSockets
from spotfleet.agent.workers.supervisor import Workers
from spotfleet.agent.workers.worker import HostContext
from spotfleet.protocol.messages import AgentOrders, AgentReport
from spotfleet.providers import DISPATCHER_TAG

log = logging.getLogger("spotfleet.agent")

_CLOSE_S = 2.0


class Agent:
    """One agent process. A new incarnation name implies that the workers of the earlier one have ended."""

    def __init__(self, boot: AgentBoot, home: Path) -> None:
        self._boot, self._home = boot, home
        self._incarnation = secrets.token_hex(6)
        self._advertised = AdvertisedAddress(host_address())
        self._source = local_source(host_address(), boot.dispatcher)
        self._session = open_session(boot, self._source, keep=False)
        self._clock_wanted = False  # by the dispatcher
        self._renewing: set[asyncio.Task[None]] = set()
        endpoint = DispatcherEndpoint(boot.dispatcher, tag_reader(boot.provider, metadata_url(), DISPATCHER_TAG))
        self._target = TargetCopies(boot)
        self._transfers = transfers = Transfers(open_session(boot, self._source), endpoint, self._target)
        self._link = DispatcherLink(self._session, endpoint, self._report, self._receive)
        self._zygote = ZygoteClient(self._link.changed)
        self._notices = NoticeWatch(boot.provider, metadata_url(), self._link.changed)
        self._gpus = GpuWatch()
        self._checkpoints = CheckpointShipper(transfers)
        self._booting = BootClock(home)
        self._containers = Containers(ContainerHost(boot, home, self._zygote, lambda: Path(self._sockets.path).parent,
                                                    self._link.changed))
        self._workers = Workers(HostContext(
            home, transfers, self._zygote, Bundles(home, transfers), Setups(transfers),
            self._checkpoints, self._link.changed,
            noticed=lambda: self._notices.notice() is not None,
            connected=lambda: self._link.connected and not self._workers.asked,
            socket=lambda: self._sockets.path, address=lambda: self._advertised.address, slots=boot.slots,
            containers=self._containers))
        self._sockets = WorkerSockets(self._workers, home)
        self._workers.on_orders(self._sockets.push)
        self._shutdown = ShutdownController(boot, home,
                                          ShutdownDeps(self._workers, self._link, self._checkpoints,
                                                       self._notices.notice))

    async def run(self) -> None:
        """Run until SIGTERM, SIGINT or the host's shutdown. Raises AgentRefused when the dispatcher refuses it."""
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        await self._sockets.start()
        components = (self._zygote, self._link, self._sockets, self._checkpoints, self._notices, self._shutdown,
                      self._gpus, self._containers, self._target)
        parts = [asyncio.create_task(part.run(), name=type(part).__name__) for part in components]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *parts], return_when=asyncio.FIRST_COMPLETED)
            for part in done - {stopped}:
                part.result()  # only the shutdown controller ends without an error
        finally:
            await self._workers.close(_CLOSE_S)
            await self._containers.close()
            for task in (*parts, stopped):
                task.cancel()
            await asyncio.gather(*parts, stopped, return_exceptions=True)
            await self._sockets.close()
            await self._zygote.close(1.0)
            await asyncio.gather(*self._renewing, self._transfers.close(), self._session.close())

    def _report(self, address: str) -> AgentReport:
        before, address = self._advertised.address, self._advertised.connected(address)
        if before and address != before:
            self._move()
        waits = (self._advertised.why, self._zygote.why, self._workers.why(), disk.why(self._home))
        return AgentReport(
            self._boot.host, self._incarnation, address, self._boot.slots, self._workers.states(),
            self._notices.notice(),
            why="; ".join(filter(None, waits)),
            held=self._workers.held(), damaged=self._workers.damaged(),
            clock=round(time.time(), 1) if self._clock_wanted else 0.0,
            unsent=self._workers.unsent() + self._checkpoints.unsent(self._shutdown.is_stored),
            boot=self._booting.stages(connected=self._link.orders_received > 0), gpus=self._gpus.readings,
            target=self._target.probe)

    def _move(self) -> None:
        """Apply the host's new address: push orders to the workers, and open a new session."""
        self._workers.moved()
        renewing = asyncio.create_task(self._transfers.renew(open_session(self._boot, self._source)))
        self._renewing.add(renewing)
        renewing.add_done_callback(self._renewing.discard)

    def _receive(self, orders: AgentOrders) -> None:
        if orders.host == self._boot.host:
            self._clock_wanted = orders.clock
            self._workers.order(orders)


async def serve(boot: AgentBoot, home: Path) -> None:
    if read_life(home, moment()).phase is not OrphanPhase.OFF:  # when OFF, the leftovers are still to be stored
        clear_leftovers(home)
    await Agent(boot, home).run()
