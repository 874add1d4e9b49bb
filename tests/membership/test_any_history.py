"""The same simulated fleet as in test_random_histories.py, with the troubles chosen and shrunk by hypothesis."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.membership.membership_calm import check_alive
from tests.support.membership.membership_history import TROUBLES
from tests.support.membership.membership_sim import FleetSim

LIVING = precondition(lambda self: self.sim.living() and self.sim.workers())


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sim = FleetSim()

    @initialize(
        jobs=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.sampled_from([10**9, 60])), min_size=1,
                      max_size=2),
        slots=st.lists(st.integers(1, 2), min_size=1, max_size=4),
        seed=st.integers(0, 5),
    )
    def jobs_start(self, jobs: list[tuple[int, int, int]], slots: list[int], seed: int) -> None:
        self.sim = FleetSim(seed)
        for least, more, total_steps in jobs:
            self.sim.submit(least, least + more, total_steps)
        for n in slots:
            self.sim.add_host(n)

    @rule(slots=st.integers(1, 2))
    def a_host_comes(self, slots: int) -> None:
        if len(self.sim.hosts) < 8:
            self.sim.add_host(slots)

    @LIVING
    @rule(data=st.data(), kind=st.sampled_from(sorted(TROUBLES)), seed=st.integers(0, 3))
    def trouble_comes(self, data: st.DataObject, kind: str, seed: int) -> None:
        host = data.draw(st.sampled_from(self.sim.living()))
        victim = data.draw(st.sampled_from(self.sim.workers()))
        TROUBLES[kind](self.sim, random.Random(seed), host, victim)

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0, 4.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.run(seconds)

    def teardown(self) -> None:
        check_alive(self.sim)


AnyHistory.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, report_multiple_bugs=False
)
TestAnyHistory = AnyHistory.TestCase
