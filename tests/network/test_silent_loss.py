"""Machines whose network ends without a word, in namespaces: only there is there neither FIN nor RST."""

from __future__ import annotations

from pathlib import Path

import pytest
from namespaces import why_not
from network_fleet import NetworkFleet
from network_scripts import TRACING, Trace, now

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def test_survivors_of_a_silent_cut_go_on_within_seconds_and_the_host_returns_with_its_link(
        tmp_path: Path, record_property):
    trace = Trace(tmp_path / "trace")
    with NetworkFleet(tmp_path, hosts=3) as fleet:
        job = fleet.submit({"train.py": TRACING}, np=(2, 3), envs={"TRACE": str(trace.folder), "STEPS": "1000000"})
        fleet.wait("three that train", lambda: len(fleet.hosts_of(job)) == 3 and fleet.job(job).version > 20)
        workers = {w.host: w.worker for w in fleet.job(job).workers}
        lost, *others = fleet.hosts_of(job)  # rank 0, which also serves the bootstrap store

        begun = now()
        fleet.cut(lost)
        fleet.wait("a step of the two", lambda: all(
            (step := trace.after(workers[h], begun + 0.5)) and step.generation > 1 for h in others))
        pause_s = max(trace.after(workers[h], begun + 0.5).at for h in others) - begun
        print(f"silent cut to the survivors' next step: {pause_s:.2f} s")
        record_property("silent_cut_s", round(pause_s, 3))
        last = trace.steps(workers[lost])[-1]
        assert (last.generation, last.at < begun + 0.5) == (1, True)  # fenced: it cannot make a step alone

        fleet.restore(lost)
        fleet.wait("three that train again", lambda: len(fleet.hosts_of(job)) == 3)
        again = next(s.generation for s in trace.steps(workers[others[0]])[::-1])
        fleet.wait("steps of the returned", lambda: trace.steps(workers[lost])[-1].generation >= again)
        trace.enough()
        fleet.wait("the end", lambda: fleet.job(job).state == "succeeded")
        assert_no_step_is_lost_or_doubled(trace, workers[others[0]])
        assert pause_s < 20.0  # about 3.5 s on a quiet machine


def assert_no_step_is_lost_or_doubled(trace: Trace, worker: str) -> None:
    numbers = [s.number for s in trace.steps(worker)]
    assert numbers == list(range(1, numbers[-1] + 1))
