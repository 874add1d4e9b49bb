"""Jobs whose scripts train outside elastic.run: what they are called while they run, at their end, and at a loss."""

from __future__ import annotations

import pytest

from spotfleet.dispatcher.jobs import outside
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import Exit, JobStatus
from tests.support.dispatcher.fake_fleet import Stage
from tests.support.dispatcher.fake_workers import BROKEN, Script

LONG = 10_000


async def says(stage: Stage, job: str, why: str) -> JobStatus:
    """The job's status once its `why` is `why`."""

    async def look() -> JobStatus | None:
        status = await stage.job(job)
        return status if status.why == why else None

    return await stage.until(f"{job}: {why}", look)


async def held(stage: Stage, job: str) -> list[tuple[int, bool]]:
    """(workers, known) of each line on scripts outside training."""
    return [(len(e["workers"]), e["known"]) for e in await stage.events("ScriptsRan") if e["job"] == job]


def test_a_script_that_never_calls_init_is_said_to_run_alone_on_each_worker(play, monkeypatch):
    monkeypatch.setattr(outside, "SURE_S", 0.3)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG, calls_init=False))
        early = await says(stage, job, "2 workers run this script; hvd.init() has not been called yet")
        assert (early.state, early.hint) == ("starting", "")
        status = await says(stage, job, "2 workers run this script without hvd.init(): each runs all of it alone")
        assert status.state == "running" and "@hvd.elastic.run" in status.hint
        for worker in list(stage.world.workers.values()):
            worker.script.steps = 0
        done = await stage.stands(job, "succeeded")
        assert done.why == "2 workers ran this script without hvd.init(): each ran all of it alone"
        assert (done.version, done.hint) == (0, status.hint)
        assert (await held(stage, job))[0] == (2, False)

    play(scene)


def test_a_short_script_without_init_is_known_at_its_end_and_held_its_hosts_since_its_begin(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=20, calls_init=False))
        done = await stage.stands(job, "succeeded")
        assert done.why == "2 workers ran this script without hvd.init(): each ran all of it alone"
        (line,) = await stage.events("ScriptsRan")
        assert len(line["workers"]) == 2 and line["since"] < line["at"] and not line["known"]

    play(scene)


def test_a_script_that_trains_together_outside_elastic_run_says_that_a_loss_ends_it(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG, outside="together"))
        status = await says(stage, job, "2 workers run this script without hvd.elastic.run: a lost host ends the job")
        assert (status.state, status.world_size, status.version) == ("running", 2, 0) and status.outside > outside.FEW
        assert status.hint == outside.HINTS[outside.Outside.TOGETHER]
        for worker in list(stage.world.workers.values()):
            worker.script.steps = 0
        done = await stage.stands(job, "succeeded")
        assert done.why == "2 workers ran this script without hvd.elastic.run: they trained together"
        assert done.outside > outside.FEW and done.hint == status.hint
        assert (await held(stage, job))[0] == (2, False)

    play(scene)


@pytest.mark.parametrize("gone", [True, False], ids=["host", "worker"])
def test_the_first_loss_ends_such_a_job_with_what_it_supports_and_nothing_is_started_again(play, gone):
    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG, outside="together"))
        await says(stage, job, "2 workers run this script without hvd.elastic.run: a lost host ends the job")
        victim = next(n for n in stage.world.workers if n.startswith(f"{second}/"))
        if gone:
            stage.world.kill(victim)
            with stage.cloud.lock:
                stage.cloud.market.interrupt(second, None, stage.cloud.clock(), action="terminate")
        else:
            stage.world.kill(victim, Exit(-9))
        failed = await stage.stands(job, "failed")
        what = f"host {second} was lost" if gone else f"{victim} was ended by SIGKILL"
        assert failed.why == f"{what}, and without hvd.elastic.run the other workers cannot go on"
        assert failed.error == outside.RESTART and BROKEN not in failed.error
        assert len(stage.world.started) == 2

    play(scene)


def test_an_error_on_one_worker_of_such_a_script_is_shown_and_not_that_of_its_peers(play):
    raised: list[str] = []

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG, outside="together",
                                        fails=lambda w: "ValueError: no" if raised[:1] == [w.name] else ""))
        await says(stage, job, "2 workers run this script without hvd.elastic.run: a lost host ends the job")
        raised.append(sorted(stage.world.workers)[1])
        failed = await stage.stands(job, "failed")
        assert failed.why == (f"the script failed on {raised[0]}, and without hvd.elastic.run the other workers cannot "
                              "go on")
        assert failed.error == "ValueError: no" and failed.hint == outside.HINTS[outside.Outside.TOGETHER]

    play(scene)


def test_workers_that_train_alone_outlive_a_loss(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=LONG, outside="alone"))
        await says(stage, job, "2 workers run this script without hvd.elastic.run: each trains alone")
        victim = min(stage.world.workers)
        stage.world.kill(victim, Exit(-9))
        await stage.until("another in its place", lambda: len(stage.world.started) == 3)
        await says(stage, job, "2 workers run this script without hvd.elastic.run: each trains alone")
        for worker in list(stage.world.workers.values()):
            worker.script.steps = 0
        done = await stage.stands(job, "succeeded")
        assert done.why.endswith("ran this script without hvd.elastic.run: each trained alone")

    play(scene)


def test_a_job_that_enters_elastic_run_has_no_such_line(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=20))
        done = await stage.stands(job, "succeeded")
        assert (done.version, done.outside, done.hint) == (20, 0, "")
        assert await held(stage, job) == []

    play(scene)


def test_a_script_that_imports_horovod_fails_with_the_line_to_change(play):
    error = """Traceback (most recent call last):
  File "/tmp/jobs/train-1/work/train.py", line 3, in <module>
    import horovod.torch as hvd
ModuleNotFoundError: No module named 'horovod'
"""

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(fails=lambda w: error if w.ticks > 3 else ""))
        failed = await stage.stands(job, "failed")
        line = "line 3 of train.py: write `import spotfleet.train as hvd` instead of `import horovod.torch as hvd`"
        assert failed.why.startswith("the script failed") and failed.why.endswith(f": {line}") and failed.hint == line

    play(scene)


def test_a_job_that_is_known_to_run_alone_is_not_said_to_wait_for_init():
    for kind, why in (("command", "2 workers run this script"),
                      ("", "2 workers run this script; hvd.init() has not been called yet")):
        tracker = outside.OutsideTracker("a-1", JobSpec("a", argv=("a.py",), kind=kind))
        tracker.kind = outside.Outside.NO_INIT
        assert tracker.why(2) == why
