"""Scripts that leave with status 0 before their end: they are started again, and fail the job at last."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.hosts import Departure
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.failures import blame_early
from spotfleet.dispatcher.jobs.restart import Cause
from spotfleet.dispatcher.jobs.workers import JobWorkers
from spotfleet.model import JobSpec
from spotfleet.protocol.messages import AgentReport, Exit, WorkerReport, WorkerState
from spotfleet.protocol.messages import Stage as At
from tests.support.dispatcher.fake_fleet import Stage
from tests.support.dispatcher.fake_workers import FakeWorker, Script

LONG = 10_000
EARLY = "the script left with status 0 before elastic.run had returned"


def test_a_worker_that_leaves_in_the_middle_of_training_is_replaced_and_an_event_says_why(play):
    left: list[str] = []

    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        job = await stage.submit(Script(steps=LONG, leaves=lambda w: w.name in left))
        await stage.at_version(job, 5)
        left.append(next(n for n in stage.world.workers if n.startswith(f"{second}/")))
        members = await stage.until("two train again", lambda: [
            m for _, _, m, _ in stage.world.history[1:] if len(m) == 2])
        assert left[0] not in members[0]
        await stage.at_version(job, stage.world.history[-1][3] + 5)
        (told,) = [e for e in await stage.events("JobChanged") if "status 0" in e["why"]]
        assert told["why"] == f"{left[0]}: {EARLY}"

    play(scene)


def test_a_job_whose_function_returned_on_no_rank_has_failed(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        failed = await stage.stands(await stage.submit(Script(steps=LONG, leaves=lambda w: w.version >= 5)), "failed")
        assert (failed.why, failed.error) == ("the script failed on every worker", EARLY)
        assert len(stage.world.started) == 2

    play(scene)


def test_a_job_that_fails_with_the_report_of_a_newer_step_is_shown_at_that_step(play):
    def leaves(worker: FakeWorker) -> bool:
        if worker.version >= 5:
            worker.version = 50  # reported together with its end
        return worker.version == 50

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        failed = await stage.stands(await stage.submit(Script(steps=LONG, leaves=leaves), (1, 1)), "failed")
        assert (failed.why, failed.error, failed.version) == ("the script failed", EARLY, 50)
        assert (await stage.events("JobProgress"))[-1]["version"] == 50

    play(scene)


def test_a_worker_that_leaves_before_init_each_time_fails_the_job_that_waits_for_it(play):
    async def scene(stage: Stage) -> None:
        _, second = await stage.up(2)
        script = Script(steps=LONG, leaves=lambda w: w.name.startswith(f"{second}/"))
        failed = await stage.stands(await stage.submit(script), "failed")
        assert failed.why == "the script failed 3 times in a row without progress"
        assert failed.error == "the script left with status 0 before hvd.init() had returned"
        assert len(stage.world.started) == 4

    play(scene)


def test_a_restarted_dispatcher_knows_which_scripts_had_ended_before_init(play):
    left: list[str] = []

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        script = Script(steps=LONG, calls_init=False, leaves=lambda w: w.name in left)
        job = await stage.submit(script)
        await stage.until("both run", lambda: len(stage.world.workers) == 2)
        left.append(min(stage.world.workers))
        await stage.until("its end is on disk",
                          lambda: stage.daemon.dispatcher.core.jobs[job].record.unfinished == tuple(left))
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        script.calls_init = True  # the other one has come to it
        await stage.at_version(job, 5)
        assert left[0] not in stage.world.history[0][2] and len(stage.world.started) == 3

    play(scene)


def test_a_restarted_dispatcher_knows_whose_function_had_returned(play):
    async def scene(stage: Stage) -> None:
        await stage.up(2)
        script = Script(steps=20, tail=LONG)
        job = await stage.submit(script)
        await stage.until("rank 1 has ended", lambda: stage.daemon.dispatcher.core.jobs[job].record.done)
        assert stage.daemon.dispatcher.core.jobs[job].record.unfinished == ()
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        script.tail = 0
        done = await stage.stands(job, "succeeded")
        assert (done.version, done.tail, len(stage.world.started)) == (20, "", 2)

    play(scene)


# ---- the rule

SCRIPT, COMMAND = JobSpec("j", argv=("train.py",)), JobSpec("j", run="python train.py")
CONTEXT = JobContext(1.0, 1e9, ("a", "b"), (("a", 0), ("b", 0)), {})
INIT = "the script left with status 0 before hvd.init() had returned"


def pair(ended: At, other: At) -> JobWorkers:
    """Two workers that have come to these stages; the first one's script has ended with status 0."""
    workers = JobWorkers("j")
    for host, stage, exit in (("a", ended, Exit(0, done=True)), ("b", other, None)):
        name = workers.add(f"{host}/0/1", 0).name
        state = WorkerState(WorkerReport(name, "j", stage), 0, 1, exit)
        workers.receive(AgentReport(host, "agent", "127.0.0.1", 1, (state,)))
    return workers


@pytest.mark.parametrize(("ended", "other", "generation", "why"), [
    (At.STARTING, At.STARTING, 0, ""),  # no worker has called hvd.init()
    (At.STARTING, At.INIT, 0, INIT),  # the other one waits for it
    (At.STARTING, At.INIT, 1, INIT),
    (At.INIT, At.STARTING, 0, INIT),  # it left inside hvd.init()
    (At.INIT, At.INIT, 0, INIT),
    (At.INIT, At.INIT, 1, ""),  # a script without elastic.run
    (At.STARTING, At.READY, 1, EARLY),
    (At.INIT, At.READY, 1, EARLY),
    (At.READY, At.INIT, 1, EARLY),
    (At.READY, At.READY, 2, EARLY),
    (At.READY, At.FINISHED, 2, EARLY),  # it left in the last barrier
    (At.FINISHED, At.READY, 2, ""),
    (At.FINISHED, At.FINISHED, 2, ""),
])
def test_the_other_workers_show_how_far_a_script_has_to_come(ended, other, generation, why):
    workers = pair(ended, other)
    found = blame_early(workers, SCRIPT, generation, 0, CONTEXT)
    assert [(w.name, w.cause, w.error) for w in found] == ([("a/0/1", Cause.USER, why)] if why else [])
    assert workers.all["a/0/1"].done is not bool(why)


def test_a_job_with_steps_trains_also_while_all_its_workers_start_again():
    assert [w.error for w in blame_early(pair(At.STARTING, At.STARTING), SCRIPT, 2, 7, CONTEXT)] == [EARLY]


def test_a_command_may_end_before_init_and_not_in_the_middle_of_training():
    assert blame_early(pair(At.STARTING, At.READY), COMMAND, 1, 7, CONTEXT) == []
    assert [w.error for w in blame_early(pair(At.READY, At.READY), COMMAND, 1, 7, CONTEXT)] == [EARLY]


def test_an_end_on_a_host_that_the_cloud_takes_and_one_that_was_ordered_are_losses_and_nobodys_fault():
    noticed = SimpleNamespace(leaving=Departure(60.0, "notice"))
    taken = JobContext(1.0, 1e9, ("a", "b"), (), {"a": noticed})  # type: ignore[dict-item]
    workers = pair(At.READY, At.READY)
    assert blame_early(workers, SCRIPT, 1, 7, taken) == [] and workers.all["a/0/1"].cause is Cause.LOST
    workers = pair(At.READY, At.READY)
    workers.all["a/0/1"].wanted = False
    assert blame_early(workers, SCRIPT, 1, 7, CONTEXT) == [] and workers.all["a/0/1"].cause is Cause.LOST


def test_an_abandoned_run_tells_nothing_of_the_next_one():
    workers = pair(At.STARTING, At.READY)
    workers.all["b/0/1"].past = True
    assert blame_early(workers, SCRIPT, 0, 0, CONTEXT) == []
    workers = pair(At.READY, At.READY)
    workers.all["a/0/1"].past = True
    assert blame_early(workers, SCRIPT, 1, 7, CONTEXT) == []
