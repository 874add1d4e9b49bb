"""Several jobs on one fleet: the real daemon with agents that behave."""

from __future__ import annotations

from functools import partial

import pytest

from spotfleet.codec import to_json
from spotfleet.dispatcher.jobs.validation import check
from spotfleet.errors import UsageError
from spotfleet.model import JobSpec
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


async def submit(stage: Stage, name: str, workers: tuple[int, int], **more: object) -> str:
    stage.world.scripts[name] = Script(steps=10_000)
    asked = JobSpec(name, argv=("train.py",), min_workers=workers[0], max_workers=workers[1], **more)
    return (await stage.call("POST", "/v1/jobs", {"spec": to_json(asked), "secrets": {}, "wait": True}))[1]["job"]


def test_of_two_waiting_jobs_the_one_with_the_higher_priority_starts_first(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        first = await submit(stage, "first", (2, 2))
        await stage.at_version(first, 2)

        async def waits(job: str) -> bool:
            return "2 of 2 held by first-1" in (await stage.job(job)).why

        for name, priority in (("usual", 0), ("urgent", 5)):
            job = await submit(stage, name, (2, 2), priority=priority)
            await stage.until(f"{job} names the job that it waits for", partial(waits, job))
        await stage.call("POST", f"/v1/jobs/{first}/cancel", {})
        running = await stage.at_version("urgent-3", 2)
        assert (running.priority, running.hosts) == (5, 2)
        assert (await stage.job("usual-2")).state == "queued"

    play(scene, spec(target=2))


@pytest.mark.parametrize("priority", [-1001, 1001])
def test_a_priority_out_of_range_is_refused(priority):
    with pytest.raises(UsageError, match=f"spec.priority: {priority} is not from -1000 to 1000"):
        check(JobSpec("j", argv=("train.py",), priority=priority), {})
