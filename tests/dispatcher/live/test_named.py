"""Slow workers and broken GPUs are named in a fleet's status, and a host's readings are checked as all it sends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.api.check import nccl_finding
from spotfleet.cli.render import fleet_status
from spotfleet.dispatcher import reports
from spotfleet.dispatcher.hosts import differs
from spotfleet.protocol.messages import (
    AgentReport,
    FleetStatus,
    GpuReading,
    JobStatus,
    SlowWorker,
    StepCost,
    WorkerStatus,
    dump,
)
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

REPORT = AgentReport("f-0", "a", "127.0.0.1", 1)


def test_a_slow_worker_is_named_in_the_status_with_the_next_step():
    slow = SlowWorker("f-7/0/1", 3, 0.2, 0.1, 80)
    job = JobStatus("j-1", "j", "running", "", slow=(slow,))
    shown = fleet_status(FleetStatus("f", "up", "", 1, 1, 1, jobs=(job,)))
    assert ("j-1: rank 3 (f-7/0/1) is slow: it computes 200.0 ms in a step, the median 100.0 ms, for 80 steps; "
            "`spotfleet drain f-7` replaces its host") in " ".join(shown.split())


def with_nccl(**versions: str) -> JobStatus:
    workers = tuple(WorkerStatus(f"{host}/0/1", host, 0, "ready", 1, version) for host, version in versions.items())
    return JobStatus("j-1", "j", "running", "", workers=workers)


@pytest.mark.parametrize("job, said, level", [
    (with_nccl(a="2.28.9", b="2.28.9", c=""), "j-1: NCCL 2.28.9", "ok"),
    (with_nccl(a="2.28.9", b="2.27.5"), "j-1: its workers have different versions of NCCL, 2.27.5 on b, 2.28.9 on a; "
                                        "hosts of one image or one pinned torch have the same", "warning"),
])
def test_the_version_of_nccl_is_in_status_and_check_and_different_ones_are_a_warning(job, said, level):
    shown = fleet_status(FleetStatus("f", "up", "", 1, 1, 1, jobs=(job,)))
    assert said in " ".join(shown.split())
    finding = nccl_finding(job)
    assert (finding.what, finding.level, finding.about) == (said, level, "NCCL")


def test_workers_without_nccl_have_no_line_about_it():
    shown = fleet_status(FleetStatus("f", "up", "", 1, 1, 1, jobs=(with_nccl(a="", b=""),)))
    assert "NCCL" not in shown


def test_workers_reports_and_gpus_reach_the_status(play, monkeypatch):
    monkeypatch.setattr("spotfleet.dispatcher.live.history.SAMPLE_S", 0.02)
    monkeypatch.setattr("spotfleet.dispatcher.live.slow.STEPS", 3)

    async def scene(stage: Stage) -> None:
        hosts = await stage.up(3)
        report, gpu = type(stage.agents[hosts[2]]).report, GpuReading(0, 50, 10, 20, 60, 2)
        nccl = dict(zip(hosts, ("2.28.9", "2.27.5", "2.28.9, see https://example.com"), strict=True))

        def slowed(agent) -> AgentReport:
            own = report(agent)
            wait_s = 0.0 if agent.host == hosts[2] else 0.015
            return replace(own, gpus=(gpu,) if agent.host == hosts[2] else (), workers=tuple(
                replace(w, report=replace(w.report, cost=StepCost(w.report.version, wait_s), nccl=nccl[agent.host]))
                for w in own.workers))

        monkeypatch.setattr(type(stage.agents[hosts[2]]), "report", slowed)
        job = await stage.submit(Script(steps=100_000), (3, 3))

        async def named() -> tuple[SlowWorker, ...]:
            return (await stage.job(job)).slow

        (found,) = await stage.until("a slow worker", named)
        assert found.worker.startswith(f"{hosts[2]}/") and found.steps >= 3
        status = (await stage.call("GET", "/v1/status"))[1]
        (broken,) = [h for h in status["hosts"] if h["gpus"]]
        assert {w.host: w.nccl for w in (await stage.job(job)).workers} == {**nccl, hosts[2]: ""}
        assert broken["host"] == hosts[2] and broken["why"].startswith("GPU 0: 2 uncorrected memory errors")

    play(scene, spec(3))


def test_readings_of_gpus_are_bounded_and_can_command_no_terminal():
    read = reports.read(dump(replace(REPORT, gpus=(GpuReading(0, why="lost \x1b[2J"),))))
    assert read.gpus == (GpuReading(0, why="lost \\x1b[2J"),)
    for bad in ((GpuReading(-5),), (GpuReading(0, 10 ** 30),), tuple(map(GpuReading, range(65)))):
        with pytest.raises(ValueError, match=r"AgentReport\.gpus"):
            reports.read(dump(replace(REPORT, gpus=bad)))


def test_a_new_reading_alone_makes_no_step_of_the_dispatcher_due():
    assert not differs(REPORT, replace(REPORT, gpus=(GpuReading(0, 99),)))
