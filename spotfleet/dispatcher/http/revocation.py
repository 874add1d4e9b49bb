"""Token revocation. A genuine token is accepted until its host has ended or the token is revoked.

A revocation is in the ledger before the request is answered, so it outlives this process.
"""

from __future__ import annotations

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.hosts import AgentConnection
from spotfleet.fleet.domain.events import TokenRevoked
from spotfleet.fleet.domain.state import FleetState
from spotfleet.model import CloudState, HostState, Role
from spotfleet.protocol.messages import AgentOrders


def rejection(state: FleetState, host: str) -> str:
    """Return why this host is refused; empty while it may continue."""
    known = state.host(host)
    if known is not None and known.revoked:
        return f"the token of {host} was revoked: {known.revoked}"
    if known is not None and known.revived:
        return f"{host} had ended, and the cloud has started it again: it is removed"
    if known is not None and known.state is HostState.GONE and known.cloud is CloudState.TERMINATED:
        return f"{host} has ended; its token is no longer good"
    return ""


def is_trusted(core: Core, host: str) -> bool:
    """Return whether the host is live in the ledger, or its agent has connected, and it is not refused."""
    state = core.journal.state
    known = host in core.connections or any(h.request_id == host for h in state.hosts)
    return known and not rejection(state, host)


async def revoke(core: Core, host: str, why: str) -> None:
    """Refuse this host permanently. Its workers count as lost; its machine is ended and replaced."""
    known = core.journal.state.host(host)
    if known is None or known.role is not Role.WORKER:
        core.check_host(host)
    elif not known.revoked:
        core.journal.note(TokenRevoked(core.unix(), host, why))
        await core.journal.flush()
    disconnect_rejected(core)
    for job in core.jobs.values():
        job.workers.lose(host)
    core.wake()


def disconnect_rejected(core: Core) -> None:
    """Send refused hosts the reason, and close their connections."""
    state = core.journal.state
    marked = {h.request_id for h in state.hosts if h.revoked or h.revived}
    suspects = [s for s in core.connections.values() if s.connected and (s.host in marked or s.host in state.ended)]
    for connection in suspects:
        if why := rejection(state, connection.host):
            _disconnect(core, connection, why)


def _disconnect(core: Core, connection: AgentConnection, why: str) -> None:
    connection.orders, connection.due = AgentOrders(connection.host, refuse=why), False
    core.disconnect(connection)
    connection.wake()
