"""A job that is started anew at each change, on hosts and with processes that behave, in time that is counted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.hosts import Departure, HostView
from spotfleet.dispatcher.jobs.job import JobContext, ManagedJob
from spotfleet.fleet.domain.events import Event
from spotfleet.fleet.domain.state import Host
from spotfleet.model import CloudState, HostState, JobSpec, Market, Offer, Role
from spotfleet.protocol.messages import AgentReport, Exit, SlotOrder, Stage, WorkerReport, WorkerState

OFFER = Offer("local", "r", "z", "t", Market.SPOT, 2, 1000, 3000)
STEP_S = 0.5


class AnewJob:
    """One job, and agents that start a process once it has its place and end it when it is not listed any more."""

    def __init__(self, folder: Path, hosts: int = 2, slots: int = 1, **spec: object) -> None:
        spec = {"argv": ("x.py",), "min_workers": 1, "max_workers": 2, "kind": "restart", "gang": True, **spec}
        self._names = itertools.count(1)
        self._folder = folder
        self.job = self._managed(JobRecord("j", JobSpec("j", **spec), 0.0))  # type: ignore[arg-type]
        self.now = 100.0
        self.slots = slots
        self.hosts = [f"h{n}" for n in range(hosts)]
        self.leaving: dict[str, Departure] = {}
        self.preempted = ""  # for the next step alone: for which job it gives all hosts back
        self.waits = ""  # why the schedule gives it none
        self.silent: set[str] = set()
        self.processes: dict[str, tuple[SlotOrder, WorkerState]] = {}
        self.slow: set[str] = set()  # hosts that take long to start a process
        self.lingering: set[str] = set()  # they do not end when they are asked to
        self.events: list[Event] = []
        self.rounds: list[tuple[int, tuple[str, ...]]] = []  # (restarts, members) of each round that has started

    def _managed(self, record: JobRecord) -> ManagedJob:
        return ManagedJob(self._folder, record, {}, lambda slot: f"{slot[0]}/{slot[1]}/{next(self._names)}")

    def restart_dispatcher(self) -> None:
        """Go on with what the disk and the agents know."""
        self.job = self._managed(self.job.record)
        self.job.adopt([self._report(name) for name in self.hosts])

    def _report(self, host: str) -> AgentReport:
        states = tuple(s for w, (_, s) in self.processes.items() if w.startswith(f"{host}/"))
        return AgentReport(host, "1", "127.0.0.1", self.slots, states)

    def host(self, name: str) -> HostView:
        host = Host(name, Role.WORKER, OFFER, HostState.UP, 0.0, 0.0, 0.0, cloud=CloudState.RUNNING)
        return HostView(host, name not in self.silent, self.slots, self.leaving.get(name))

    def step(self, seconds: float = STEP_S) -> None:
        """Let time pass; agents report, the job decides, agents obey."""
        for _ in range(max(1, round(seconds / STEP_S))):
            self.now += STEP_S
            for name in self.hosts:
                if name in self.silent:
                    self.job.workers.mark_silent(name, self.now - STEP_S)
                else:
                    self.job.receive(self._report(name), self.now)
            views = {name: self.host(name) for name in self.hosts}
            given = tuple((name, slot) for name, view in views.items() if view.usable for slot in range(self.slots))
            places = () if self.preempted or self.waits else given[:self.job.sizing.places]
            assigned = frozenset(host for host, _ in places) if self.waits else frozenset(self.hosts)
            self.events += self.job.step(JobContext(self.now, self.now, assigned, places, views, self.waits,
                                                    preempted=self.preempted))
            self.preempted = ""
            self._obey()

    def _obey(self) -> None:
        listed = {o.worker: o for orders in self.job.orders().values() for o in orders}
        for name, order in listed.items():
            if name.partition("/")[0] in self.hosts and name.partition("/")[0] not in self.silent:
                self._advance(name, order)
        for name in [n for n in self.processes if n not in listed and n.partition("/")[0] not in self.silent]:
            if name not in self.lingering:
                del self.processes[name]

    def _advance(self, name: str, order: SlotOrder) -> None:
        ready = WorkerState(WorkerReport(name, "j", Stage.READY, store=f"10.0.0.{name[1]}:{5000 + len(self.rounds)}"),
                            order.slot, pid=0)
        _, state = self.processes.get(name, (order, ready))
        place = order.orders.assignment
        if state.pid == 0 and state.exit is None and order.gang is not None and place is not None and place.rank >= 0 \
                and name.partition("/")[0] not in self.slow:
            state = replace(state, pid=7, report=replace(state.report, generation=place.generation))
            if place.rank == 0:
                self.rounds.append((order.gang.restarts, place.members))
        self.processes[name] = (order, state)

    def ends(self, rank: int, code: int, error: str = "", done: bool = False) -> None:
        """End the process of a rank in the newest round."""
        name = self.rounds[-1][1][rank]
        order, state = self.processes[name]
        self.processes[name] = order, replace(state, pid=0, exit=Exit(code, done),
                                              report=replace(state.report, error=error))

    def lose(self, host: str) -> None:
        """The cloud lists a host as ended."""
        self.hosts.remove(host)
        self.processes = {n: p for n, p in self.processes.items() if not n.startswith(f"{host}/")}

    def live(self) -> set[int]:
        """The generations in which a process runs."""
        return {s.report.generation for _, s in self.processes.values() if s.pid}
