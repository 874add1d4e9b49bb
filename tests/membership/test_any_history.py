"""The same simulated job as in test_random_histories.py, with the troubles chosen and shrunk by hypothesis."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from membership_history import TROUBLES
from membership_sim import JobSim

LIVING = precondition(lambda self: self.sim.world.alive() and any(not h.gone for h in self.sim.hosts.values()))


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sim = JobSim()

    @initialize(
        least=st.integers(1, 2),
        more=st.integers(0, 2),
        slots=st.lists(st.integers(1, 2), min_size=1, max_size=4),
        total_steps=st.sampled_from([10**9, 60]),
        seed=st.integers(0, 5),
    )
    def a_job_starts(self, least: int, more: int, slots: list[int], total_steps: int, seed: int) -> None:
        self.sim = JobSim(least, least + more, seed, total_steps)
        for n in slots:
            self.sim.add_host(n)

    @rule(slots=st.integers(1, 2))
    def a_host_comes(self, slots: int) -> None:
        if len(self.sim.hosts) < 8:
            self.sim.add_host(slots)

    @LIVING
    @rule(data=st.data(), kind=st.sampled_from(sorted(TROUBLES)), seed=st.integers(0, 3))
    def trouble_comes(self, data: st.DataObject, kind: str, seed: int) -> None:
        host = data.draw(st.sampled_from([h for h in self.sim.hosts.values() if not h.gone]))
        worker = data.draw(st.sampled_from(self.sim.world.alive()))
        TROUBLES[kind](self.sim, random.Random(seed), host, worker)

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0, 4.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.sim.run(seconds)

    def teardown(self) -> None:
        while self.sim.able() < self.sim.min and not self.sim.ended_well:
            self.sim.add_host()
        self.sim.check_alive()


AnyHistory.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, report_multiple_bugs=False
)
TestAnyHistory = AnyHistory.TestCase
