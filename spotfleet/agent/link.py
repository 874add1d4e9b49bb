"""Long-lived connection to the dispatcher: sends reports, receives orders, reconnects without limit.

    away --connect (backoff 50 ms .. 2 s)--> connected --EOF, TCP keepalive, silence--> away
                                                 '-- refused --> AgentRefused

Workers train on while the dispatcher is away. A dispatcher that does not know our token counts as away: it is another
fleet's, or has only just taken over; `orphan.py` limits how long that may last.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import aiohttp

from spotfleet.agent.endpoint import DispatcherEndpoint
from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, RETRYABLE
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import AgentOrders, AgentReport, dump, load
from spotfleet.retry import Backoff

log = logging.getLogger("spotfleet.agent")

PERIOD_S = 1.0
_CONNECT_S = 10.0
_SILENCE_S = 15.0  # orders are repeated each 5 s: a live dispatcher is never silent for this long
_UNKNOWN_TOKEN = 4401  # close code
_ORDER_BYTES = 16 << 20


class AgentRefused(SpotfleetError):
    """The dispatcher's refusal of this agent."""


class DispatcherLink:
    """Connection loop of the agent; `connected` and `orders_received` show its state."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: DispatcherEndpoint,
                 report: Callable[[str], AgentReport], receive: Callable[[AgentOrders], None]) -> None:
        self._session = session
        self._endpoint = endpoint
        self._report = report  # its argument is the local address of the connection
        self._receive = receive
        self._changed = asyncio.Event()
        self.connected = False
        self.orders_received = 0  # number of orders received

    def changed(self) -> None:
        """Send a report at once."""
        self._changed.set()

    async def run(self) -> None:
        """Stay connected until cancelled. Raises AgentRefused."""
        backoff, logged = Backoff(FIRST_BACKOFF_S, LAST_BACKOFF_S), set[str]()
        while True:
            try:
                if await self._once():
                    backoff.reset()
                    logged.clear()
            except RETRYABLE as error:
                if (problem := str(error) or type(error).__name__) not in logged:
                    log.warning("dispatcher: %s; trying again", problem)
                logged.add(problem)
            if await self._endpoint.failed():
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _once(self) -> bool:
        """Run one connection to its end; return whether it brought orders."""
        url = self._endpoint.next()
        async with asyncio.timeout(_CONNECT_S):
            ws = await self._session.ws_connect(url + "/v1/agent", autoping=False, heartbeat=None,
                                                max_msg_size=_ORDER_BYTES)
        sock, name = ws.get_extra_info("socket"), ws.get_extra_info("sockname")
        if sock is None or not name:
            raise aiohttp.ClientConnectionError("closed as soon as it was open")
        notice_dead_peer(sock)
        sender = asyncio.create_task(self._send(ws, name[0]))
        try:
            return await self._listen(ws, url)
        finally:
            self.connected = False
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await ws.close()

    async def _listen(self, ws: aiohttp.ClientWebSocketResponse, url: str) -> bool:
        while True:
            message = await ws.receive(timeout=_SILENCE_S)
            if message.type is aiohttp.WSMsgType.PING:
                await ws.pong(message.data)
                continue
            if message.type is not aiohttp.WSMsgType.TEXT:
                if ws.close_code == _UNKNOWN_TOKEN:
                    raise aiohttp.ClientConnectionError(f"closed with {_UNKNOWN_TOKEN}: {message.extra}")
                log.warning("dispatcher: connection ended")
                return self.connected
            try:
                orders = load(AgentOrders, message.data)
            except ValueError as error:
                log.error("dispatcher sent orders that do not fit: %s", error)
                continue
            if orders.refuse:
                raise AgentRefused(f"the dispatcher refuses this agent: {orders.refuse}")
            self.orders_received += 1
            if not self.connected:
                log.info("connected to %s", url)
                self._endpoint.answered(url)
                self.connected = True
            self._receive(orders)

    async def _send(self, ws: aiohttp.ClientWebSocketResponse, address: str) -> None:
        while True:
            self._changed.clear()
            await ws.send_str(dump(self._report(address)))
            try:
                async with asyncio.timeout(PERIOD_S):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._changed.wait()
            except TimeoutError:
                pass


def notice_dead_peer(sock: socket.socket) -> None:
    """Set the TCP options by which the kernel reports a vanished dispatcher within about 3 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 2000),
                          ("TCP_NODELAY", 1)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
