"""Requests about the fleet: status, size, policy, and single hosts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from spotfleet.dispatcher.cloud.machines import HostController
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.lifecycle.shutdown import FleetShutdown
from spotfleet.dispatcher.live.history import HistoryKeeper
from spotfleet.dispatcher.live.notify import Notifier
from spotfleet.dispatcher.policy import PolicyController
from spotfleet.dispatcher.retention import Retention
from spotfleet.dispatcher.status import StatusInput, fleet_status
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import NodesChanged
from spotfleet.model import Nodes, NotifySpec, PolicySpec
from spotfleet.protocol.messages import FleetStatus, JobStatus


class FleetDesk:
    """Handlers of requests about the fleet."""

    def __init__(self, core: Core, machines: HostController, policy: PolicyController, shutdown: FleetShutdown,
                 retention: Retention, remarks: Callable[[], list[str]], history: HistoryKeeper,
                 notifier: Notifier) -> None:
        """`remarks` returns further remarks for users."""
        self._core, self._machines, self._policy, self._remarks = core, machines, policy, remarks
        self.shutdown, self._retention, self.history, self._notifier = shutdown, retention, history, notifier

    async def set_nodes(self, nodes: Nodes, group: str = "") -> None:
        """Change the range of a group. UsageError for one that the fleet does not have."""
        ranges = self._core.ranges
        if group not in ranges:
            raise UsageError(f"group {group!r} is none of this fleet's: {', '.join(ranges) if any(ranges) else 'none'}",
                             hint="name the groups as in the fleet file")
        if nodes != ranges[group]:
            self._core.journal.note(NodesChanged(self._core.unix(), nodes, "asked by `spotfleet up`", group))
            await self._core.journal.flush()
            self._core.tick_soon()

    async def set_policy(self, policy: PolicySpec) -> None:
        await self._policy.set_policy(policy)

    async def set_notify(self, notify: NotifySpec, webhook: str) -> None:
        self._notifier.change(notify, webhook)

    async def drain(self, host: str) -> None:
        self._core.check_host(host)
        await self._core.drain(host, "asked by `spotfleet drain`")

    async def interrupt(self, host: str, notice_s: float | None) -> None:
        self._core.check_host(host)
        await self._machines.interrupt(host, notice_s)

    def go_down(self, *, discard: bool = False) -> None:
        self.shutdown.begin("asked by `spotfleet down`", by_ourselves=False, at=self._core.unix(), discard=discard)

    def job_status(self, job: ManagedJob) -> JobStatus:
        return self.history.with_slow(self._policy.annotated(job, self._core.unix()))

    def status(self) -> FleetStatus:
        core, machines, unix = self._core, self._machines, self._core.unix()
        views = core.views()
        host_jobs = {v.host.request_id: tuple(j.id for j in core.jobs.values() if j.has_worker_on(v.host.request_id))
                     for v in views}
        jobs = tuple(self.history.with_slow(self._policy.annotated(j, unix)) for j in core.jobs.values())
        agents_why = {**core.incompatible, **machines.doing,
                      **{c.host: c.report.why for c in core.connections.values()}}
        inputs = StatusInput(core.boot.fleet, core.journal.state, core.nodes, machines.own, views, agents_why,
                             host_jobs, jobs, self.shutdown.why, machines.why, self._remarks(),
                             core.boot.spec.max_lifetime_s, machines.sizes, core.ranges,
                             machines.slots)
        now, policy = time.monotonic(), self._policy
        return replace(fleet_status(inputs, unix), tick_s=machines.tick_s, policy=policy.status(unix),
                       spent_micros=policy.spent(now), on_demand_spent_micros=policy.spent_on_demand(now),
                       past_jobs=self._retention.count, unsent=core.unsent.status(self.shutdown.patience, now))
