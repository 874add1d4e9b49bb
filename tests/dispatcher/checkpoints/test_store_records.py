"""Checkpoints in an object store: workers write and read them, the dispatcher only knows of them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints.store import CheckpointStore, RestoreInstruction
from spotfleet.fleet.domain.events import CheckpointKept, CheckpointLost
from spotfleet.model import CheckpointSpec
from spotfleet.protocol.messages import Checkpoint, WorkerReport
from spotfleet.storage.folder import name_of_fleet
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script

URL = "s3://bucket/f/job-1"


def at(version: int, generation: int = 1, url: str = URL) -> Checkpoint:
    digest = hashlib.sha256(b"%d" % version).hexdigest()
    return Checkpoint(version, digest, 70, generation, url=f"{url}/{version}-{generation}")


def given(folder: Path, *versions: int, keep: int = 2) -> CheckpointStore:
    store = CheckpointStore(folder, keep)
    store.url = URL
    for version in versions:
        hear(store, at(version))
    return store


def hear(store: CheckpointStore, made: Checkpoint | None = None, damaged: Checkpoint | None = None, fence: int = 0,
         generation: int = 5) -> None:
    store.receive_reports([WorkerReport("h/0/1", "job-1", checkpoint=made, damaged=damaged)], fence, generation)


def restart(store: CheckpointStore) -> CheckpointStore:
    return given(store.folder, keep=store.keep)


def test_the_newest_are_known_and_offered_and_survive_a_restart_without_a_file(tmp_path: Path):
    store = given(tmp_path, 10, 20, 30)
    assert store.take_news("job-1", 5.0) == [CheckpointKept(5.0, "job-1", v, 1, at(v).digest, 70, at(v).url)
                                             for v in (10, 20, 30)]
    for known in (store, restart(store)):
        assert known.kept == (at(20), at(30))
        assert known.offer() == RestoreInstruction(at(30))
        assert known.unsure() == []
        assert known.find(30) is None
    assert sorted(os.listdir(tmp_path)) == ["20-1.json", "30-1.json"]


def test_what_is_said_again_and_again_is_news_once(tmp_path: Path):
    store = given(tmp_path, 10, 10, 20, 30, 10)  # 10 has left the records; its writer has not written since
    assert [e.version for e in store.take_news("job-1", 5.0)] == [10, 20, 30]
    assert store.kept == (at(20), at(30))


@pytest.mark.parametrize(("made", "fence"), [
    (at(50, generation=2), 3),  # fenced
    (at(50, generation=1), 0),  # older than the newest kept
    (at(50, generation=6), 0),  # a generation that has never been
    (at(50, generation=2, url="s3://bucket/f/job-2"), 0),
    (at(50, generation=2, url=f"{URL}/../job-2"), 0),
    (replace(at(50, 2), digest="x"), 0),
    (replace(at(50, 2), part=0, parts=2), 0),
    (replace(at(50, 2), url=""), 0),
])
def test_what_cannot_be_this_jobs_newest_is_not_believed(tmp_path: Path, made: Checkpoint, fence: int):
    store = given(tmp_path)
    hear(store, at(10, generation=2))
    hear(store, made, fence=fence)
    assert store.kept == (at(10, generation=2),)


def test_a_fleet_without_such_a_target_believes_in_none(tmp_path: Path):
    store = CheckpointStore(tmp_path, 2)
    store.receive_reports([WorkerReport("h/0/1", "job-1", checkpoint=at(10))], 0, 5)
    assert store.kept == ()


def test_a_newer_generation_counts_more_than_a_higher_version(tmp_path: Path):
    store = given(tmp_path, 50, keep=1)
    hear(store, at(40, generation=2))
    assert restart(store).kept == (at(40, generation=2),)


def test_one_that_workers_cannot_use_is_set_aside_for_good_and_the_next_older_offered(tmp_path: Path):
    store = given(tmp_path, 10, 20)
    store.take_news("job-1", 5.0)
    hear(store, made=at(20), damaged=at(20))
    hear(store, made=at(20), damaged=at(20))  # said again, by its writer too
    assert store.take_news("job-1", 5.0) == [
        CheckpointLost(5.0, "job-1", 20, 1, at(20).digest, "h/0/1 could not use it")]
    assert store.problem == "checkpoint 20 was set aside, for h/0/1 could not use it; 10 is the newest whole one"
    for known in (store, restart(store)):
        hear(known, made=at(20))
        assert known.offer() == RestoreInstruction(at(10))


def test_a_newer_one_that_is_found_beside_a_lost_one_is_offered(tmp_path: Path):
    """Workers that had lost their dispatcher wrote on; those after them find what they left."""
    store = given(tmp_path, 10, 20)
    hear(store, made=at(90), damaged=at(20))
    assert store.offer() == RestoreInstruction(at(90))


def test_with_none_left_it_begins_anew_and_says_so(tmp_path: Path):
    store = given(tmp_path, 10)
    hear(store, damaged=at(10))
    assert (store.offer(), store.problem.endswith("no whole one is left")) == (RestoreInstruction(), True)


def test_a_full_disk_forgets_no_checkpoint_that_is_told_again(tmp_path: Path, monkeypatch):
    store = given(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spotfleet.dispatcher.checkpoints.store.write_json", full)
        hear(store, at(10))
    assert store.kept == () and "No space left" in store.problem
    hear(store, at(10))
    assert (store.kept, store.problem) == ((at(10),), "")


def test_the_object_that_a_worker_found_damaged_is_named(tmp_path: Path):
    store = given(tmp_path, 10, 20, keep=3)
    report = WorkerReport("h/0/1", "job-1", damaged=at(20), damaged_why="__0_0.distcp is not there")
    store.receive_reports([report], 0, 9)
    assert (store.newest, [e.why for e in store.take_news("job-1", 5.0) if isinstance(e, CheckpointLost)]) == (
        at(10), ["h/0/1 could not use it: __0_0.distcp is not there"])


@pytest.mark.parametrize("rest", ["10-1.json", "30-1.json"])
def test_a_record_that_was_damaged_is_set_aside(tmp_path: Path, rest: str):
    store = given(tmp_path, 10, 20, 30, keep=3)
    (tmp_path / rest).write_text("{")
    again = restart(store)
    assert len(again.kept) == 2
    assert again.problem.startswith(f"checkpoint {rest[:2]} was set aside, for its record {rest} cannot be read")


# ---- with the whole dispatcher


def fleet():
    return spec(1, checkpoint=CheckpointSpec(target="s3://bucket/runs", keep=2))


def wrote(stage: Stage, job: str, version: int) -> Checkpoint:
    """The worker of the only host has written this version."""
    worker = next(w for w in stage.world.workers.values() if w.order.job == job and w.exit is None)
    url = worker.order.orders.checkpoint_url
    made = at(version, worker.generation, url)
    stage.world.objects.add(made.digest)
    worker.checkpoint = made
    return made


async def knows(stage: Stage, job: str, version: int) -> bool:
    return (await stage.job(job)).checkpoint == version


async def loses_all(stage: Stage) -> int:
    """The version from which it goes on."""
    before = len(stage.world.history)
    for host in list(stage.agents):
        stage.cloud.interrupt(host, None)
    await stage.until("a new generation", lambda: len(stage.world.history) > before)
    return stage.world.history[before][3]


async def trained(stage: Stage, *versions: int) -> str:
    await stage.up(1)
    job = await stage.submit(Script(steps=10_000), (1, 1))
    await stage.at_version(job, 3)
    for version in versions:
        wrote(stage, job, version)
        await stage.until(f"version {version}", lambda version=version: knows(stage, job, version))
    return job


def test_workers_hear_where_to_write_and_after_a_total_loss_where_to_read(play):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500, 600, 700)
        folder = f"s3://bucket/runs/{name_of_fleet('f', stage.ca)}/{job}"
        orders = next(iter(stage.world.workers.values())).order.orders
        assert (orders.checkpoint_url, orders.checkpoint_keep) == (folder, 2)
        kept = [(e["version"], e["url"]) for e in await stage.events("CheckpointKept")]
        assert kept == [(v, f"{folder}/{v}-1") for v in (500, 600, 700)]
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        assert await loses_all(stage) == 700
        assert list((stage.home / "jobs" / job / "checkpoints").glob("*.ckpt")) == []

    play(scene, fleet())


def test_where_the_newest_cannot_be_used_it_goes_on_from_the_older(play):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500, 600)
        stage.world.objects.discard(at(600).digest)
        assert await loses_all(stage) == 500
        assert [e["version"] for e in await stage.events("CheckpointLost")] == [600]
        assert "500 is the newest whole one" in (await stage.job(job)).why

    play(scene, fleet())


def test_that_nothing_else_is_copied_there_is_said(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        why = (await stage.call("GET", "/v1/status"))[1]["why"]
        assert "records, jobs and what orphaned workers leave are not copied there" in why
        assert not any(e["kind"] == "TargetChanged" for e in await stage.events())

    play(scene, fleet())
