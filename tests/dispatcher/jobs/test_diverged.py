"""Jobs whose ranks differ where they should be equal: the newest checkpoint counts, or nothing does."""

from __future__ import annotations

import hashlib

from spotfleet.dispatcher.jobs.divergence import LIMIT, DivergenceTracker
from spotfleet.dispatcher.jobs.workers import JobWorker
from spotfleet.protocol.messages import WorkerReport
from tests.support.dispatcher.fake_fleet import Stage
from tests.support.dispatcher.fake_workers import Script

WHY = "at version 20, ranks that should hold equal training states differ: state.epoch is 3 on rank 0, 4 on rank 1"
LONG = 10_000


def differ_once() -> Script:
    """The first two workers find at version 20 that they differ."""
    return Script(steps=LONG, differs=lambda w: WHY if w.version >= 20 and w.name in first else "")


first: set[str] = set()


async def started(stage: Stage, *versions: int) -> str:
    await stage.up(2)
    first.clear()
    job = await stage.submit(differ_once())
    status = await stage.at_version(job, 3)
    for version in versions:
        data = b"state %d" % version
        path = f"/v1/jobs/{job}/checkpoints/{version}?generation=1&digest={hashlib.sha256(data).hexdigest()}"
        await stage.call("PUT", path, token=stage.token(status.workers[0].host), data=data)
    first.update(w.worker for w in status.workers)
    return job


def test_a_job_whose_ranks_differ_goes_on_from_its_newest_checkpoint(play):
    async def scene(stage: Stage) -> None:
        job = await started(stage, 9)
        await stage.until("a fresh generation", lambda: len(stage.world.history) > 1)
        name, _, members, version = stage.world.history[1]
        assert (name, version) == (job, 9) and not first & set(members)  # not from any state of theirs
        assert WHY in (await stage.at_version(job, 30)).why
        (told,) = await stage.events("RanksDiverged")
        assert (told["checkpoint"], told["why"]) == (9, WHY) and told["version"] >= 20

    play(scene)


def test_without_a_checkpoint_it_ends_with_an_error_that_says_so(play):
    async def scene(stage: Stage) -> None:
        job = await started(stage)
        ended = await stage.stands(job, "failed")
        assert ended.why == "the ranks' states differ, and there is no checkpoint to go on from"
        assert ended.error == WHY and len(stage.world.history) == 1 and ended.version >= 20
        assert [e["checkpoint"] for e in await stage.events("RanksDiverged")] == [0]

    play(scene)


def worker(version: int, diverged: str = "", past: bool = False) -> JobWorker:
    return JobWorker("h/0/1", "h", 0, 0, WorkerReport("h/0/1", "j", version=version, diverged=diverged), past=past)


def test_a_difference_that_comes_again_from_the_same_checkpoint_ends_the_job():
    tracker = DivergenceTracker()
    found = [tracker.update([worker(-1, WHY)], 9) for _ in range(LIMIT + 1)]
    assert [f.fails for f in found if f] == [False] * LIMIT + [True]
    assert [tracker.update([worker(-1, WHY)], newest).fails for newest in (10, 10)] == [False, False]  # progress


def test_reports_of_an_abandoned_run_do_not_count():
    tracker = DivergenceTracker()
    assert tracker.update([worker(12)], 9) is None
    assert tracker.update([worker(-1, WHY, past=True)], 9) is None and tracker.remark == ""
    assert tracker.update([worker(-1, WHY)], 9).version == 12
