"""A job whose scripts have ended says that its results are being sent, and takes its last checkpoint as it ends."""

from __future__ import annotations

import hashlib

import pytest

from spotfleet.dispatcher.jobs import job as job_module
from spotfleet.protocol.messages import Exit, Unsent
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = 10_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "SENDS_S", 0.05)
    monkeypatch.setattr("spotfleet.dispatcher.cloud.machines.TICK_S", 0.1)


async def why(stage: Stage, job: str, text: str) -> None:
    async def shown() -> bool:
        return text in (await stage.job(job)).why

    await stage.until(text, shown)


def test_a_script_without_init_that_has_ended_shows_its_output_on_its_way(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(calls_init=False), (1, 1))
        await stage.until("it runs", lambda: stage.world.started)
        (name,) = stage.world.started
        stage.agents[host].unsent = (Unsent(job, "output", 356_000_000, 0, name), Unsent(job, "log", 5, 0, name))
        stage.world.workers[name].gone = True
        await why(stage, job, f"its script has ended; {host} sends its output, 356.0 MB left")
        assert (await stage.job(job)).state == "running"
        stage.agents[host].unsent = ()
        stage.world.kill(name, Exit(0, done=True))
        await stage.stands(job, "succeeded")

    play(scene, spec(1))


def test_rank_0_shows_its_output_on_its_way_after_training(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(steps=20, tail=LONG), (1, 1))
        await why(stage, job, "runs the script's rest")
        stage.world.workers[stage.world.started[0]].gone = True
        await why(stage, job, f"training has ended; {host} sends its output")

    play(scene, spec(1))


def test_a_checkpoint_that_is_on_its_way_when_the_fleet_goes_down_comes_home(play):
    data = b"tensors" * 1000
    digest = hashlib.sha256(data).hexdigest()

    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(Script(steps=LONG), (1, 1))
        await stage.at_version(job, 3)
        stage.agents[host].unsent = (Unsent(job, "checkpoint", len(data)),)
        put = f"/v1/jobs/{job}/checkpoints/5?generation=1&digest={digest}"
        await stage.call("POST", "/v1/down", {})
        await why(stage, job, f"{host} sends a checkpoint")
        assert stage.agents[host].orders.workers == ()
        assert (await stage.call("PUT", put, data=data, token=stage.token(host), ok=False))[0] == 200
        stage.agents[host].unsent = ()
        await stage.stands(job, "cancelled")
        put = put.replace("/5?", "/6?")
        assert (await stage.call("PUT", put, data=data, token=stage.token(host), ok=False))[0] in (401, 409)
        assert (await stage.job(job)).checkpoint == 5

    play(scene, spec(1))
