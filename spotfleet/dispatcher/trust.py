"""Which hosts are believed. A genuine token counts as long as the ledger does not say that its host has ended or that
the token was revoked; a revocation is in the ledger before it is answered, so it outlives this process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from spotfleet.dispatcher.hosts import Seat
from spotfleet.fleet.events import TokenRevoked
from spotfleet.fleet.fold import FleetState
from spotfleet.messages import AgentOrders
from spotfleet.model import CloudState, HostState, Role

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher


def refusal(state: FleetState, host: str) -> str:
    """Why nothing is taken from this host any more; empty while it may go on."""
    known = state.host(host)
    if known is not None and known.revoked:
        return f"the token of {host} was revoked: {known.revoked}"
    if known is not None and known.revived:
        return f"{host} had ended, and the cloud has started it again: it is removed"
    if known is not None and known.state is HostState.GONE and known.cloud is CloudState.TERMINATED:
        return f"{host} has ended; its token is no longer good"
    return ""


def is_believed(dispatcher: Dispatcher, host: str) -> bool:
    """Is it one that lives by the ledger's word, or whose agent has shown itself, and is not refused?"""
    state = dispatcher.journal.state
    known = host in dispatcher.seats or any(h.request_id == host for h in state.hosts)
    return known and not refusal(state, host)


async def revoke(dispatcher: Dispatcher, host: str, why: str) -> None:
    """Take nothing from this host any more, for good. Its workers count as lost; its machine is ended and replaced."""
    known = dispatcher.journal.state.host(host)
    if known is None or known.role is not Role.WORKER:
        dispatcher.check_host(host)
    elif not known.revoked:
        dispatcher.journal.note(TokenRevoked(time.time(), host, why))
        await dispatcher.journal.flush()
    turn_away_refused(dispatcher)
    for job in dispatcher.jobs.values():
        job.crew.lose(host)
    dispatcher.machines.poke()
    dispatcher.change()


def turn_away_refused(dispatcher: Dispatcher) -> None:
    """Let the connections of refused hosts say why, and end."""
    state = dispatcher.journal.state
    marked = {h.request_id for h in state.hosts if h.revoked or h.revived}
    suspects = [s for s in dispatcher.seats.values() if s.connected and (s.host in marked or s.host in state.ended)]
    for seat in suspects:
        if why := refusal(state, seat.host):
            _turn_away(dispatcher, seat, why)


def _turn_away(dispatcher: Dispatcher, seat: Seat, why: str) -> None:
    seat.orders, seat.due = AgentOrders(seat.host, refuse=why), False
    dispatcher.disconnect(seat)
    seat.wake()
