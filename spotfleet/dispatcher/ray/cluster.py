"""Ray cluster of the fleet: its job, the head beside this process, drains, and the newest state.

A job of kind "ray" holds hosts like any other, and its process on each of them is a raylet. So the schedule gives no
host to Ray and to another job at the same time, and the head runs only while there is such a job.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spotfleet.addresses import host_of, joined
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.hosts import Departure, HostView
from spotfleet.dispatcher.jobs.context import RayView
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.ray.drivers import DriverDesk
from spotfleet.dispatcher.ray.head import HeadLink
from spotfleet.dispatcher.ray.leaving import LeavingHost, LeavingHosts, kept
from spotfleet.dispatcher.ray.trials import TrialLog
from spotfleet.dispatcher.signal import wait_set
from spotfleet.errors import NoCapacity, UsageError
from spotfleet.fleet.planner.demand import CONFIRM_S
from spotfleet.model import RAY_KIND, JobSpec, RaySpec
from spotfleet.plugins import Machines
from spotfleet.protocol.ray_cluster import (
    CPUS,
    GCS_PORT,
    GPUS,
    HEAD_AT,
    HOST,
    STORE,
    TOKEN,
    VERSIONS,
    RayDrain,
    RayReport,
    RayState,
    RayStatus,
    RayWish,
)
from spotfleet.providers.plugin import traits_of
from spotfleet.words import counted

PERIOD_S = 0.5
AFTER_S = 0.05  # the step that takes a report comes so much later than the report, at most


@dataclass(frozen=True)
class _Wanted:
    job: str = ""
    token: str = field(default="", repr=False)
    address: str = ""


class RayCluster:
    """The fleet's Ray cluster, if it has one."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._due = asyncio.Event()
        self._head = HeadLink(core.home / "ray.log", self._reported,
                              clouds=traits_of(core.boot.spec).machines is not Machines.HERE)
        self.drivers = DriverDesk(core)
        self.trials = TrialLog()
        self._leaving = LeavingHosts()
        self._leave: list[LeavingHost] = []
        self._drains: tuple[RayDrain, ...] = ()
        self._releases: frozenset[str] = frozenset()  # hosts that were asked for in the last step
        self._asked: set[str] = set()  # the same in this step
        self._wanted = _Wanted()
        self._was_up = False
        self.view = RayView()

    # ---- the job

    def prepared(self, spec: JobSpec) -> JobSpec:
        """Return the spec of a new job as it is kept. Raises UsageError for a second cluster."""
        if spec.kind != RAY_KIND:
            return spec
        if (job := self._job()) is not None:
            raise UsageError(f"Ray runs on this fleet already: job {job.id}",
                             hint="`spotfleet ray status` shows it, `spotfleet ray stop` ends it")
        if not self._core.settled:
            raise NoCapacity("the dispatcher has just started, and waits for its hosts", hint="try again in a moment")
        return replace(spec, envs={**spec.envs, HEAD_AT: self._address()})

    def _address(self) -> str:
        """Choose where the head listens: the same for as long as the job lasts."""
        host, port = host_of(self._core.url), self._ray.port
        if not port and host.startswith("127."):  # fleets on this machine share its ports
            with socket.socket() as probe:
                probe.bind((host, 0))
                port = probe.getsockname()[1]
        return joined(host, port or GCS_PORT)

    @property
    def _ray(self) -> RaySpec:
        return self._core.boot.spec.ray or RaySpec()

    def _job(self) -> ManagedJob | None:
        """Return the job that holds hosts for Ray."""
        return next((j for j in self._core.jobs.values() if j.spec.kind == RAY_KIND and not j.state.ended), None)

    def last(self) -> str:
        """Return the job of the cluster that runs, or else of the one that ran last; "" for none."""
        found = [j for j in self._core.jobs.values() if j.spec.kind == RAY_KIND]
        newest = max(found, key=lambda j: (not j.state.ended, j.record.submitted_at), default=None)
        return newest.id if newest is not None else ""

    def envs(self, job: ManagedJob, host: str) -> dict[str, str] | None:
        """Return the variables of this host's raylet; None while the head's versions are not known."""
        view = next((v for v in self._core.views() if v.host.request_id == host), None)
        report = self._head.report
        if report is None or view is None or HEAD_AT not in job.spec.envs:
            return None
        found = {HEAD_AT: job.spec.envs[HEAD_AT], HOST: host, STORE: str(self._ray.object_store),
                 VERSIONS: f"{report.ray} {report.python}",
                 GPUS: str(view.slots if view.host.offer.accelerator else 0)}
        if traits_of(self._core.boot.spec).machines is Machines.HERE:  # its hosts share this machine
            found |= {CPUS: str(view.slots), STORE: str(self._ray.object_store / max(1, self._core.nodes.max))}
        return found

    # ---- a step of the loop

    def look(self, views: Mapping[str, HostView], assigned: Mapping[str, tuple[str, ...]], now: float) -> None:
        """Take what the loop knows now, before the jobs' steps."""
        job = self._job()
        departures = _departures(job, views, assigned) if job is not None else {}
        self._leave = self._leaving.update(departures, now)
        wanted = _Wanted()
        if job is not None and not job.record.cancelled and job.secrets.get(TOKEN) and HEAD_AT in job.spec.envs:
            wanted = _Wanted(job.id, job.secrets[TOKEN], job.spec.envs[HEAD_AT])
        if wanted != self._wanted or {h.host for h in self._leave} != {d.host for d in self._drains}:
            self._due.set()
        if self._releases != self._asked:
            self._due.set()
        self._releases, self._asked = frozenset(self._asked), set()
        self._wanted, self._drains = wanted, tuple(h.drain for h in self._leave)
        self._core.journal.note(*self.trials.changes(wanted.job, self._core.ray_state, self._core.unix()))
        self.view = self._view()

    def release(self, host: str) -> bool:
        """Ask Ray to end the node of a host if nothing runs there; return whether it has accepted that. Called in each
        step until then, or until the host is needed again."""
        state = self._core.ray_state
        if state is None or not state.up:
            return False
        if any(n.host == host and not n.draining for n in state.nodes):
            self._asked.add(host)
            return False
        return True

    def _wish(self) -> RayWish:
        return RayWish(self._drains, tuple(sorted(self._releases)), self.drivers.wanted(self._wanted.job))

    def _view(self) -> RayView:
        state = self._core.ray_state
        up = state is not None and state.up
        self._was_up = (self._was_up or up) and bool(self._wanted.job)
        report = self._head.report
        if up and state is not None:
            nodes = [n for n in state.nodes if n.host]
            draining = sum(n.draining for n in nodes)
            leave = f", {draining} of them draining" if draining else ""
            return RayView(True, f"Ray runs on {counted(len(nodes), 'host')}{leave}", kept(self._leave, state))
        problem = (state.problem if state is not None else "") or self._head.problem or "the head starts"
        again = f"; the head was started {report.starts} times" if report is not None and report.starts > 1 else ""
        return RayView(False, f"Ray: {problem}{again}", lost=self._was_up)

    def soon(self) -> None:
        """Send what is wanted to the head soon."""
        self._due.set()

    def _reported(self) -> None:
        """Take the head's newest report."""
        report = self._head.report
        before = self._core.ray_state
        self._core.ray_state = report.state if report is not None and self._wanted.job else (
            RayState(False, problem=self._head.problem) if self._wanted.job else None)
        after = self._core.ray_state
        if before is None or after is None or _news(before) != _news(after):
            self._core.step_soon()
            # The step in which a demand that lasts begins to count.
            asyncio.get_running_loop().call_later(CONFIRM_S + AFTER_S, self._core.step_soon)

    # ---- the head

    async def run(self) -> None:
        """Keep the head as it is wanted, until cancelled."""
        while True:
            self._due.clear()
            if self._wanted.job:
                await self._head.match(self._wanted.token, self._wanted.address, self._wish())
            elif self._head.active:
                if self._job() is None:
                    await self._head.clear()
                else:
                    await self._head.end()  # its raylets end meanwhile, and the rest follows with the job's end
                self._core.ray_state = None
            await wait_set(self._due, PERIOD_S)

    async def close(self, *, down: bool) -> None:
        """End with the dispatcher's process. `down`: the fleet ends; else the head goes on for the next process."""
        if down:
            await self._head.clear()
        else:
            self._head.forget()

    # ---- status

    def status(self) -> RayStatus:
        """Return the body of GET /v1/ray."""
        job = self._job()
        if job is None:
            return RayStatus(drivers=self.drivers.status(self.last()))
        report: RayReport | None = self._head.report
        held = tuple(sorted(job.workers.hosts()))
        return RayStatus(job.id, job.record.cancelled or job.record.why, job.spec.envs.get(HEAD_AT, ""), report,
                         self._head.problem if report is None else "", self.drivers.status(job.id), held)


def _departures(job: ManagedJob, views: Mapping[str, HostView],
                assigned: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[Departure, bool]]:
    """Return the departures of hosts with a raylet that leave, or that the schedule takes from the job."""
    found: dict[str, tuple[Departure, bool]] = {}
    held = assigned.get(job.id, ())
    for host in job.workers.hosts():
        view = views.get(host)
        if view is not None and view.leaving is not None:
            found[host] = (view.leaving, False)
        elif host not in held:
            found[host] = (Departure(float("inf"), "drain"), True)
    return found


def _news(state: RayState) -> tuple:
    """Return what the loop reacts to."""
    return (state.up, state.problem, tuple((n.host, n.draining) for n in state.nodes), state.pending, state.gangs,
            state.constraints, state.trials)
