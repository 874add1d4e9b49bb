"""Loop of the dispatcher. One event loop owns all of its state (`core.py`), so it needs no locks.

    step      after every report or request, and each STEP_S: schedule, membership, jobs, orders. Never blocks.
    machines  each TICK_S, and at once when a host changed: one `fleet.reconcile.tick` in its own thread.

After a restart this process reads the jobs from disk. It orders, launches and ends nothing until every running host has
reported or SETTLE_S have passed; training continues meanwhile. Damaged files are set aside (`disk/damage.py`).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from spotfleet.dispatcher.agent_orders import OrderSender
from spotfleet.dispatcher.checkpoints.backup import Backup
from spotfleet.dispatcher.checkpoints.ledger_restore import machine_number
from spotfleet.dispatcher.checkpoints.maintenance import CheckpointMaintenance
from spotfleet.dispatcher.checkpoints.replica import Replica
from spotfleet.dispatcher.cloud.dispatcher_cost import DispatcherCost
from spotfleet.dispatcher.cloud.endpoint_tag import EndpointTagger
from spotfleet.dispatcher.cloud.machines import HostController, Policy
from spotfleet.dispatcher.core import Core, clock_of
from spotfleet.dispatcher.demand import DemandController
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.dispatcher.fleet_desk import FleetDesk
from spotfleet.dispatcher.hosts import AgentConnection, HostView, differs
from spotfleet.dispatcher.http.revocation import disconnect_rejected
from spotfleet.dispatcher.jobs import restart
from spotfleet.dispatcher.jobs.desk import JobDesk, WorkerNames, load_job, unwritten
from spotfleet.dispatcher.jobs.job import SAVE_S, JobContext, ManagedJob
from spotfleet.dispatcher.journal import Journal
from spotfleet.dispatcher.lifecycle import lifetime
from spotfleet.dispatcher.lifecycle.fleet_clock import FleetClock
from spotfleet.dispatcher.lifecycle.health import HealthRemarks
from spotfleet.dispatcher.lifecycle.shutdown import FleetShutdown
from spotfleet.dispatcher.lifecycle.unsent import UnsentTracker
from spotfleet.dispatcher.live.history import HistoryKeeper
from spotfleet.dispatcher.live.notify import Notifier
from spotfleet.dispatcher.policy import PolicyController
from spotfleet.dispatcher.ray.cluster import RayCluster
from spotfleet.dispatcher.recovery.job_adoption import ended_in
from spotfleet.dispatcher.recovery.lost_jobs import find_jobs, names_in, workers_in
from spotfleet.dispatcher.recovery.takeover import Takeover, adopts
from spotfleet.dispatcher.retention import Retention
from spotfleet.dispatcher.signal import wait_set
from spotfleet.fleet.domain.events import (
    DownDecided,
    FileDamaged,
    GenerationFormed,
    HistoryLost,
    HostDraining,
    JobChanged,
    JobsPruned,
    JobSubmitted,
    ScriptsRan,
    TakenOver,
    TrialHeld,
)
from spotfleet.fleet.domain.state import failing
from spotfleet.membership.schedule import Allocation, HostRoom
from spotfleet.model import RAY_KIND, CloudState, HostState
from spotfleet.protocol.messages import AgentReport
from spotfleet.providers import Provider
from spotfleet.providers.plugin import traits_of
from spotfleet.transport.boot import DispatcherBoot

STEP_S = 0.25
REST = 3.0  # the pause after a step, in durations of that step: leaves time for reports and orders of a large fleet
SETTLE_S = 15.0
ASK_S = 60.0  # the same, while agents are asked for jobs or secrets that this disk has lost
# The kinds from which a start takes anything that `FleetState` lacks. The others make up most of a long ledger.
READ_AT_START = (JobSubmitted, JobChanged, GenerationFormed, ScriptsRan, TrialHeld, JobsPruned, DownDecided,
                 HostDraining, TakenOver, HistoryLost, FileDamaged)
SILENCE_S = 3.0  # an agent that is disconnected for less keeps its host's place in the schedule


class Dispatcher:
    """The loop, and the only place that connects the parts; no part refers to it."""

    def __init__(self, boot: DispatcherBoot, home: Path, provider: Provider, journal: Journal, clock: FleetClock, *,
                 first: bool) -> None:
        """`first`: no earlier start was completed on this disk."""
        damage = DamagedFiles(home, clock.unix)
        takes_over = adopts(journal.state.taken_over, clock.unix())
        past = [event for event in journal.each() if isinstance(event, READ_AT_START)]
        stored, lost = find_jobs(home, past, damage, takes_over=takes_over)
        machine = machine_number(boot.host)
        used = jobfile.highest_start(jobfile.workers_in(stored) | workers_in(past), machine)
        known = names_in(home, past)
        names = WorkerNames(machine, jobfile.next_boot(home, used, damage, first=first or not known))
        jobs = {j.id: j for j in (load_job(boot, job, names) for job in stored)}
        self.core = core = Core(boot, home, journal, jobs, clock, clock_of(journal, jobs.values(), clock), damage)
        core.unsent = UnsentTracker(boot.spec.checkpoint.folder)
        asks = (bool(lost) and not takes_over) or any(job.secrets_lost for job in jobs.values())
        core.settle_until = time.monotonic() + (ASK_S if asks else SETTLE_S) if self._has_past() else 0.0
        keep_s = traits_of(boot.spec).keeps_results_s
        self.shutdown = FleetShutdown(home, keep_s, core.wake, core.unix, note=journal.note)
        self.shutdown.load(past, damage)
        self.dispatcher_cost = DispatcherCost(boot.fleet, boot.host)
        self.policy = policy = PolicyController(core, self.dispatcher_cost, self.shutdown)
        self.endpoint_tagger = EndpointTagger(core, provider)
        calls = Policy(policy.divide, policy.offers_due, policy.read_offers, policy.enforce_budget)
        self.machines = HostController(core, provider, calls, self.shutdown, self.dispatcher_cost,
                                       self.endpoint_tagger.launched)
        bundles = BundleStore(home, damage)
        replica = Replica(boot) if boot.spec.checkpoint.folder else None
        self.retention = Retention(core, lambda folder: load_job(boot, jobfile.load_ended(folder), names),
                                   lambda job: replica is not None and replica.lacks(job.id, job.checkpoints))
        self.desk = JobDesk(core, names, bundles, policy, self.shutdown, self.retention, lambda: self.machines.waits)
        self.desk.last_known = max(map(jobfile.number_of, known), default=0)
        self.ray = RayCluster(core)
        self.ray.trials.load(past)
        self.desk.prepared = self.ray.prepared
        self.demand = DemandController(core, self.machines, self.ray.release)
        self.maintenance = CheckpointMaintenance(core.jobs.values, replica, core.step_soon, self.desk.checkpoint_kept)
        self.takeover, self.backup = Takeover(core, self.desk, lost), Backup(core, bundles)
        if takes_over:
            self.retention.left.update(ended_in(journal.each()), jobfile.past(home))
            self.takeover.adoption.ended = self.retention.left
        self._order_sender = OrderSender(core, self.takeover, self._stuck)
        self._health = HealthRemarks(core, self.machines.stays, past)
        self._unwritten = unwritten(past, core.jobs.values())
        self.history, self.notifier = HistoryKeeper(core), Notifier(core)
        self.fleet_desk = FleetDesk(core, self.machines, policy, self.shutdown, self.retention, self._remarks,
                                    self.history, self.notifier)

    def _remarks(self) -> list[str]:
        """Return further remarks for users."""
        return [*self._health.lines(), *self.core.unsent.lines(self.shutdown.patience, time.monotonic()),
                *self.takeover.remarks, *self.demand.lines(),
                *(line for line in failing(self.core.journal.state, self.core.unix()).values()
                  if line not in self.machines.waits),
                *filter(None, (self.core.fleet_clock.why, self.endpoint_tagger.why, self.backup.why,
                          self.notifier.why))]

    def _stuck(self) -> frozenset[str]:
        """Return the hosts that are to copy their results to the checkpoint target: nobody is there to make room."""
        decision = self.shutdown.decision
        if decision is None or not decision.by_ourselves or not self.core.boot.spec.checkpoint.folder:
            return frozenset()
        return self.core.unsent.stuck(self.shutdown.patience, time.monotonic())

    def receive(self, connection: AgentConnection, report: AgentReport) -> None:
        """Process an agent's report; the next step answers it. A late report on a replaced connection is dropped: it
        is stale, and would report workers as lost that were started since."""
        if self.core.connections.get(connection.host) is not connection or not connection.connected:
            return
        noticed, news = report.notice != connection.report.notice, differs(connection.report, report)
        connection.receive(report, time.monotonic())
        if report.host not in self.core.journal.state.ended:
            self.core.unsent.receive(report, lambda job: self.desk.was_given(job, report.host), time.monotonic())
        self.takeover.receive(report)
        if self.core.settled:
            for job in self.core.jobs.values():
                job.receive(report, time.monotonic())
        if noticed:
            self.core.tick_soon()
        if news:
            self.core.step_soon()

    # ---- loop

    async def run(self) -> None:
        """Step until cancelled. An error ends the process: a restart from disk is safer than continuing."""
        journal = self.core.journal
        journal.note(*self._unwritten)
        while True:
            self.core.step_due.clear()
            journal.check()
            began = time.monotonic()
            self.step()
            await asyncio.sleep(REST * (time.monotonic() - began))
            await wait_set(self.core.step_due, STEP_S)

    def step(self) -> None:
        """Update jobs and orders with everything known now."""
        core = self.core
        core.journal.note(*self._health.observe(core.damage.take_news()))
        self.shutdown.save()
        if not core.settled:
            self.takeover.ask()
            self._try_to_settle()
        if not core.settled:
            return
        now, unix = time.monotonic(), core.unix()
        views = {v.host.request_id: v for v in core.views()}
        self._forget_hosts(views)
        self.takeover.adopt(views)
        live = [j for j in core.jobs.values() if not j.state.ended]
        self._end_if_due(live, unix)
        rooms = [HostRoom(name, v.slots, v.closed, self._is_ready(name, v, now), v.host.group)
                 for name, v in views.items() if v.host.state is not HostState.STOPPED]
        self.desk.allocate([j for j in live if not j.record.cancelled], rooms, now)
        holders: dict[str, set[str]] = {}  # host -> the jobs with processes there
        for job in core.jobs.values():
            for host in job.workers.hosts():
                holders.setdefault(host, set()).add(job.id)
        self.ray.look(views, self.desk.allocation.held, now)
        for job in core.jobs.values():
            core.journal.note(*job.step(self._context(job, views, holders, now, unix)))
            core.drains.update({h: why for h, why in restart.unfit(job.history, now).items() if h in views})
        disconnect_rejected(core)
        self._order_sender.send()
        self.demand.step()
        self.machines.note_workers(views)
        if not self.shutdown.why:
            self.retention.step(unix)

    def _is_ready(self, host: str, view: HostView, now: float) -> bool:
        connection = self.core.connections.get(host)
        if self.takeover.asked(host):
            return False  # it holds workers of a job that this dispatcher does not know yet
        return view.connected or (connection is not None and now - connection.away_since < SILENCE_S)

    def _context(self, job: ManagedJob, views: dict[str, HostView], holders: dict[str, set[str]], now: float,
                unix: float) -> JobContext:
        hosts = self.desk.allocation.held.get(job.id, ())
        usable = [v for v in (views.get(h) for h in hosts) if v is not None and v.usable]
        others = [h for v in usable for h in sorted(holders.get(v.host.request_id, set()) - {job.id})]
        free = [v for v in usable if holders.get(v.host.request_id, set()) <= {job.id}]
        places = [(v.host.request_id, slot) for v in free for slot in range(1 if job.spec.per_host else v.slots)]
        given = tuple(places[:job.sizing.places])
        launching = sum(1 if job.spec.per_host else v.slots for v in views.values()
                        if v.host.counts and not v.connected and v.leaving is None
                        and job.spec.group in ("", v.host.group))
        coming = max(0, min(launching, job.sizing.places - len(given)))
        allocation = self.desk.allocation
        return JobContext(now, unix, frozenset(hosts), given, views, self._why_waiting(job, others), coming,
                          self.core.unsent.of_job(job.id), bool(self.shutdown.why),
                          allocation.preempted.get(job.id, ""), allocation.shrunk.get(job.id, ""),
                          self.ray.view if job.spec.kind == RAY_KIND else None)

    def _why_waiting(self, job: ManagedJob, others: list[str]) -> str:
        """Return why the job has too few slots; `others` are jobs with workers on hosts that it is to get."""
        allocation = self.desk.allocation
        if job.id in allocation.lacking:
            return "; ".join(w for w in (allocation.why[job.id], self.machines.waits) if w)
        return f"waits for the workers of {others[0]} to end" if others else ""

    def _forget_hosts(self, views: dict[str, HostView]) -> None:
        core = self.core
        for name in [n for n, s in core.connections.items() if n in core.journal.state.ended and not s.connected]:
            del core.connections[name]
        core.record_losses()
        core.drains = {n: why for n, why in core.drains.items() if n in views}

    def _end_if_due(self, live: list[ManagedJob], unix: float) -> None:
        passed, clock = self.core.fleet_clock.passed(), self.core.clock
        if self.shutdown.why:
            for job in live:
                job.cancel(f"the fleet goes down: {self.shutdown.why}", save_until=time.monotonic() + SAVE_S)
            if lifetime.is_too_old(self.core.boot.spec, unix - clock.age_s(passed), unix):
                self.shutdown.limit()
            return
        idleness = lifetime.Idleness(
            unix - clock.age_s(passed), len(live), unix - clock.idle_s(passed, working=bool(live)),
            next((j.id for j in self.core.jobs.values() if j.state.ended and j.spec.down), ""))
        why = lifetime.reason_to_stop(self.core.boot.spec, idleness, unix)
        if why:
            limited = lifetime.is_too_old(self.core.boot.spec, idleness.up_since, unix)
            self.shutdown.begin(why, by_ourselves=True, at=unix, limited=limited)

    # ---- after a restart

    def _has_past(self) -> bool:
        return bool(self.core.jobs) or len(self.core.journal.ledger.events(0, 2)) > 1  # more than the fleet's creation

    def _try_to_settle(self) -> None:
        core = self.core
        away = [h.request_id for h in core.journal.state.hosts if h.cloud is CloudState.RUNNING
                and h.terminate_at is None and not core.is_connected(h.request_id)]
        if (away or self.takeover.waits()) and time.monotonic() < core.settle_until:
            return
        try:
            self.takeover.settle()
        except OSError as error:
            if not is_full(error):
                raise
            return  # workers train on without orders until there is room for the records
        core.settle_until = 0.0
        reports = [s.report for s in core.connections.values()]
        for job in core.jobs.values():
            if not job.state.ended:
                job.adopt(reports)
        self.desk.allocation = Allocation({j.id: tuple(sorted(j.workers.hosts())) for j in core.jobs.values()
                                           if not (j.state.ended or j.record.preempted)
                                           and (j.workers.hosts() or j.record.groups)}, {})
        for connection in core.connections.values():
            if not connection.connected:
                for job in core.jobs.values():
                    job.workers.mark_silent(connection.host, connection.last_report_at)
