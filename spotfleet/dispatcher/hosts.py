"""Views of hosts: the reports of their agents, combined with the ledger's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spotfleet.addresses import unfit
from spotfleet.fleet.domain.state import FleetState, Host
from spotfleet.model import HostState, Notice, Role
from spotfleet.protocol.messages import AgentOrders, AgentReport, GpuReading, StepCost

RESEND_S = 5.0  # unchanged orders are sent again after this: an agent doubts a dispatcher that is silent for 15 s
LAST_WORD_S = 10.0  # how long a notice stays valid after its agent disconnects
DRAIN_S = 120.0  # a drain without a notice should be over by then, unless results still arrive (`lifecycle/unsent.py`)


@dataclass
class AgentConnection:
    """A connection of a host's agent."""

    host: str
    report: AgentReport
    wake: Callable[[], None]
    connected: bool = True
    away_since: float = 0.0  # monotonic, while not connected
    last_report_at: float | None = None  # monotonic: arrival of the newest report
    notice_until: float | None = None  # monotonic
    orders: AgentOrders | None = None
    due: bool = True  # an answer is due
    clock_at: float = 0.0  # monotonic: when the host's clock arrived; 0: not yet
    resend_at: float = 0.0  # monotonic; a report after that is answered even if the orders are unchanged

    def receive(self, report: AgentReport, now: float) -> None:
        self.last_report_at = now
        if report.clock and (report.clock != self.report.clock or not self.clock_at):
            self.clock_at = now
        self.report, self.due = report, self.due or now >= self.resend_at
        notice = report.notice
        self.notice_until = now + notice.seconds_left if notice and notice.kind == "interruption" else None

    def notice(self, now: float) -> Notice | None:
        """Return the current notice, with the seconds left at `now`."""
        notice = self.report.notice
        if notice is None or self.notice_until is None:
            return notice
        return Notice(self.notice_until - now, notice.action, notice.kind, notice.why)

    def valid_notice(self, host: Host | None, now: float) -> Notice | None:
        """Return the current notice if it is about the host's present run. It outlives the connection by LAST_WORD_S.

        A machine that was taken before the notice's time may be back within the second: its agent of before is not
        that of the run in which it is launched again.
        """
        if not self.connected and now - self.away_since >= LAST_WORD_S:
            return None
        if host is not None and host.state is HostState.LAUNCHING and len(host.runs) > 1 and (
                self.report.incarnation == host.incarnation):
            return None
        return self.notice(now)


@dataclass(frozen=True)
class Departure:
    """Planned end of a host."""

    seconds_left: float
    why: str  # "notice" or "drain"


@dataclass(frozen=True)
class HostView:
    """A worker host of the ledger, and the current state of its agent."""

    host: Host
    connected: bool
    slots: int
    leaving: Departure | None = None
    claims: int = 0  # slots that its agent claims, if more than the cloud sold; else 0
    workers: tuple[str, ...] = ()  # processes of any job that its agent reports
    unfit: str = ""  # why its peers cannot reach its advertised address: then it gets no workers
    gpus: tuple[GpuReading, ...] = ()

    @property
    def usable(self) -> bool:
        """True if new workers may be placed here."""
        return self.connected and not self.closed

    @property
    def closed(self) -> bool:
        """True if no new worker may be placed here, connected or not."""
        return self.leaving is not None or not self.host.counts or bool(self.unfit)


def differs(before: AgentReport, after: AgentReport) -> bool:
    """Return whether two reports differ in more than progress, the time and GPUs. These can wait for the next step.
    """
    return _without_progress(before) != _without_progress(after)


def _without_progress(report: AgentReport) -> AgentReport:
    unsent = tuple(replace(u, bytes=0, sent=0) for u in report.unsent or ())
    return replace(report, clock=0.0, gpus=(), unsent=unsent, workers=tuple(
        replace(w, quiet_s=0.0, report=replace(w.report, version=0, step_s=0.0, resumed=0, pause_s=0.0, repeated=0,
                                               recomputed=0, outside=min(w.report.outside, 1), waits=False,
                                               fetched=0, cost=StepCost()))
        for w in report.workers))


def host_views(state: FleetState, connections: dict[str, AgentConnection], drains: dict[str, str], now: float,
               unix: float, dispatcher: str = "") -> list[HostView]:
    """Return a view of every worker host that the ledger does not list as gone. `dispatcher`: our own address."""
    views = []
    for host in state.hosts:
        if host.role is not Role.WORKER:
            continue
        connection = connections.get(host.request_id)
        connected = connection is not None and connection.connected
        claimed = connection.report.slots if connection and connected else host.offer.slots
        slots, claims = min(claimed, host.offer.slots), claimed if claimed > host.offer.slots else 0
        workers = tuple(w.report.worker for w in connection.report.workers) if connection else ()
        unreachable = unfit(connection.report.address, dispatcher) if connection and connected else ""
        views.append(HostView(host, connected, slots, _leaving(host, connection, drains, now, unix), claims, workers,
                              unreachable, connection.report.gpus if connection and connected else ()))
    return views


def _leaving(host: Host, connection: AgentConnection | None, drains: dict[str, str], now: float,
             unix: float) -> Departure | None:
    if connection is not None and connection.notice_until is not None:
        return Departure(max(0.0, connection.notice_until - now), "notice")
    if host.notice_deadline is not None:
        return Departure(max(0.0, host.notice_deadline - unix), "notice")
    if host.state is HostState.DRAINING:
        return Departure(max(0.0, host.since + DRAIN_S - unix), "drain")
    return Departure(DRAIN_S, "drain") if host.request_id in drains else None
