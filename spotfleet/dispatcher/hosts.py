"""The hosts as the loop sees them: what their agents say, beside what the ledger knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spotfleet.addresses import unfit
from spotfleet.fleet.fold import FleetState, Host
from spotfleet.messages import AgentOrders, AgentReport, StepCost
from spotfleet.model import HostState, Notice, Role

SAY_AGAIN_S = 5.0  # orders go out when they change, and again after this: an agent doubts a dispatcher silent for 15 s
DRAIN_S = 120.0  # a drain without a notice should be over by then; `fleet/plan.py` ends the host


@dataclass
class Seat:
    """One connection of a host's agent."""

    host: str
    report: AgentReport
    wake: Callable[[], None]
    connected: bool = True
    away_since: float = 0.0  # monotonic, while not connected
    heard_at: float | None = None  # monotonic: the newest report
    notice_until: float | None = None  # monotonic
    orders: AgentOrders | None = None
    due: bool = True  # an answer is owed
    say_again_at: float = 0.0  # monotonic; a report after that is owed an answer though the orders are as before

    def hear(self, report: AgentReport, now: float) -> None:
        self.heard_at = now
        self.report, self.due = report, self.due or now >= self.say_again_at
        notice = report.notice
        self.notice_until = now + notice.seconds_left if notice and notice.kind == "interruption" else None

    def notice(self, now: float) -> Notice | None:
        """The notice in force with the seconds left now."""
        notice = self.report.notice
        if notice is None or self.notice_until is None:
            return notice
        return Notice(self.notice_until - now, notice.action, notice.kind, notice.why)


@dataclass(frozen=True)
class Leaving:
    """A host that will go."""

    seconds_left: float
    why: str  # "notice" or "drain"


@dataclass(frozen=True)
class HostView:
    """One worker host of the ledger with what is known of its agent now."""

    host: Host
    connected: bool
    slots: int
    leaving: Leaving | None = None
    claims: int = 0  # slots that its agent claims, where they are more than the cloud sold
    workers: tuple[str, ...] = ()  # processes that its agent reports, of any job
    unfit: str = ""  # why its peers cannot reach it at the address that it advertises: nothing is placed on it then

    @property
    def usable(self) -> bool:
        """May new workers be placed here?"""
        return self.connected and not self.closed

    @property
    def closed(self) -> bool:
        """Must no new worker be placed here, whether it is connected or not?"""
        return self.leaving is not None or not self.host.counts or bool(self.unfit)


def differs(before: AgentReport, after: AgentReport) -> bool:
    """Does `after` say more than how far training has come? That much can wait for the next step."""
    return _without_progress(before) != _without_progress(after)


def _without_progress(report: AgentReport) -> AgentReport:
    return replace(report, workers=tuple(
        replace(w, quiet_s=0.0, report=replace(w.report, version=0, step_s=0.0, resumed=0, pause_s=0.0, repeated=0,
                                               waits=False, fetched=0, cost=StepCost()))
        for w in report.workers))


def look(state: FleetState, seats: dict[str, Seat], drains: dict[str, str], now: float, unix: float,
         dispatcher: str = "") -> list[HostView]:
    """Every worker host that the ledger does not list as gone. `dispatcher`: our own address."""
    views = []
    for host in state.hosts:
        if host.role is not Role.WORKER:
            continue
        seat = seats.get(host.request_id)
        connected = seat is not None and seat.connected
        said = seat.report.slots if seat and connected else host.offer.slots
        slots, claims = min(said, host.offer.slots), said if said > host.offer.slots else 0
        workers = tuple(w.report.worker for w in seat.report.workers) if seat else ()
        unreachable = unfit(seat.report.address, dispatcher) if seat and connected else ""
        views.append(HostView(host, connected, slots, _leaving(host, seat, drains, now, unix), claims, workers,
                              unreachable))
    return views


def _leaving(host: Host, seat: Seat | None, drains: dict[str, str], now: float, unix: float) -> Leaving | None:
    if seat is not None and seat.notice_until is not None:
        return Leaving(max(0.0, seat.notice_until - now), "notice")
    if host.notice_deadline is not None:
        return Leaving(max(0.0, host.notice_deadline - unix), "notice")
    if host.state is HostState.DRAINING:
        return Leaving(max(0.0, host.since + DRAIN_S - unix), "drain")
    return Leaving(DRAIN_S, "drain") if host.request_id in drains else None
