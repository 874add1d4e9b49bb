"""Shared state of the dispatcher: boot data, files on disk, connections and jobs.

One event loop owns all of it, so it needs no locks. Each part of the dispatcher takes a `Core`, plus only the values
and functions that it calls; no part can be reached from here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.addresses import host_of
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.hosts import AgentConnection, HostView, host_views
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.journal import Journal
from spotfleet.dispatcher.lifecycle.clock import MonotonicClock
from spotfleet.dispatcher.lifecycle.fleet_clock import FleetClock
from spotfleet.dispatcher.lifecycle.unsent import UnsentTracker
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import HostDraining
from spotfleet.model import Nodes, PolicySpec
from spotfleet.protocol.messages import AgentReport
from spotfleet.protocol.ray_cluster import RayState
from spotfleet.transport.boot import DispatcherBoot


class NotFound(SpotfleetError):
    """Lookup of a name that does not exist here."""


@dataclass
class Core:
    """State that the parts of the dispatcher share."""

    boot: DispatcherBoot
    home: Path
    journal: Journal
    jobs: dict[str, ManagedJob]
    fleet_clock: FleetClock  # the trusted time
    clock: MonotonicClock  # the fleet's age, and the time since its last job
    damage: DamagedFiles
    settle_until: float = 0.0  # monotonic: wait until then for hosts from before a restart; 0: settled
    url: str = ""  # our listening address, set before machines are launched
    connections: dict[str, AgentConnection] = field(default_factory=dict)  # by host
    drains: dict[str, str] = field(default_factory=dict)  # host -> why
    incompatible: dict[str, str] = field(default_factory=dict)  # hosts with another protocol -> the conflict
    step_due: asyncio.Event = field(default_factory=asyncio.Event)
    tick_due: asyncio.Event = field(default_factory=asyncio.Event)
    unsent: UnsentTracker = field(default_factory=UnsentTracker)  # results that hosts still hold
    ray_state: RayState | None = None  # the newest of the fleet's Ray cluster; None: there is none

    def unix(self) -> float:
        """Return the Unix time for money, limits and events: no wrong wall clock moves it."""
        return self.fleet_clock.unix()

    def step_soon(self) -> None:
        """Request a step of the loop soon, after a change."""
        self.step_due.set()

    def wake(self) -> None:
        """Request both soon: a step of the loop and a tick of the machines."""
        self.tick_soon()
        self.step_soon()

    def tick_soon(self) -> None:
        """Request a tick of the machines at once."""
        self.tick_due.set()

    @property
    def settled(self) -> bool:
        """True once the hosts from before a restart have reported or the wait for them has ended."""
        return self.settle_until == 0.0

    @property
    def nodes(self) -> Nodes:
        return self.journal.state.nodes or self.boot.spec.nodes

    @property
    def ranges(self) -> dict[str, Nodes]:
        """The range of each group of hosts, in the order of the fleet file; "" names the group of a fleet without."""
        groups, changed = self.boot.spec.groups, self.journal.state.groups
        return {g.name: changed.get(g.name, g.nodes) for g in groups} or {"": self.nodes}

    @property
    def policy(self) -> PolicySpec:
        return self.journal.state.history.policy or self.boot.spec.policy

    @property
    def archive_folder(self) -> Path:
        return Path(self.boot.archive) if self.boot.archive else self.home / "archive"

    def goes_on(self, job: str) -> bool:
        """Return whether the job runs on, so that the loss of a host's checkpoint is no loss of results."""
        return job in self.jobs and not (self.jobs[job].state.ended or self.jobs[job].record.cancelled)

    def record_losses(self) -> None:
        """Record the results that ended with hosts or agents before they arrived."""
        self.journal.note(*self.unsent.forget(self.journal.state.ended, self.goes_on, self.unix()))

    # ---- hosts

    def views(self) -> list[HostView]:
        return host_views(self.journal.state, self.connections, self.drains, time.monotonic(), self.unix(),
                          host_of(self.url))

    def check_host(self, host: str) -> None:
        """Raise NotFound unless `host` is a host of this fleet now."""
        names = [v.host.request_id for v in self.views()]
        if host not in names:
            raise NotFound(f"no host {host!r}", hint=f"hosts of this fleet: {', '.join(names) or 'none now'}")

    async def drain(self, host: str, why: str) -> None:
        """Drain a host. The ledger has that once this returns: a restarted dispatcher goes on with it."""
        known = self.journal.state.host(host)
        try:
            if known is not None and known.counts:
                self.journal.note(HostDraining(self.unix(), host, why))
                await self.journal.flush()
        finally:  # also on a full disk, which the drain may relieve
            self.drains[host] = why
            self.wake()

    def is_connected(self, host: str) -> bool:
        return host in self.connections and self.connections[host].connected

    def connect(self, report: AgentReport, wake: Callable[[], None]) -> AgentConnection:
        """Add a connection of a host's agent; it replaces an older one."""
        connection = AgentConnection(report.host, report, wake)
        before = self.connections.get(report.host)
        self.connections[report.host] = connection
        if before is not None and before.connected:
            before.connected = False
            before.wake()
        self.tick_soon()
        return connection

    def disconnect(self, connection: AgentConnection) -> None:
        """Record the end of a connection; the end of a replaced one has no effect."""
        if self.connections.get(connection.host) is not connection:
            return
        connection.connected, connection.away_since = False, time.monotonic()
        self.unsent.mark_away(connection.host, connection.away_since)
        for job in self.jobs.values():
            job.workers.mark_silent(connection.host, connection.last_report_at)
        self.wake()  # the tick finds out if the cloud lists the host as ended


def clock_of(journal: Journal, jobs: Iterable[ManagedJob], time_now: FleetClock) -> MonotonicClock:
    """Create the clock of a process that begins now."""
    unix, created = time_now.unix(), journal.state.created
    ends = [j.record.ended_at for j in jobs if j.state.ended]
    ends += [taken.at] if (taken := journal.state.taken_over) else []  # a takeover counts as use of the fleet
    return MonotonicClock(unix, time_now.passed(), created.at if created else unix, max(ends, default=0.0))
