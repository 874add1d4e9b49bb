"""Which events are notified, and with what text. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from spotfleet.fleet.domain.events import BudgetReached, Event, HostListed, HostNoticed, JobChanged
from spotfleet.model import JobState
from spotfleet.words import harmless

JOBS = {JobState.FAILED: "failed", JobState.SUCCEEDED: "succeeded"}
TEXT_CHARS = 2000
MOST_HOSTS = 10_000  # whose notices are remembered


@dataclass(frozen=True)
class Notification:
    event: str  # one of model.NOTIFY_ON
    text: str  # one line, for people
    fleet: str
    subject: str  # the host or job; "" for the fleet
    at: float  # Unix: the event's


class NotificationReader:
    """Reader of a ledger's events in their order; each host that is taken is notified once, with or without notice."""

    def __init__(self, fleet: str, on: tuple[str, ...]) -> None:
        self._fleet, self._on = fleet, on
        self._told: dict[str, int] = {}  # host -> ends of its runs that have been notified
        self._taken: dict[str, int] = {}  # host -> runs that the cloud ended

    def take(self, event: Event) -> Notification | None:
        """Return the notification that the event deserves, if any."""
        match event:
            case HostNoticed(notice="interruption"):
                return self._noticed(event)
            case HostListed():
                return self._listed(event)
            case JobChanged(state=state) if state in JOBS:
                end = "has failed" if state is JobState.FAILED else "has succeeded"
                step = f" at step {event.version}" if event.version else ""
                return self._made(JOBS[state], event.at, event.job, f"job {event.job} {end}{step}", event.why)
            case BudgetReached():
                return self._made("budget", event.at, "", f"{event.percent} % of {event.limit}", event.why)
        return None

    def _noticed(self, event: HostNoticed) -> Notification | None:
        host = event.request_id
        self._told[host] = self._taken.get(host, 0) + 1
        self._forget()
        end = {"terminate": "terminated", "stop": "stopped"}.get(event.action, f"subject to {event.action}")
        return self._made("preempted", event.at, host,
                          f"host {host} is preempted: it will be {end} in {event.seconds_left:.0f} s", event.why)

    def _listed(self, event: HostListed) -> Notification | None:
        host, taken = event.request_id, sum(run.taken for run in event.runs)
        if taken <= self._taken.get(host, 0):
            return None
        self._taken[host] = taken
        if taken <= self._told.get(host, 0):
            return None
        self._told[host] = taken
        self._forget()
        return self._made("preempted", event.at, host, f"host {host} was preempted without a notice", event.why)

    def _forget(self) -> None:
        for known in (self._told, self._taken):
            while len(known) > MOST_HOSTS:
                del known[next(iter(known))]

    def _made(self, on: str, at: float, subject: str, what: str, why: str) -> Notification | None:
        if on not in self._on:
            return None
        text = harmless(f"spotfleet {self._fleet}: {what}" + (f": {why}" if why else ""))
        return Notification(on, text[:TEXT_CHARS], self._fleet, subject, at)
