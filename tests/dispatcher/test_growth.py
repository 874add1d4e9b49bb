"""A fleet ten times as large costs ten times the work, not a hundred times: counted in bytecodes, not in seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.hosts import AgentConnection, host_views
from spotfleet.dispatcher.jobs.job import JobContext, ManagedJob
from spotfleet.fleet.domain.state import FleetState, Host
from spotfleet.fleet.ledger import Ledger
from spotfleet.fleet.reconcile import Calls, Observed, Wanted, create, tick
from spotfleet.membership.schedule import HostRoom, JobNeed, allocate
from spotfleet.model import CloudState, HostState, JobSpec, Market, Need, Nodes, Offer, Role
from spotfleet.protocol.messages import AgentReport, Stage, WorkerReport, WorkerState
from spotfleet.providers import Boot
from spotfleet.providers.local.inprocess import InProcessProvider
from spotfleet.providers.local.market.pools import LocalPool, MarketRules

FEW, MANY = 12, 240
GROWTH = MANY / FEW  # what is done once for all lets work grow more slowly than that; squares grow far beyond
OFFER = Offer("local", "r", "z", "t", Market.SPOT, 1, 1000, 3000)


class Name(str):
    """A text whose comparisons are seen."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def steps(work: Callable[[], object]) -> int:
    """How many bytecodes `work` runs."""
    counted = 0

    def count(frame, event: str, _argument):
        nonlocal counted
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


class Crowd:
    """One job on `n` hosts, one worker each; agents are what this says they are."""

    def __init__(self, folder: Path, n: int) -> None:
        folder.mkdir()
        self.hosts = [Name(f"f-{i}") for i in range(n)]
        self.job = ManagedJob(folder, JobRecord("j", JobSpec("j", argv=("x.py",), max_workers=n), 0.0), {},
                       lambda slot: Name(f"{slot[0]}/0/1"))
        live = tuple(Host(h, Role.WORKER, OFFER, HostState.UP, 0.0, 0.0, 0.0, cloud=CloudState.RUNNING)
                     for h in self.hosts)
        self.state = FleetState(hosts=live)
        self.reports = {h: AgentReport(h, "1", "127.0.0.1", 1) for h in self.hosts}
        self.now = 0.0

    def step(self) -> None:
        self.now += 1.0
        connections = {h: AgentConnection(h, r, lambda: None) for h, r in self.reports.items()}
        views = {v.host.request_id: v for v in host_views(self.state, connections, {}, self.now, self.now)}
        given = tuple((h, 0) for h in self.hosts)
        self.job.step(JobContext(self.now, self.now, frozenset(self.hosts), given, views))

    def report(self, generation: int, **said: object) -> None:
        """Every worker says this."""
        for host in self.hosts:
            report = WorkerReport(Name(f"{host}/0/1"), "j", Stage.READY, generation, version=1, store="127.0.0.1:1")
            self.reports[host] = replace(self.reports[host], workers=(WorkerState(replace(report, **said), 0),))
            self.job.workers.receive(self.reports[host])

    def whole_life(self) -> None:
        """Start, train, hear of a broken collective, form again, and order at every step."""
        for generation, said in ((0, {}), (1, {}), (1, {}), (1, {"failed": 1}), (1, {"failed": 1}), (2, {})):
            self.step()
            self.job.orders()
            self.report(generation, **said)


def test_a_job_that_becomes_smaller_costs_work_in_proportion_to_its_workers(tmp_path: Path):
    def smaller(folder: Path, n: int) -> int:
        crowd = Crowd(folder, n)
        crowd.whole_life()
        crowd.report(2, wanted=n // 2)
        cost = steps(crowd.step)
        assert crowd.job.membership.max_workers == n // 2
        return cost

    assert smaller(tmp_path / "many", MANY) / smaller(tmp_path / "few", FEW) < GROWTH


def test_a_job_costs_work_in_proportion_to_its_workers(tmp_path: Path):
    few, many = Crowd(tmp_path / "few", FEW), Crowd(tmp_path / "many", MANY)
    ratio = steps(many.whole_life) / steps(few.whole_life)
    assert len(many.job.membership.members) == MANY and many.job.membership.generation == 2
    assert ratio < GROWTH


@pytest.mark.parametrize("held", [False, True])
def test_the_schedule_costs_work_in_proportion_to_the_hosts(held: bool):
    def work(n: int) -> Callable[[], object]:
        names = [Name(f"f-{i}") for i in range(n)]
        rooms, needs = [HostRoom(h, 1) for h in names], [JobNeed("a", 1, n // 2, 0), JobNeed("b", 1, n, 1)]
        return lambda: allocate(needs, rooms, {"b": tuple(names)} if held else {})

    assert steps(work(MANY)) / steps(work(FEW)) < GROWTH


def test_a_tick_with_nothing_to_do_costs_work_in_proportion_to_the_hosts(tmp_path: Path):
    def fleet(n: int) -> Callable[[], object]:
        pool = LocalPool("local-a", "t", Market.SPOT, 1000, n)
        cloud, ledger = InProcessProvider(clock=time.time, rules=MarketRules((pool,))), Ledger(tmp_path / f"{n}.db")
        create(ledger, cloud, "f", Nodes(n, n, n), time.time())
        wanted = Wanted("f", Role.WORKER, n, (Need(),))

        def work() -> None:
            joined = dict.fromkeys(cloud.living(), "1")
            tick(wanted, ledger, cloud, lambda *_: Boot("none"), Observed(joined), time.time(), Calls(64))

        work(), work(), work()
        return work

    few, many = fleet(FEW), fleet(MANY)
    assert steps(many) / steps(few) < GROWTH
