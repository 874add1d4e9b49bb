"""The agents' WebSocket: a report in, the newest orders out, at once when either changes.

A connection belongs to one agent process. Its end is all that is learnt from EOF: the machine may be gone or only its
agent may restart; the provider's listing or the next incarnation tells which.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket

from aiohttp import WSMsgType, web

from spotfleet.dispatcher import misfits
from spotfleet.dispatcher.auth import bearer, host_token
from spotfleet.dispatcher.keys import DISPATCHER, WORKER_NAME
from spotfleet.dispatcher.state import Dispatcher
from spotfleet.messages import AgentOrders, AgentReport, dump, load
from spotfleet.versions import agent_differs, ours

log = logging.getLogger(__name__)

REPORT_BYTES = 4 << 20
FIRST_REPORT_S = 10.0  # a caller that does not say who it is by then is closed
SEND_S = 10.0  # a peer that reads nothing for so long is closed
DEAD_PEER_MS = 2000


async def agent_socket(request: web.Request) -> web.WebSocketResponse:
    dispatcher = request.app[DISPATCHER]
    notice_dead_peers(request)
    ws = web.WebSocketResponse(autoping=True, heartbeat=None, max_msg_size=REPORT_BYTES)
    await ws.prepare(request)
    first = await _first_report(ws, dispatcher, bearer(request.headers.get("Authorization", "")))
    if first is None:
        await ws.close(code=4401, message=b"token and host do not fit")
        return ws
    refusal = refuse(first, dispatcher)
    if refusal:
        await ws.send_str(dump(AgentOrders(first.host, refuse=refusal)))
        await ws.close()
        return ws
    await _serve(ws, dispatcher, first)
    return ws


def refuse(report: AgentReport, dispatcher: Dispatcher) -> str:
    """Why this agent must not go on; empty when it may."""
    if why := agent_differs(report.protocol, ours()):
        misfits.give_back(dispatcher, report.host, why)
        return why
    return dispatcher.refusal(report.host)


def notice_dead_peers(request: web.Request) -> None:
    """A vanished machine shows within about 3 s, without heartbeats that a busy interpreter could miss."""
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


async def _first_report(ws: web.WebSocketResponse, dispatcher: Dispatcher, token: str) -> AgentReport | None:
    """The first report, if the token is that of the host it names. A new host may not be in the ledger's mirror yet."""
    try:
        message = await ws.receive(timeout=FIRST_REPORT_S)
        report = _report(message)
    except (TimeoutError, ValueError):
        return None
    expected = host_token(dispatcher.boot.fleet_secret, report.host) if report else ""
    return report if report and hmac.compare_digest(token.encode(), expected.encode()) else None


def _report(message) -> AgentReport | None:
    """None at the end of the connection; ValueError for a text that is no report of a host about its own workers."""
    if message.type is not WSMsgType.TEXT:
        return None
    report = load(AgentReport, message.data)
    for name in (w.report.worker for w in report.workers):
        if not WORKER_NAME.fullmatch(name) or name.partition("/")[0] != report.host:
            raise ValueError(f"AgentReport.workers: {name!r} is no worker of {report.host}")
    return report


async def _serve(ws: web.WebSocketResponse, dispatcher: Dispatcher, first: AgentReport) -> None:
    wake = asyncio.Event()
    seat = dispatcher.connect(first, wake.set)
    sender = asyncio.create_task(_send_orders(ws, dispatcher, first.host, wake))
    try:
        report: AgentReport | None = first
        while report is not None and report.host == first.host:
            dispatcher.receive(seat, report)
            report = _report(await ws.receive())
    except ValueError as error:
        log.warning("%s: unreadable report: %s", first.host, error)
    finally:
        sender.cancel()
        dispatcher.disconnect(seat)
        await asyncio.gather(sender, return_exceptions=True)
    await ws.close()


async def _send_orders(ws: web.WebSocketResponse, dispatcher: Dispatcher, host: str, wake: asyncio.Event) -> None:
    """Only the newest orders matter, so whatever changes while one is being sent is sent as one."""
    while not ws.closed:
        wake.clear()
        orders = dispatcher.orders(host)
        if orders is not None:
            try:
                async with asyncio.timeout(SEND_S):
                    await ws.send_str(dump(orders))
            except (TimeoutError, ConnectionError):
                await ws.close()
                return
        await wake.wait()
