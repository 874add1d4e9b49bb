"""The one long-lived connection to the dispatcher: reports up, orders down, reconnected for ever.

    away --connect (backoff 50 ms .. 2 s)--> connected --EOF, TCP keepalive, silence--> away
                                                 '-- refused --> Refused

Workers do not notice: they train on while the dispatcher is away. One that does not know our token counts as away: it
is not ours, or not yet; `orphan.py` says how long that may last.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import aiohttp

from spotfleet.agent.transfer import FIRST_BACKOFF_S, LAST_BACKOFF_S, TROUBLE
from spotfleet.agent.whereabouts import Whereabouts
from spotfleet.errors import SpotfleetError
from spotfleet.messages import AgentOrders, AgentReport, dump, load

log = logging.getLogger("spotfleet.agent")

PERIOD_S = 1.0
_CONNECT_S = 10.0
_SILENCE_S = 15.0  # orders are repeated each 5 s: a dispatcher that is alive does not say nothing for so long
_UNKNOWN_TOKEN = 4401  # close code
_ORDER_BYTES = 16 << 20


class Refused(SpotfleetError):
    """The dispatcher will not have this agent."""


class Link:
    def __init__(self, session: aiohttp.ClientSession, where: Whereabouts, report: Callable[[str], AgentReport],
                 receive: Callable[[AgentOrders], None]) -> None:
        self._session = session
        self._where = where
        self._report = report  # of the local address of the connection
        self._receive = receive
        self._changed = asyncio.Event()
        self.connected = False
        self.heard = 0  # how many times a dispatcher has given orders

    def changed(self) -> None:
        """Report at once."""
        self._changed.set()

    async def run(self) -> None:
        """Stay connected until cancelled. Raises Refused."""
        backoff_s, told = FIRST_BACKOFF_S, set[str]()
        while True:
            try:
                if await self._once():
                    backoff_s, told = FIRST_BACKOFF_S, set()
            except TROUBLE as error:
                if (said := str(error) or type(error).__name__) not in told:
                    log.warning("dispatcher: %s; trying again", said)
                told.add(said)
            if await self._where.failed():
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _once(self) -> bool:
        """One connection, from its beginning to its end; whether the dispatcher has given orders on it."""
        place = self._where.next()
        async with asyncio.timeout(_CONNECT_S):
            ws = await self._session.ws_connect(place + "/v1/agent", autoping=False, heartbeat=None,
                                                max_msg_size=_ORDER_BYTES)
        sock, name = ws.get_extra_info("socket"), ws.get_extra_info("sockname")
        if sock is None or not name:
            raise aiohttp.ClientConnectionError("closed as soon as it was open")
        notice_dead_peer(sock)
        sender = asyncio.create_task(self._send(ws, name[0]))
        try:
            return await self._listen(ws, place)
        finally:
            self.connected = False
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await ws.close()

    async def _listen(self, ws: aiohttp.ClientWebSocketResponse, place: str) -> bool:
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
                raise Refused(f"the dispatcher refuses this agent: {orders.refuse}")
            self.heard += 1
            if not self.connected:
                log.info("connected to %s", place)
                self._where.answered(place)
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
    """A vanished dispatcher shows within about 3 s, from the kernel alone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 2000),
                          ("TCP_NODELAY", 1)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
