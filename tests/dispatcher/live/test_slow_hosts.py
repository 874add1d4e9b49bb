"""A slow host of a fleet in one event loop: the real daemon, a cloud in process, agents that behave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.model import PolicySpec
from spotfleet.protocol.messages import AgentReport, SlowWorker, StepCost
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


@pytest.mark.parametrize("asked", [True, False])
def test_a_slow_host_is_replaced_if_the_file_asks_for_it_and_else_only_named(play, monkeypatch, asked):
    monkeypatch.setattr("spotfleet.dispatcher.live.history.SAMPLE_S", 0.02)
    monkeypatch.setattr("spotfleet.dispatcher.live.slow.STEPS", 3)

    async def scene(stage: Stage) -> None:
        hosts = await stage.up(3)
        report = type(stage.agents[hosts[2]]).report

        def slowed(agent) -> AgentReport:
            own = report(agent)
            wait_s = 0.0 if agent.host == hosts[2] else 0.015
            return replace(own, workers=tuple(
                replace(w, report=replace(w.report, cost=StepCost(w.report.version, wait_s))) for w in own.workers))

        monkeypatch.setattr(type(stage.agents[hosts[2]]), "report", slowed)
        job = await stage.submit(Script(steps=100_000), (2, 3))
        if not asked:
            await stage.until("a slow worker", lambda: _slow(stage, job))
            await stage.at_version(job, (await stage.job(job)).version + 20)
            assert await stage.events("HostDraining") == [] and await stage.up(3) == hosts
            return

        async def replaced() -> bool:
            return hosts[2] not in await stage.up(3)

        await stage.until("another host", replaced, 60)
        (drained,) = await stage.events("HostDraining")
        assert drained["request_id"] == hosts[2]
        assert drained["why"].startswith(f"replace_slow: rank 2 of {job} computes 20.0 ms in a step, the median 5.0 ms")

    play(scene, spec(3, policy=PolicySpec(replace_slow=asked)))


async def _slow(stage: Stage, job: str) -> tuple[SlowWorker, ...]:
    return (await stage.job(job)).slow
