"""A whole fleet of jobs in one thread: a dispatcher, agents, links that lose and delay messages, and a clock.

What is known travels as in the product: an agent reports all its workers and its notice, the dispatcher answers with
all that should exist. Reports of one worker and its orders may come late, twice and out of order. What exists on a host
is told in order, as one connection does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from spotfleet.membership import Orders
from spotfleet.membership.schedule import HostRoom, JobNeed, allocate
from spotfleet.protocol.messages import Stage, WorkerReport, WorkerState
from tests.support.membership.membership_jobs import Known, Leaving, Place, SimJob
from tests.support.membership.membership_workers import STEP_S, Worker

DT = 0.1
REPORT_S = 0.3  # so often agents report and get orders
SETTLE_S = 15.0  # a restarted dispatcher waits so long for agents
SILENCE_S = 3.0  # a host away for less keeps its job
DRAIN_S = 120.0


@dataclass
class Host:
    """One machine with its agent; and `contact`: what the dispatcher was told."""

    name: str
    slots: int = 1
    noticed_until: float | None = None  # then the cloud takes it
    returns_after_s: float | None = None  # it is only stopped, and boots anew then
    gone: bool = False
    listed_gone_at: float = 0.0  # when the provider says so
    returns_at: float | None = None
    away_until: float = 0.0  # its agent is not connected
    stopped_until: float = 0.0  # the whole machine stands still
    life: int = 0  # number of its agent's life
    draining_at: float | None = None  # since when the dispatcher wants it to go
    procs: dict[str, tuple[SimJob, Worker]] = field(default_factory=dict)  # those of this agent's life
    last_list: int = 0  # newest list of workers that the agent obeyed
    contact: Contact = field(default_factory=lambda: Contact())

    @property
    def leaves(self) -> bool:
        return self.noticed_until is not None or self.draining_at is not None


@dataclass
class Contact:
    life: int = 0
    heard: bool = False
    last_report: int = 0
    notice_until: float | None = None  # by the dispatcher's monotonic clock
    deadline: float | None = None  # the same in the ledger, by its wall clock
    away_since: float = 0.0


@dataclass
class Links:
    loss: float = 0.0
    delay_s: float = 0.0
    queue: list[tuple[float, Callable[[], None]]] = field(default_factory=list)


class FleetSim:
    """Jobs on hosts that come and go. `now` is the truth; `mono` and `wall` are the dispatcher's clocks."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = self.mono = self.wall = 0.0
        self.hosts: dict[str, Host] = {}
        self.jobs: dict[str, SimJob] = {}
        self.held: dict[str, tuple[str, ...]] = {}
        self.links = Links()
        self.down_until = 0.0  # the dispatcher's process does not exist
        self.paused_until = 0.0  # it stands still: SIGSTOP
        self.settle_until: float | None = None  # after a restart
        self.look_s = 0.1  # between two looks of the dispatcher
        self.refill = True  # lost hosts are replaced
        self._names = self._numbers = 0
        self._next_exchange = self._next_look = 0.0
        self._replaced: set[str] = set()
        self._allocated: tuple = ()  # what `held` follows from, and stays while that does

    # ---- things that happen

    def submit(self, least: int, most: int, total_steps: int = 10**9) -> SimJob:
        name = f"j{len(self.jobs) + 1}"
        self.jobs[name] = SimJob(name, least, most, len(self.jobs), self.rng, total_steps)
        return self.jobs[name]

    def add_host(self, slots: int = 1) -> Host:
        self._names += 1
        host = Host(f"h{self._names}", slots)
        self.hosts[host.name] = host
        return host

    def kill_host(self, host: Host, listed_after_s: float) -> None:
        """The machine vanishes: nobody says a word until the provider does."""
        host.gone, host.listed_gone_at = True, self.now + listed_after_s
        host.returns_at = None if host.returns_after_s is None else self.now + host.returns_after_s
        for job, worker in host.procs.values():
            if not worker.dead:
                job.world.kill(worker, vanishes=True)

    def kill_agent(self, host: Host) -> None:
        """Its workers end with it; another one starts and knows none."""
        for job, worker in host.procs.values():
            if not worker.dead:
                job.world.kill(worker)
        host.life, host.procs, host.last_list = host.life + 1, {}, 0

    def boot_again(self, host: Host) -> None:
        """A stopped machine is back, with nothing in its memory."""
        self.kill_agent(host)
        host.gone, host.returns_at, host.noticed_until, host.returns_after_s = False, None, None, None
        host.contact.notice_until = host.contact.deadline = host.draining_at = None

    def restart_dispatcher(self, down_s: float) -> None:
        self.down_until, self.paused_until = self.now + down_s, 0.0
        self.settle_until = self.mono + down_s + SETTLE_S
        self.links.queue.clear()
        for host in self.hosts.values():
            host.contact = Contact(deadline=host.contact.deadline)

    def living(self) -> list[Host]:
        return [h for h in self.hosts.values() if not h.gone]

    def workers(self) -> list[tuple[SimJob, Worker]]:
        return [(j, w) for h in self.living() for j, w in h.procs.values() if not w.dead]

    # ---- time

    def run(self, seconds: float) -> None:
        end = self.now + seconds - DT / 2
        while self.now < end:
            self.tick()

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end = self.now + limit_s
        while self.now < end:
            if condition():
                return True
            self.run(5 * DT)
        return condition()

    def tick(self) -> None:
        self.now, self.mono, self.wall = self.now + DT, self.mono + DT, self.wall + DT
        for host in list(self.hosts.values()):
            self._age(host)
        for job in self.jobs.values():
            job.world.advance(DT)
        if self.links.queue:
            due = [entry for entry in self.links.queue if entry[0] <= self.now]
            self.links.queue = [entry for entry in self.links.queue if entry[0] > self.now]
            for _, deliver in due:
                deliver()
        if self.now >= self._next_exchange:
            self._next_exchange = self.now + REPORT_S
            for host in self.living():
                if self.connected(host):
                    self._exchange(host)
        if self.up and self.now >= self._next_look:
            self._next_look = self.now + self.look_s
            self._look()

    def _age(self, host: Host) -> None:
        if not host.gone:
            if host.noticed_until is not None and self.now >= host.noticed_until:
                self.kill_host(host, listed_after_s=1.0)
            return
        if self.refill and self.is_lost(host) and host.name not in self._replaced:
            self._replaced.add(host.name)
            self.add_host(host.slots)
        if host.returns_at is not None and self.now >= host.returns_at:
            self.boot_again(host)

    # ---- messages

    @property
    def up(self) -> bool:
        return self.now >= max(self.down_until, self.paused_until)

    def connected(self, host: Host) -> bool:
        """Is the agent's connection open? One to a paused dispatcher is."""
        up = not host.gone and max(host.away_until, host.stopped_until) <= self.now
        return up and self.now >= self.down_until

    def _send(self, deliver: Callable[[], None]) -> None:
        links = self.links
        if links.loss and self.rng.random() < links.loss:
            return
        links.queue.append((self.now + self.rng.random() * links.delay_s, deliver))
        if links.loss and self.rng.random() < 0.2:  # and once more, later
            links.queue.append((self.now + self.rng.random() * 2 * links.delay_s, deliver))

    def _exchange(self, host: Host) -> None:
        left_s = None if host.noticed_until is None else host.noticed_until - self.now
        views = [(job, _report(job, worker)) for job, worker in host.procs.values() if not worker.dead]
        self._numbers += 1
        life, number, exits = host.life, self._numbers, [n for n, (_, w) in host.procs.items() if w.dead]
        self._send(lambda: self._hear(host, life, number, views, exits, left_s))
        if self.up and self.settle_until is None and host.contact.life == life and host.contact.heard:
            orders = [(j, j.orders(host.name)) for j in self.jobs.values() if j.known]
            self._send(lambda: self._obey(host, life, number, orders))

    def _hear(self, host: Host, life: int, number: int, views: list[tuple[SimJob, WorkerState]],
              exits: list[str], left_s: float | None) -> None:
        """The dispatcher takes an agent's report."""
        if self.now < self.paused_until:
            self.links.queue.append((self.paused_until, lambda: self._hear(host, life, number, views, exits, left_s)))
        contact = host.contact
        if not self.up or life < contact.life:
            return
        contact.life, contact.heard = life, True
        contact.notice_until = None if left_s is None else self.mono + left_s
        contact.deadline = None if left_s is None else self.wall + left_s
        if number > contact.last_report:
            contact.last_report = number
            listed = {state.report.worker for _, state in views}

            def ended(known: Known) -> bool:
                absent = known.place[0] == host.name and known.name not in listed
                return known.name in exits or (absent and (known.seen or not known.wanted))

            for job in self.jobs.values():
                if job.known:
                    job.lose(ended)
        if self.settle_until is None:
            for job, state in views:
                job.hear(state)

    def _obey(self, host: Host, life: int, number: int, orders: list[tuple[SimJob, dict[str, Orders]]]) -> None:
        """The agent ends what it should not have, starts what it lacks, and passes on what concerns its workers."""
        if host.gone or life != host.life or host.stopped_until > self.now:
            return
        if number > host.last_list:
            host.last_list = number
            wanted = {name: job for job, said in orders for name in said}
            for name, (job, worker) in list(host.procs.items()):
                if name not in wanted:
                    if worker.dead:
                        del host.procs[name]
                    else:
                        job.world.kill(worker)
            for name, job in wanted.items():
                if name not in host.procs:
                    job.world.spawn(name, host.name)
                    host.procs[name] = (job, job.world.all[name])
            slots = [name.split("/")[1] for name, (_, worker) in host.procs.items() if not worker.dead]
            assert len(slots) == len(set(slots)), f"two workers in one slot of {host.name}"
        for _, said in orders:
            for name, order in said.items():
                held = host.procs.get(name)
                if held is not None and held[1].acts:
                    held[1].hears(order)

    # ---- the dispatcher

    def _look(self) -> None:
        """One step: who holds which host, which workers should be, and what each job does."""
        if self.settle_until is not None and not self._settle():
            return
        away = {h.name for h in self.hosts.values() if not self.connected(h)}
        lost = {h.name for h in self.hosts.values() if self.is_lost(h)}
        for host in self.hosts.values():
            host.contact.away_since = self.mono if host.name not in away else host.contact.away_since
        live = [j for j in self.jobs.values() if j.wants_hosts]
        self._allocate([j.need for j in live], [r for h in self.hosts.values() for r in self._room(h, lost)])
        taken = {k.place for j in self.jobs.values() for k in j.known.values()}
        coming = sum(h.slots for h in self.living() if h.name in away and self._leaving(h) is None)
        for job in self.jobs.values():
            if lost and job.known:
                job.lose(lambda k: k.place[0] in lost)
            if job.cancelled and not job.ended:
                job.let_all_go()
                job.ended = not any(k.seen for k in job.known.values())
            elif not job.ended:
                self._step(job, taken, away, coming)
        self._release_hosts(lost)

    def _allocate(self, needs: list[JobNeed], rooms: list[HostRoom]) -> None:
        if (needs, rooms, self.held) != self._allocated:
            self.held = allocate(needs, rooms, self.held).held
            named = [h for hosts in self.held.values() for h in hosts]
            assert len(named) == len(set(named)), "a host is held by two jobs"
            self._allocated = (needs, rooms, self.held)

    def _settle(self) -> bool:
        known = [h for h in self.hosts.values() if not self.is_lost(h)]
        if not all(self.connected(h) and h.contact.heard for h in known) and self.mono < (self.settle_until or 0.0):
            return False
        self.settle_until = None
        heard = [h for h in known if h.contact.heard and self.connected(h)]
        for job in self.jobs.values():
            if not job.ended:
                job.restart([_report(job, w) for h in heard for j, w in h.procs.values() if j is job and not w.dead])
                job.lose(lambda k: k.unheard and k.place[0] in [h.name for h in heard])
        self.held = {j.name: tuple(dict.fromkeys(k.place[0] for k in j.known.values()))
                     for j in self.jobs.values() if j.wants_hosts and (j.known or j.disk)}
        return True

    def _room(self, host: Host, lost: set[str]) -> list[HostRoom]:
        if host.name in lost:
            return []
        ready = host.contact.heard and self.mono - host.contact.away_since < SILENCE_S
        return [HostRoom(host.name, host.slots, self._leaving(host) is not None, ready)]

    def is_lost(self, host: Host) -> bool:
        """Does the provider list it as ended?"""
        return host.gone and self.now >= host.listed_gone_at

    def _leaving(self, host: Host) -> Leaving | None:
        if host.contact.notice_until is not None:
            return max(0.0, host.contact.notice_until - self.mono), "notice"
        if not host.contact.heard and host.contact.deadline is not None:
            return max(0.0, host.contact.deadline - self.wall), "notice"
        if host.draining_at is not None:
            return max(0.0, host.draining_at + DRAIN_S - self.mono), "drain"
        return None

    def _step(self, job: SimJob, taken: set[Place], away: set[str], coming: int) -> None:
        mine = self.held.get(job.name, ())
        places = [(h, s) for h in mine if h not in away and self.hosts[h].contact.heard
                  and self._leaving(self.hosts[h]) is None for s in range(self.hosts[h].slots)]
        own = {k.place for k in job.known.values()}
        given = [p for p in places if p in own or p not in taken][: job.hold]
        for place in given:
            if place not in taken:
                self._names += 1
                job.add(f"{place[0]}/{place[1]}/{self._names}")
                taken.add(place)

        def leaving(host: str) -> Leaving | None:
            return self._leaving(self.hosts[host]) or (None if host in mine else (DRAIN_S, "drain"))

        expected = max(0, min(coming, job.hold - len(given)))
        job.look(self.mono, expected, lambda host: host in away, leaving)

    def _release_hosts(self, lost: set[str]) -> None:
        """End what should go and holds no worker any more, or has not let go in time."""
        held = {k.place[0] for j in self.jobs.values() for k in j.known.values()}
        for host in self.living():
            late = host.draining_at is not None and self.mono - host.draining_at >= DRAIN_S
            if host.draining_at is not None and (host.name not in held or late) and host.name not in lost:
                self.kill_host(host, listed_after_s=0.5)

    # ---- what is true

    def room(self, job: SimJob) -> int:
        """Places for workers that the job's hosts offer now."""
        hosts = [self.hosts[h] for h in self.held.get(job.name, ())]
        return sum(h.slots for h in hosts if self.connected(h) and not h.leaves)

    def live_jobs(self) -> list[SimJob]:
        return [j for j in self.jobs.values() if not j.ended]

    def story(self) -> str:
        hosts = [f"{h.name} slots={h.slots} gone={h.gone} heard={h.contact.heard} leaving={self._leaving(h)} "
                 f"connected={self.connected(h)}" for h in self.hosts.values() if not h.gone]
        jobs = [j.story() for j in self.jobs.values()]
        return "\n".join([f"at {self.now:.1f}: held {self.held}", *hosts, *jobs])


def _report(job: SimJob, worker: Worker) -> WorkerState:
    ready = worker.stage is Stage.READY
    report = WorkerReport(
        worker.name, job.name, worker.stage, worker.group.generation if worker.group else 0, worker.failed,
        worker.version, f"{worker.name}:1" if worker.stage is not Stage.STARTING else "", STEP_S,
        resumed=worker.resumed, waits=worker.acts, read_rank=worker.read_rank if ready else None,
        read_size=worker.read_size if ready else 0,
    )
    return WorkerState(report, int(worker.name.split("/")[1]), stopped=worker.stopped,
                       quiet_s=worker.quiet_s if worker.group else 0.0)
