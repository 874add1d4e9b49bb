"""The agents' WebSocket: a report in, the newest orders out, at once when either changes.

A connection belongs to one agent process. Its end is all that is learnt from EOF: the machine may be gone or only its
agent may restart; the provider's listing or the next incarnation tells which.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import WSMsgType, web

from spotfleet.addresses import is_number, plain
from spotfleet.dispatcher import misfits, reports
from spotfleet.dispatcher.hosts import Seat
from spotfleet.dispatcher.keys import DISPATCHER, bearer_of
from spotfleet.dispatcher.state import Dispatcher
from spotfleet.dispatcher.trust import refusal
from spotfleet.messages import AgentOrders, AgentReport, dump
from spotfleet.versions import agent_differs, ours

log = logging.getLogger(__name__)

REPORT_BYTES = 4 << 20
FIRST_REPORT_S = 10.0  # a caller that does not say who it is by then is closed
UNFIT = 4401  # close code
SEND_S = 10.0  # a peer that reads nothing for so long is closed
DEAD_PEER_MS = 2000


async def agent_socket(request: web.Request) -> web.WebSocketResponse:
    dispatcher = request.app[DISPATCHER]
    notice_dead_peers(request)
    ws = web.WebSocketResponse(autoping=True, heartbeat=None, max_msg_size=REPORT_BYTES)
    await ws.prepare(request)
    caller = bearer_of(request)
    first = await _first_report(ws, caller.host if caller else "")
    if first is None:
        await ws.close(code=UNFIT, message=b"token and host do not fit")
        return ws
    if why := refuse(first, dispatcher):
        await ws.send_str(dump(AgentOrders(first.host, refuse=why)))
        await ws.close()
        return ws
    await _serve(ws, dispatcher, first)
    return ws


def refuse(report: AgentReport, dispatcher: Dispatcher) -> str:
    """Why this agent must not go on; empty when it may."""
    if why := agent_differs(report.protocol, ours()):
        misfits.give_back(dispatcher, report.host, why)
        return why
    return refusal(dispatcher.journal.state, report.host)


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


async def _first_report(ws: web.WebSocketResponse, host: str) -> AgentReport | None:
    """The first report, if it is about `host`, whose token opened the connection."""
    try:
        report = _report(await ws.receive(timeout=FIRST_REPORT_S))
    except (TimeoutError, ValueError) as error:
        log.warning("%s: no report to begin with: %s", host, str(error) or type(error).__name__)
        return None
    return report if report is not None and report.host == host else None


def _report(message) -> AgentReport | None:
    """None at the end of the connection; ValueError for a text that is no report."""
    return reports.read(message.data) if message.type is WSMsgType.TEXT else None


async def _serve(ws: web.WebSocketResponse, dispatcher: Dispatcher, first: AgentReport) -> None:
    wake = asyncio.Event()
    seat = dispatcher.connect(first, wake.set)
    _tell_of_two_addresses(dispatcher, first)
    sender = asyncio.create_task(_send_orders(ws, dispatcher, seat, wake))
    try:
        report: AgentReport | None = first
        text: object = None
        while report is not None and report.host == first.host and seat.connected:
            dispatcher.receive(seat, report)
            message = await ws.receive()
            if message.data != text:  # most reports of an idle host are those of a second ago, to the letter
                report, text = _report(message), message.data
    except ValueError as error:
        log.warning("%s: unreadable report: %s", first.host, error)
    finally:
        if not (seat.orders and seat.orders.refuse):  # which is still to be said
            sender.cancel()
        dispatcher.disconnect(seat)
        await asyncio.gather(sender, return_exceptions=True)
    await ws.close()


def _tell_of_two_addresses(dispatcher: Dispatcher, report: AgentReport) -> None:
    """Its peers reach a host at the one that it advertises, people and the cloud at the one that is listed."""
    host = dispatcher.journal.state.host(report.host)
    listed = plain(host.address) if host is not None and is_number(host.address) else ""
    if listed and is_number(report.address) and report.address != listed:
        log.info("%s is listed at %s; to its peers it is %s, the source address of its route to us, or as it was told",
                 report.host, listed, report.address)


async def _send_orders(ws: web.WebSocketResponse, dispatcher: Dispatcher, seat: Seat, wake: asyncio.Event) -> None:
    """Only the newest orders matter, so whatever changes while one is being sent is sent as one. Ends a connection that
    a newer one of its host has replaced, and one whose host is refused, once that is said."""
    while not ws.closed:
        wake.clear()
        orders = seat.orders
        if orders is not None and (seat.connected or orders.refuse):
            try:
                async with asyncio.timeout(SEND_S):
                    await ws.send_str(dump(orders))
            except (TimeoutError, ConnectionError):
                break
        if not seat.connected:
            break
        await wake.wait()
    await ws.close()
