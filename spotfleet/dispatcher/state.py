"""The dispatcher's state. One event loop owns all of it, so nothing here is locked.

    step      after every report or request, and each STEP_S: schedule, membership, jobs, orders. Never blocks.
    machines  each TICK_S, and at once when a host changed: one `fleet.reconcile.tick` in a thread of its own.

After a restart of this process the jobs are read from disk and nothing is ordered, launched or given up until every
host that runs has reported or SETTLE_S have passed; training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet.addresses import host_of
from spotfleet.dispatcher import disk, jobfile, lifetime, restart
from spotfleet.dispatcher.announce import Announcer
from spotfleet.dispatcher.bell import rings
from spotfleet.dispatcher.boot import DispatcherBoot
from spotfleet.dispatcher.bundles import BundleStore
from spotfleet.dispatcher.endgame import Endgame
from spotfleet.dispatcher.hosts import SAY_AGAIN_S, HostView, Seat, differs, look
from spotfleet.dispatcher.jobfile import JobRecord
from spotfleet.dispatcher.jobs import SAVE_S, Job, Surroundings
from spotfleet.dispatcher.journal import Journal
from spotfleet.dispatcher.keeper import Keeper
from spotfleet.dispatcher.keys import NotFound
from spotfleet.dispatcher.machines import Machines
from spotfleet.dispatcher.mirror import Mirror
from spotfleet.dispatcher.restart import Slot
from spotfleet.dispatcher.restore import machine_number
from spotfleet.dispatcher.schedule import Allocation, HostRoom, JobNeed, allocate
from spotfleet.dispatcher.status import Scene, fleet_status
from spotfleet.dispatcher.steward import Steward
from spotfleet.dispatcher.stopwatch import Stopwatch
from spotfleet.dispatcher.takeover import Takeover
from spotfleet.dispatcher.troubles import Troubles
from spotfleet.dispatcher.trust import turn_away_refused
from spotfleet.dispatcher.upkeep import Upkeep
from spotfleet.durable import name_of_fleet
from spotfleet.errors import NoCapacity, UsageError
from spotfleet.fleet.events import CheckpointKept, Event, JobChanged, JobSubmitted, NodesChanged
from spotfleet.messages import AgentOrders, AgentReport, Checkpoint, FleetStatus, JobStatus, SlotOrder
from spotfleet.model import CloudState, HostState, JobSpec, Nodes
from spotfleet.providers import Provider

log = logging.getLogger(__name__)
STEP_S = 0.25
REST = 3.0  # times as long as a step: the rest of the time is for reports and orders, which are many in a large fleet
SETTLE_S = 15.0
NUMBERS = 1000  # of jobs that one dispatcher's machine may name: the next, which may know none of them, begins above
SILENCE_S = 3.0  # an agent that is away for less keeps its host's place in the schedule


class Dispatcher:
    def __init__(self, boot: DispatcherBoot, home: Path, provider: Provider, journal: Journal) -> None:
        self.boot, self.home, self.journal = boot, home, journal
        self.url = ""  # where we listen, set before `machines` runs
        self.archive_folder = Path(boot.archive) if boot.archive else home / "archive"
        self.bundles = BundleStore(home)
        self.seats: dict[str, Seat] = {}
        self.drains: dict[str, str] = {}
        self.misfits: dict[str, str] = {}  # hosts whose agents speak another version -> what is wrong
        self.endgame = Endgame(home, lifetime.keep_s(boot.spec))
        self._life, self._named, self._machine = jobfile.next_boot(home), 0, machine_number(boot.host)
        self.jobs: dict[str, Job] = {j.id: j for j in map(self.load, jobfile.folders(home))}
        self.stopwatch = self._started()
        self._allocation = Allocation({}, {})
        self._ordered: dict[str, dict[str, list[SlotOrder]]] = {}  # by job and host
        self._changed = asyncio.Event()
        self._settle_until = time.monotonic() + SETTLE_S if self._has_past() else 0.0
        mirror = Mirror(boot) if boot.spec.checkpoint.folder else None
        self.upkeep = Upkeep(lambda: self.jobs.values(), mirror, self.change, self.checkpoint_kept)
        self.machines = Machines(self, provider, time.time() + SETTLE_S if self._settle_until else 0.0)
        self.troubles = Troubles(self)
        self.takeover, self.announcer, self.keeper = Takeover(self), Announcer(self, provider), Keeper(self)
        self.steward = Steward(self)

    # ---- agents

    def connect(self, report: AgentReport, wake: Callable[[], None]) -> Seat:
        """A new connection of a host's agent; it takes the place of an older one."""
        seat = Seat(report.host, report, wake)
        before = self.seats.get(report.host)
        self.seats[report.host] = seat
        if before is not None and before.connected:
            before.connected = False
            before.wake()
        self.machines.poke()
        return seat

    def receive(self, seat: Seat, report: AgentReport) -> None:
        """Take in what an agent holds; it is answered after the next step. What comes late on a connection that has
        been replaced is old: it would report as lost what has been started since."""
        if self.seats.get(seat.host) is not seat or not seat.connected:
            return
        noticed, news = report.notice != seat.report.notice, differs(seat.report, report)
        seat.hear(report, time.monotonic())
        self.takeover.hear(report)
        if self.settled:
            for job in self.jobs.values():
                job.hear(report, time.monotonic())
        if noticed:
            self.machines.poke()
        if news:
            self.change()

    def disconnect(self, seat: Seat) -> None:
        """The end of a connection; of an older one it means nothing."""
        if self.seats.get(seat.host) is not seat:
            return
        seat.connected, seat.away_since = False, time.monotonic()
        for job in self.jobs.values():
            job.crew.silence(seat.host, seat.heard_at)
        self.machines.poke()  # does the cloud list it as ended?
        self.change()

    def change(self) -> None:
        """Something changed: step soon."""
        self._changed.set()

    # ---- requests

    async def submit(self, spec: JobSpec, secrets: dict[str, str], *, wait: bool) -> str:
        await asyncio.to_thread(self.bundles.refuse_incomplete, spec.bundle)
        self._check(spec, wait)
        disk.refuse_if_full(self.home)
        anew = not self.jobs or self.takeover.event is not None  # the copies may lack jobs that hosts or target know
        name = jobfile.name_for(spec, self.jobs, NUMBERS * self._machine if anew else 0)
        folder = self.home / "jobs" / name
        jobfile.save_secrets(folder, secrets)
        jobfile.save(folder, JobRecord(name, self.steward.sized(spec), time.time()))
        self.jobs[name] = self.load(folder)
        self.journal.note(jobfile.submission(self.jobs[name].record, secrets))
        self.change()
        return name

    def _check(self, spec: JobSpec, wait: bool) -> None:
        """Raise UsageError for a job that can never run, NoCapacity for one that cannot run soon and shall not wait."""
        if self.endgame.why:
            raise NoCapacity(f"the fleet goes down: {self.endgame.why}", hint="start it again with `spotfleet up`")
        if not spec.argv and not spec.run:
            raise UsageError("spec.run: the job has neither a script nor a command", hint="name a script")
        self.steward.check(spec)
        if not 1 <= spec.min_workers <= spec.max_workers:
            raise UsageError(f"spec.min_workers: {spec.min_workers} to {spec.max_workers} is no range from 1 on")
        if wait:
            return
        views = [v for v in self.views() if v.host.counts]
        slots = max([1, *(v.slots for v in views)])
        most = self.nodes.max * slots
        if most < spec.min_workers:
            raise NoCapacity(f"the job needs {spec.min_workers} workers; the fleet has at most {most}",
                             hint="lower --np, or raise nodes.max in the fleet file and run `spotfleet up` again")
        up, soon = sum(v.slots for v in views if v.usable), self.steward.held * slots
        if up + soon < spec.min_workers and (self.machines.waits or self.nodes.target * slots < spec.min_workers):
            raise NoCapacity(f"the job needs {spec.min_workers} workers and {up} are up"
                             + (f"; {self.machines.waits}" if self.machines.waits else ""),
                             hint="add --wait to queue it until capacity comes, or lower --np", scope="region")

    def cancel(self, job: Job) -> None:
        job.cancel("cancelled by `spotfleet cancel`")
        self.change()

    async def set_nodes(self, nodes: Nodes) -> None:
        if nodes != self.nodes:
            self.journal.note(NodesChanged(time.time(), nodes, "asked by `spotfleet up`"))
            await self.journal.flush()
            self.machines.poke()

    def drain(self, host: str) -> None:
        self.check_host(host)
        self.drains[host] = "asked by `spotfleet drain`"
        self.machines.poke()
        self.change()

    async def interrupt(self, host: str, notice_s: float | None) -> None:
        self.check_host(host)
        await self.machines.interrupt(host, notice_s)

    def check_host(self, host: str) -> None:
        """Raise NotFound for what is no host of this fleet now."""
        names = [v.host.request_id for v in self.views()]
        if host not in names:
            raise NotFound(f"no host {host!r}", hint=f"hosts of this fleet: {', '.join(names) or 'none now'}")

    def go_down(self, why: str, *, by_ourselves: bool) -> None:
        if self.endgame.begin(why, by_ourselves=by_ourselves, at=time.time()):
            log.info("going down: %s", why)
        self.machines.poke()
        self.change()

    def checkpoint_kept(self, job: Job, kept: Checkpoint) -> None:
        self.journal.note(CheckpointKept(time.time(), job.id, kept.version, kept.generation, kept.digest, kept.bytes))
        self.change()

    # ---- what is known

    @property
    def nodes(self) -> Nodes:
        return self.journal.state.nodes or self.boot.spec.nodes

    def views(self) -> list[HostView]:
        return look(self.journal.state, self.seats, self.drains, time.monotonic(), time.time(),
                    host_of(self.url))

    def orders(self, host: str) -> AgentOrders | None:
        """The newest orders; None while there are none to give."""
        seat = self.seats.get(host)
        return seat.orders if seat else None

    def job_status(self, job: Job) -> JobStatus:
        return self.steward.annotated(job, time.time())

    def status(self) -> FleetStatus:
        views, unix = self.views(), time.time()
        host_jobs = {v.host.request_id: tuple(j.id for j in self.jobs.values() if j.has_worker_on(v.host.request_id))
                     for v in views}
        jobs = tuple(self.steward.annotated(j, unix) for j in self.jobs.values())
        scene = Scene(self.boot.fleet, self.journal.state, self.nodes, self.machines.own, views,
                      {**self.misfits, **self.machines.doing, **{s.host: s.report.why for s in self.seats.values()}},
                      host_jobs, jobs, self.endgame.why, self.machines.why, [*self.troubles.lines(),
                       *self.takeover.remarks, *filter(None, (self.announcer.why, self.keeper.why))],
                      self.boot.spec.max_lifetime_s, self.machines.target)
        return replace(fleet_status(scene, unix), tick_s=self.machines.tick_s,
                       spent_micros=self.steward.spent(unix), policy=self.steward.status(unix))

    # ---- the loop

    async def run(self) -> None:
        """Step until cancelled. An error here ends the process: a restart from disk is safer than going on."""
        self.journal.note(*self._unwritten())
        while True:
            self._changed.clear()
            self.journal.check()
            began = time.monotonic()
            self.step()
            await asyncio.sleep(REST * (time.monotonic() - began))
            await rings(self._changed, STEP_S)

    def step(self) -> None:
        """Bring jobs and orders up to date with everything known now."""
        self.endgame.save()
        if not self.settled:
            self.takeover.ask()
            self._try_to_settle()
        if not self.settled:
            return
        now, unix = time.monotonic(), time.time()
        views = {v.host.request_id: v for v in self.views()}
        self._forget_hosts(views)
        self.takeover.adopt(views)
        live = [j for j in self.jobs.values() if not j.state.ended]
        self._end_if_due(live, unix)
        self._allocation = allocate(*self._desk(live, views, now), self._allocation.held)
        taken = {place: job.id for job in self.jobs.values() for place in job.held()}
        for job in self.jobs.values():
            self.journal.note(*job.step(self._around(job, views, taken, now, unix)))
            self.drains.update({h: why for h, why in restart.unfit(job.history, now).items() if h in views})
        self._order()
        self.machines.look(views)

    def _desk(self, live: list[Job], views: dict[str, HostView], now: float) -> tuple[list[JobNeed], list[HostRoom]]:
        order = {name: n for n, name in enumerate(self.jobs)}
        needs = [JobNeed(j.id, j.spec.min_workers, j.sizing.places, order[j.id]) for j in live
                 if not j.record.cancelled]
        rooms = [HostRoom(name, v.slots, v.closed, self._is_ready(name, v, now))
                 for name, v in views.items() if v.host.state is not HostState.STOPPED]
        return needs, rooms

    def _is_ready(self, host: str, view: HostView, now: float) -> bool:
        seat = self.seats.get(host)
        if self.takeover.asked(host):
            return False  # it holds workers of a job that is still to be learnt of
        return view.connected or (seat is not None and now - seat.away_since < SILENCE_S)

    def _around(self, job: Job, views: dict[str, HostView], taken: dict[Slot, str], now: float,
                unix: float) -> Surroundings:
        mine = self._allocation.held.get(job.id, ())
        usable = [v for v in (views.get(h) for h in mine) if v is not None and v.usable]
        places = [(v.host.request_id, slot) for v in usable for slot in range(v.slots)]
        given = tuple(p for p in places if taken.get(p, job.id) == job.id)[:job.sizing.places]
        launching = sum(v.slots for v in views.values() if v.host.counts and not v.connected and v.leaving is None)
        coming = max(0, min(launching, job.sizing.places - len(given)))
        return Surroundings(now, unix, frozenset(mine), given, views, self._why_waiting(job), coming)

    def _why_waiting(self, job: Job) -> str:
        why = self._allocation.why.get(job.id, "")
        return "" if why.startswith("holds") else "; ".join(w for w in (why, self.machines.waits) if w)

    def _order(self) -> None:
        """Wake each connection that is owed an answer or whose orders have changed."""
        turn_away_refused(self)
        now, told = time.monotonic(), [self._orders_of(j) for j in self.jobs.values()]
        for seat in self.seats.values():
            orders = AgentOrders(seat.host, tuple(o for by_host in told for o in by_host.get(seat.host, ())),
                                 tell=self.takeover.asked(seat.host), send=self.takeover.lacks(seat.host))
            if seat.connected and (seat.due or orders != seat.orders):
                seat.orders, seat.due, seat.say_again_at = orders, False, now + SAY_AGAIN_S
                seat.wake()

    def _orders_of(self, job: Job) -> dict[str, list[SlotOrder]]:
        """By host. While the job's record cannot be written these are the orders of before: no worker hears of a
        generation that a restart would not know."""
        job.unsaved = job.unsaved and not jobfile.try_save(job.folder, job.record)
        if not job.unsaved:
            self._ordered[job.id] = job.orders()
        return self._ordered.get(job.id, {})

    def _forget_hosts(self, views: dict[str, HostView]) -> None:
        for name in [n for n, s in self.seats.items() if n in self.journal.state.ended and not s.connected]:
            del self.seats[name]
        self.drains = {n: why for n, why in self.drains.items() if n in views}

    def _end_if_due(self, live: list[Job], unix: float) -> None:
        if self.endgame.why:
            for job in live:
                job.cancel(f"the fleet goes down: {self.endgame.why}", save_until=time.monotonic() + SAVE_S)
            return
        mono = time.monotonic()
        idleness = lifetime.Idleness(
            unix - self.stopwatch.age_s(mono), len(live), unix - self.stopwatch.idle_s(mono, working=bool(live)),
            next((j.id for j in self.jobs.values() if j.state.ended and j.spec.down), ""))
        why = lifetime.reason_to_stop(self.boot.spec, idleness, unix)
        if why:
            self.go_down(why, by_ourselves=True)

    # ---- after a restart

    @property
    def settled(self) -> bool:
        return self._settle_until == 0.0

    def _unwritten(self) -> list[Event]:
        """What jobs on disk say and the ledger does not: the last process died between the two."""
        submitted, ended = set(), set()
        for _, event in self.journal.after(0):
            if isinstance(event, JobSubmitted):
                submitted.add(event.job)
            elif isinstance(event, JobChanged) and event.state.ended:
                ended.add(event.job)
        events: list[Event] = [jobfile.submission(j.record, j.secrets) for j in self.jobs.values()
                               if j.id not in submitted]
        return events + [JobChanged(j.record.ended_at, j.id, j.state, j.record.why, j.record.version)
                         for j in self.jobs.values() if j.state.ended and j.id not in ended]

    def _started(self) -> Stopwatch:
        unix, created = time.time(), self.journal.state.created
        ends = [j.record.ended_at for j in self.jobs.values() if j.state.ended]
        ends += [taken.at] if (taken := self.journal.state.taken_over) else []  # somebody has just wanted this machine
        return Stopwatch(unix, time.monotonic(), created.at if created else unix, max(ends, default=0.0))

    def _has_past(self) -> bool:
        return bool(self.jobs) or len(self.journal.ledger.events(0, 2)) > 1  # more than the fleet's creation

    def _try_to_settle(self) -> None:
        away = [h.request_id for h in self.journal.state.hosts
                if h.cloud is CloudState.RUNNING and h.terminate_at is None
                and not (h.request_id in self.seats and self.seats[h.request_id].connected)]
        if (away or self.takeover.waits()) and time.monotonic() < self._settle_until:
            return
        self._settle_until = 0.0
        self.takeover.settle()
        reports = [s.report for s in self.seats.values()]
        for job in self.jobs.values():
            if not job.state.ended:
                job.adopt(reports)
        self._allocation = Allocation({j.id: tuple(sorted(j.crew.hosts())) for j in self.jobs.values()
                                       if not j.state.ended and (j.crew.hosts() or j.record.groups)}, {})
        for seat in self.seats.values():
            if not seat.connected:
                for job in self.jobs.values():
                    job.crew.silence(seat.host, seat.heard_at)

    def hold(self, job: Job) -> None:
        """It goes on with the hosts that its workers are on."""
        held = {**self._allocation.held, job.id: tuple(sorted(job.crew.hosts()))}
        self._allocation = Allocation(held, self._allocation.why)

    def load(self, folder: Path) -> Job:
        """The job on our disk."""
        record, secrets = jobfile.load(folder)
        if record.state.ended:
            jobfile.drop_secrets(folder)  # the last process may have died just before
            secrets = {}
        job = Job(folder, record, secrets, self._name_for)
        spec = self.boot.spec.checkpoint
        job.checkpoints.target = spec.folder
        job.checkpoints.url = spec.url and f"{spec.url}/{name_of_fleet(self.boot.fleet, self.boot.ca)}/{job.id}"
        return job

    def _name_for(self, place: Slot) -> str:
        self._named += 1
        lives = [f"d{self._machine}"] * (self._machine > 0) + [str(self._life)] * (self._life > 1)
        incarnation = "-".join([*lives, str(self._named)])
        return f"{place[0]}/{place[1]}/{incarnation}"
