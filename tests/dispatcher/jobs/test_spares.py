"""Workers beyond max, which wait to fill a lost one's place: the real daemon with agents that behave."""

from __future__ import annotations

import pytest

from spotfleet.codec import to_json
from spotfleet.dispatcher.jobs.validation import check
from spotfleet.errors import UsageError
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import Exit
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


async def submit(stage: Stage, **more: object) -> str:
    stage.world.scripts["train"] = Script(steps=10_000)
    asked = JobSpec("train", argv=("train.py",), min_workers=2, max_workers=2, **more)
    return (await stage.call("POST", "/v1/jobs", {"spec": to_json(asked), "secrets": {}, "wait": True}))[1]["job"]


def test_a_spare_fills_a_lost_workers_place_in_one_generation_and_is_replaced(play):
    async def scene(stage: Stage) -> None:
        await stage.up(3)
        job = await submit(stage, spares=1)

        async def warm() -> list[str]:
            status = await stage.job(job)
            trains = [w for w in status.workers if w.rank >= 0 and w.version > 0]
            return [w.worker for w in status.workers if w.rank < 0 and w.stage == "ready" and len(trains) == 2]

        (spare,) = await stage.until("two that train and a spare", warm)
        first, lost = stage.world.history[-1][2]
        stage.world.kill(lost, Exit(-9))
        (fresh,) = await stage.until("another spare", lambda: still(warm, lost, spare))
        assert [members for _, _, members, _ in stage.world.history] == [(first, lost), (first, spare)]
        assert fresh.rpartition("/")[0] == lost.rpartition("/")[0]

    async def still(warm, *without: str) -> list[str]:
        return [w for w in await warm() if w not in without]

    play(scene, spec(target=3))


def test_without_spares_the_surplus_host_stays_free(play):
    async def scene(stage: Stage) -> None:
        await stage.up(3)
        job = await submit(stage)
        await stage.at_version(job, 20)
        assert len(stage.world.started) == 2

    play(scene, spec(target=3))


@pytest.mark.parametrize(("more", "word"), [
    ({"spares": -1}, "spec.spares: -1 is not from 0"),
    ({"spares": 1, "argv": (), "run": "date"}, "spec.spares: a command has no spares"),
])
def test_spares_that_cannot_be_are_refused_by_field(more, word):
    with pytest.raises(UsageError, match=word):
        check(JobSpec(**{"name": "j", "argv": ("train.py",), **more}), {})
