"""Scripts after training: rank 0's end is the job's end, and the failures of other ranks are reported."""

from __future__ import annotations

from spotfleet.dispatcher.jobs import failures
from spotfleet.dispatcher.jobs import job as job_module
from spotfleet.protocol.messages import Exit
from spotfleet.protocol.messages import Stage as At
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import FakeWorker, Script

LONG = 10_000
ERROR = "Traceback (most recent call last):\n  ...\nValueError: no"
FAILED = "the script failed on rank 1 after training: ValueError: no"


def others_fail(worker: FakeWorker) -> str:
    """Raise after training, except on rank 0."""
    return ERROR if worker.stage is At.FINISHED and worker.assignment and worker.assignment.rank > 0 else ""


def test_a_failure_on_another_rank_is_shown_at_once_and_in_the_last_line_of_a_job_that_succeeds(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        script = Script(steps=20, tail=LONG, fails=others_fail)
        job = await stage.submit(script)

        async def shown() -> bool:
            return (await stage.job(job)).why.endswith(f"runs the script's rest; {FAILED}")

        await stage.until("status", shown)
        assert [e["state"] for e in await stage.events("JobChanged") if e["why"] == FAILED] == ["running"]
        script.tail = 0
        done = await stage.stands(job, "succeeded")
        assert (done.why, done.tail) == (f"rank 0's script has ended; {FAILED}", FAILED)
        assert (await stage.events("JobChanged"))[-1]["why"] == done.why

    play(scene)


def test_a_failure_that_an_earlier_dispatcher_saw_is_in_the_last_line(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        script = Script(steps=20, tail=LONG, fails=others_fail)
        job = await stage.submit(script)
        await stage.until("it is recorded", lambda: stage.daemon.dispatcher.core.jobs[job].record.tail)
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        script.tail = 0
        assert (await stage.stands(job, "succeeded")).tail == FAILED

    play(scene)


def test_rank_0_decides_also_where_the_script_fails_on_all_others(play):
    async def scene(stage: Stage) -> None:
        await stage.up(4)
        job = await stage.submit(Script(steps=20, tail=30, fails=others_fail), (4, 4))
        done = await stage.stands(job, "succeeded")
        assert sorted(done.tail.split("; ")) == [FAILED.replace("rank 1", f"rank {rank}") for rank in (1, 2, 3)]
        assert len(stage.world.started) == 4

    play(scene, spec(target=4))


def test_a_script_that_fails_on_every_rank_after_training_fails_the_job(play):
    def fails(worker: FakeWorker) -> str:
        return others_fail(worker) or (ERROR if worker.tail_ticks > 5 else "")

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(Script(steps=20, tail=LONG, fails=fails))
        failed = await stage.stands(job, "failed")
        assert (failed.why, failed.error) == ("the script failed on every worker", ERROR)
        assert len(stage.world.started) == 2

    play(scene)


def test_a_worker_that_is_killed_after_training_is_named(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        script = Script(steps=20, tail=LONG, hangs=True)
        job = await stage.submit(script)
        first = await stage.until("training has ended", lambda: stage.daemon.dispatcher.core.jobs[job]._finished)
        stage.world.kill(first[1], Exit(-9))
        script.tail = 0
        assert (await stage.stands(job, "succeeded")).tail == "rank 1 was ended by SIGKILL after training"

    play(scene)


def test_a_script_that_does_not_end_is_named_when_it_is_cut_off(play, monkeypatch):
    monkeypatch.setattr(job_module, "TAIL_S", 0.3)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        done = await stage.stands(await stage.submit(Script(steps=20, hangs=True)), "succeeded")
        cut = "rank 1 was ended: its script still ran 0 s after rank 0's"
        assert (done.why, done.tail) == (f"rank 0's script has ended; {cut}", cut)
        assert any(e["why"] == cut for e in await stage.events("JobChanged"))

    play(scene)


def test_many_failures_are_counted():
    assert failures.clauses(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"
    assert failures.clauses(["a", "b", "c"]) == "a; b; c" and failures.clauses([]) == ""
