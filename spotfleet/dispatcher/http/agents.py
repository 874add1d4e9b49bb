"""WebSocket of the agents: receives reports and sends the newest orders, each at once when it changes.

A connection belongs to one agent process. EOF means only that the connection ended: the machine may be gone, or its
agent may restart. The provider's listing or the next incarnation of the agent shows which.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from aiohttp import WSMsgType, web

from spotfleet.addresses import is_number, plain
from spotfleet.dispatcher import reports
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.hosts import AgentConnection
from spotfleet.dispatcher.http import version_check
from spotfleet.dispatcher.http.requests import ADMIT, CORE, RECEIVE, bearer_of
from spotfleet.dispatcher.http.revocation import rejection
from spotfleet.protocol.messages import AgentOrders, AgentReport, dump
from spotfleet.protocol.versions import agent_differs, own_version

log = logging.getLogger(__name__)

REPORT_BYTES = 4 << 20
FIRST_REPORT_S = 10.0  # a caller without a valid report by then is disconnected
UNFIT = 4401  # close code
SEND_S = 10.0  # a peer that reads nothing for this time is disconnected
DEAD_PEER_MS = 2000


async def agent_socket(request: web.Request) -> web.WebSocketResponse:
    core = request.app[CORE]
    notice_dead_peers(request)
    ws = web.WebSocketResponse(autoping=True, heartbeat=None, max_msg_size=REPORT_BYTES)
    await ws.prepare(request)
    caller = bearer_of(request)
    first = await _first_report(ws, caller.host if caller else "")
    if first is None:
        await ws.close(code=UNFIT, message=b"token and host do not fit")
        return ws
    if why := refuse(first, core):
        await ws.send_str(dump(AgentOrders(first.host, refuse=why)))
        await ws.close()
        return ws
    request.app[ADMIT](request.protocol)  # also of a host that was not listed when it connected
    await _serve(ws, core, request.app[RECEIVE], first)
    return ws


def refuse(report: AgentReport, core: Core) -> str:
    """Return why this agent must stop; empty when it may continue."""
    if why := agent_differs(report.protocol, own_version()):
        version_check.replace_host(core, report.host, why)
        return why
    return rejection(core.journal.state, report.host)


def notice_dead_peers(request: web.Request) -> None:
    """Set socket options so that the kernel detects a vanished machine within about 3 s. A busy interpreter could miss
    heartbeats."""
    sock = request.transport.get_extra_info("socket") if request.transport else None
    if sock is None:
        return
    for level, option, value in (
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1), (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 1), (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", DEAD_PEER_MS), (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    ):
        if hasattr(socket, option):
            sock.setsockopt(level, getattr(socket, option), value)


async def _first_report(ws: web.WebSocketResponse, host: str) -> AgentReport | None:
    """Receive the first report; None unless it is about `host`, whose token opened the connection."""
    try:
        report = _report(await ws.receive(timeout=FIRST_REPORT_S))
    except (TimeoutError, ValueError) as error:
        log.warning("%s: no report to begin with: %s", host, str(error) or type(error).__name__)
        return None
    return report if report is not None and report.host == host else None


def _report(message) -> AgentReport | None:
    """Parse a message; None at the end of the connection, ValueError for text that is not a report."""
    return reports.read(message.data) if message.type is WSMsgType.TEXT else None


async def _serve(ws: web.WebSocketResponse, core: Core, receive: Callable[[AgentConnection, AgentReport], None],
                 first: AgentReport) -> None:
    wake = asyncio.Event()
    connection = core.connect(first, wake.set)
    _log_two_addresses(core, first)
    sender = asyncio.create_task(_send_orders(ws, connection, wake))
    try:
        report: AgentReport | None = first
        text: object = None
        while report is not None and report.host == first.host and connection.connected:
            receive(connection, report)
            message = await ws.receive()
            if message.data != text:  # most reports of an idle host repeat the previous one exactly
                report, text = _report(message), message.data
    except ValueError as error:
        log.warning("%s: unreadable report: %s", first.host, error)
    finally:
        if not (connection.orders and connection.orders.refuse):  # else the sender still has to send the refusal
            sender.cancel()
        core.disconnect(connection)
        await asyncio.gather(sender, return_exceptions=True)
    await ws.close()


def _log_two_addresses(core: Core, report: AgentReport) -> None:
    """Log when the advertised address (for peers) differs from the listed one (for people and the cloud)."""
    host = core.journal.state.host(report.host)
    listed = plain(host.address) if host is not None and is_number(host.address) else ""
    if listed and is_number(report.address) and report.address != listed:
        log.info("%s is listed at %s; to its peers it is %s, the source address of its route to us, or as it was told",
                 report.host, listed, report.address)


async def _send_orders(ws: web.WebSocketResponse, connection: AgentConnection, wake: asyncio.Event) -> None:
    """Send the newest orders; changes during a transmission are combined into the next one. Close the connection when
    a newer one of its host has replaced it, or when its host is refused and the refusal has been sent."""
    while not ws.closed:
        wake.clear()
        orders = connection.orders
        if orders is not None and (connection.connected or orders.refuse):
            try:
                async with asyncio.timeout(SEND_S):
                    await ws.send_str(dump(orders))
            except (TimeoutError, ConnectionError):
                break
        if not connection.connected:
            break
        await wake.wait()
    await ws.close()
