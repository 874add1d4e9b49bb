"""Checkpoints at the target: copied there beside everything else, and brought back where nothing newer is left."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.checkpoints import replica
from spotfleet.dispatcher.checkpoints.replica import SyncPlan, diff
from spotfleet.dispatcher.checkpoints.store import CheckpointStore
from spotfleet.dispatcher.checkpoints.target_folder import TargetFolder
from spotfleet.dispatcher.disk import files
from spotfleet.model import CheckpointSpec
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.folder import QUARANTINE, checkpoint_name, fleet_store
from tests.support.dispatcher.checkpoint_sets import files_of, read, whole, write
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script
from tests.support.dispatcher.quarantine import left_files, left_there, point, target_folder

LONG = 10_000


# ---- what is to be done


def at(version: int, generation: int = 1, digest: str = "d") -> Checkpoint:
    return Checkpoint(version, digest, 1, generation)


@pytest.mark.parametrize(("here", "there", "names", "expected"), [
    ([at(1), at(2)], [], [], SyncPlan((at(2), at(1)), ())),  # newest first
    ([at(1), at(2)], [at(1), at(2)], [at(1), at(2)], SyncPlan((), ())),
    ([at(2), at(3)], [at(1), at(2)], [at(1), at(2)], SyncPlan((at(3),), (at(1),))),
    ([at(2)], [at(2, digest="other")], [at(2)], SyncPlan((at(2),), ())),  # the one here has been checked
    ([at(2)], [], [at(2)], SyncPlan((at(2),), ())),  # a file whose record was never written
    ([at(5, 1)], [at(3, 2), at(4, 2)], [at(3, 2), at(4, 2)], SyncPlan((), ())),  # theirs are of a later generation
    ([], [at(1)], [at(1)], SyncPlan((), ())),
])
def test_the_target_holds_the_newest_of_both_sides(here, there, names, expected):
    assert diff(here, there, names, keep=2) == expected


def test_what_a_killed_process_was_just_bringing_back_is_swept(tmp_path: Path):
    durable, home = fleet_store(str(tmp_path), "f", "CERTIFICATE"), tmp_path / "home"
    durable.put(checkpoint_name("j", 5, 1), [data_of(5)])
    folder = TargetFolder(durable, str(tmp_path), "j")
    with pytest.raises(FileNotFoundError):  # it was swept in the midst of it
        folder.fetch(of(5), home / "jobs/j/checkpoints/5-1.ckpt", lambda: files.sweep(home))


@pytest.mark.parametrize("awaited", [False, True])
def test_a_target_that_stays_away_is_given_up_unless_a_checkpoint_is_known_to_be_there(tmp_path: Path, awaited: bool):
    """What is begun anew would end by pruning what lies there."""
    boot = SimpleNamespace(spec=spec(1, checkpoint=CheckpointSpec(target=str(tmp_path / "away"))), fleet="f", ca="CA")
    store, there = CheckpointStore(tmp_path / "job", 2), replica.Replica(boot)
    store.awaited, store.target = awaited, boot.spec.checkpoint.target
    store.need(True)
    store.seeks_since -= replica.LOOK_LIMIT_S
    assert asyncio.run(there._search("j", store)) is not awaited
    there.close()


# ---- with the whole dispatcher


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def fleet(target: Path):
    return spec(1, checkpoint=CheckpointSpec(target=str(target)))


def data_of(version: int) -> bytes:
    return b"state %d" % version


def of(version: int, generation: int = 1) -> Checkpoint:
    return point(version, data_of(version), generation)


async def trained(stage: Stage, *versions: int) -> str:
    """A job that trains on one host and has kept these checkpoints; the job."""
    await stage.up(1)
    job = await stage.submit(Script(steps=LONG), (1, 1))
    host = (await stage.at_version(job, 3)).workers[0].host
    for version in versions:
        path = f"/v1/jobs/{job}/checkpoints/{version}?generation=1&digest={of(version).digest}"
        await stage.call("PUT", path, token=stage.token(host), data=data_of(version))
    return job


def held_there(stage: Stage, job: str) -> list[str]:
    return [Path(n).name for n in target_folder(stage).names(f"jobs/{job}/checkpoints")]


async def loses_all(stage: Stage) -> int:
    """The version from which it goes on."""
    before = len(stage.world.history)
    for host in list(stage.agents):
        stage.cloud.interrupt(host, None)
    await stage.until("a new generation", lambda: len(stage.world.history) > before)
    return stage.world.history[before][3]


async def why_of(stage: Stage, job: str) -> str:
    return (await stage.job(job)).why


def test_what_is_kept_is_copied_and_as_many_are_kept_there(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500, 600, 700)
        names = ["600-1.ckpt", "600-1.json", "700-1.ckpt", "700-1.json"]
        await stage.until("the copies", lambda: held_there(stage, job) == names)
        found = target_folder(stage).find(checkpoint_name(job, 700, 1))
        assert found is not None and found.read_bytes() == data_of(700)

    play(scene, fleet(target))


def test_a_target_that_refuses_is_told_and_tried_again_and_the_job_goes_on(play, target: Path, monkeypatch):
    monkeypatch.setattr(replica, "AGAIN_S", 0.1)

    async def scene(stage: Stage) -> None:
        target.rmdir()
        job = await trained(stage, 500)
        await stage.until("its word", lambda: told(stage, job, "not copied to"))
        await stage.at_version(job, (await stage.job(job)).version + 5)
        target.mkdir()
        await stage.until("the copy", lambda: held_there(stage, job) == ["500-1.ckpt", "500-1.json"])
        await stage.until("no word of it any more", lambda: quiet(stage, job))

    play(scene, fleet(target))


async def told(stage: Stage, job: str, words: str) -> bool:
    return words in await why_of(stage, job)


async def quiet(stage: Stage, job: str) -> bool:
    return "copied" not in await why_of(stage, job)


def test_where_this_disk_has_lost_all_the_copy_is_restored(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        await stage.until("the copy", lambda: held_there(stage, job) == ["500-1.ckpt", "500-1.json"])
        shutil.rmtree(stage.home / "jobs" / job / "checkpoints")
        assert await loses_all(stage) == 500
        assert (await stage.job(job)).checkpoint == 500

    play(scene, fleet(target))


def test_a_newer_one_that_hosts_without_a_dispatcher_left_is_restored_and_a_half_one_is_not(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        left_there(stage, job, of(600), data_of(600))
        half = f"jobs/{job}/{QUARANTINE}/900-1.ckpt"
        target_folder(stage).put(half, [data_of(900)])  # its host died before the record
        assert await loses_all(stage) == 600
        await stage.until("its start", lambda: stage.world.history[-1][3] == 600)
        await stage.until("the kept copy", lambda: "600-1.json" in held_there(stage, job))
        await stage.until("the rest", lambda: target_folder(stage).names(f"jobs/{job}/{QUARANTINE}") == [half])

    play(scene, fleet(target))


def test_files_that_several_hosts_left_are_restored_if_all_of_a_manifest_are_there_and_right(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        sets = {version: files_of(version, pieces=(b"one of %d" % version, b"two")) for version in (600, 700, 800, 900)}
        left_files(stage, job, sets[600])
        left_files(stage, job, sets[700], wrong="__1_0.distcp")
        left_files(stage, job, sets[800], but="__1_0.distcp")
        left_files(stage, job, sets[900], but="manifest.json")
        assert await loses_all(stage) == 600
        assert [e["version"] for e in await stage.events("CheckpointLost")] == [700]
        store = stage.daemon.dispatcher.core.jobs[job].checkpoints
        assert read(store.path(store.newest)) == sets[600]
        there = target_folder(stage)
        await stage.until("the whole one there", lambda: there.find(f"jobs/{job}/checkpoints/600-1.json") is not None)
        assert read(there.path(f"jobs/{job}/checkpoints/600-1")) == sets[600]
        assert not any("700-1" in n for n in there.names(f"jobs/{job}"))
        await stage.until("its end in quarantine", lambda: not any("600-1" in n for n in there.names(
            f"jobs/{job}/{QUARANTINE}")))

    play(scene, fleet(target))


def test_what_a_killed_process_had_half_copied_is_no_checkpoint_and_is_copied_again(tmp_path: Path):
    durable, files = fleet_store(str(tmp_path / "target"), "f", "CERTIFICATE"), files_of(5)
    (tmp_path / "target").mkdir()
    made, here = whole(files), write(files, tmp_path / "here")
    folder = TargetFolder(durable, str(tmp_path / "target"), "j")
    for name in list(files)[:2]:
        durable.put(f"jobs/j/checkpoints/5-1/{name}", [files[name]])
    assert (folder.whole(), folder.names()) == ([], [Checkpoint(5, "", 0, 1)])
    assert folder.put(made, here) and folder.whole() == [made]
    assert read(durable.path("jobs/j/checkpoints/5-1")) == files
    durable.delete("jobs/j/checkpoints/5-1/.metadata")
    assert folder.whole() == []
    folder.drop(made)
    assert durable.names() == [] and not durable.path("jobs/j/checkpoints/5-1").exists()
    (here / "__0_0.distcp").write_bytes(b"damaged here")
    assert not folder.put(made, here) and folder.whole() == []


def test_parts_that_several_hosts_left_are_joined_if_all_are_there_and_right(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        for version, parts in ((600, 3), (700, 3), (800, 4)):  # one part of 800 is missing
            for index in range(3):
                data = data_of(version)[index::3]
                wrong = b"?" if (version, index) == (700, 1) else b""
                left_there(stage, job, point(version, data, part=index, parts=parts), data + wrong)
        before = hashlib.sha256(b"".join(data_of(600)[index::3] for index in range(3))).hexdigest()
        assert await loses_all(stage) == 600
        assert [e["version"] for e in await stage.events("CheckpointLost")] == [700]
        kept = stage.daemon.dispatcher.core.jobs[job].checkpoints.newest
        assert (kept.digest, kept.parts, kept.bytes) == (before, 1, len(data_of(600)))
        names = ["500-1.ckpt", "500-1.json", "600-1.ckpt", "600-1.json"]
        await stage.until("the whole one there", lambda: set(names) <= set(held_there(stage, job)))
        assert not any("700-1" in n for n in target_folder(stage).names(f"jobs/{job}"))

    play(scene, fleet(target))


def test_of_damaged_copies_the_next_older_is_restored_and_they_are_dropped(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        left_there(stage, job, of(600), data_of(600))
        left_there(stage, job, of(700), b"state 7")
        assert await loses_all(stage) == 600
        assert [e["version"] for e in await stage.events("CheckpointLost")] == [700]
        assert not any("700-1" in n for n in target_folder(stage).names(f"jobs/{job}"))

    play(scene, fleet(target))


def test_a_target_that_cannot_be_read_keeps_nobody_from_what_is_kept_here(play, target: Path):
    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        await stage.until("the copy", lambda: held_there(stage, job) == ["500-1.ckpt", "500-1.json"])
        shutil.rmtree(target)
        assert await loses_all(stage) == 500
        assert await told(stage, job, "cannot be read")

    play(scene, fleet(target))


def test_with_nothing_kept_here_a_target_that_is_away_is_waited_for_and_not_for_ever(play, target: Path, monkeypatch):
    monkeypatch.setattr(replica, "LOOK_AGAIN_S", 0.05)
    looks, offers = [], TargetFolder.offers
    monkeypatch.setattr(TargetFolder, "offers", lambda folder: looks.append(1) or offers(folder))

    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        await stage.until("the copy", lambda: held_there(stage, job) == ["500-1.ckpt", "500-1.json"])
        shutil.rmtree(stage.home / "jobs" / job / "checkpoints")
        os.rename(target, target.with_name("away"))
        before, looked = len(stage.world.history), len(looks)
        for host in list(stage.agents):
            stage.cloud.interrupt(host, None)
        await stage.until("its word", lambda: told(stage, job, "for a newer checkpoint"))
        await stage.until("another worker", lambda: is_ready(stage))
        await stage.until("several looks", lambda: len(looks) >= looked + 5)
        assert len(stage.world.history) == before
        os.rename(target.with_name("away"), target)
        await stage.until("a new generation", lambda: len(stage.world.history) > before)
        assert stage.world.history[before][3] == 500

        monkeypatch.setattr(replica, "LOOK_LIMIT_S", 0.5)
        shutil.rmtree(target)
        shutil.rmtree(stage.home / "jobs" / job / "checkpoints")
        assert await loses_all(stage) == 0

    play(scene, fleet(target))


def test_what_is_known_to_be_there_is_waited_for_until_it_is_here(play, target: Path, monkeypatch):
    monkeypatch.setattr(replica, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(replica, "LOOK_LIMIT_S", 0.2)
    tries, room, fetch = [], [], TargetFolder.fetch

    def full(*args: object) -> bool:
        tries.append(1)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fetch(*args)

    monkeypatch.setattr(TargetFolder, "fetch", full)

    async def scene(stage: Stage) -> None:
        job = await trained(stage, 500)
        await stage.until("the copy", lambda: held_there(stage, job) == ["500-1.ckpt", "500-1.json"])
        shutil.rmtree(stage.home / "jobs" / job / "checkpoints")
        going_on = asyncio.create_task(loses_all(stage))
        await stage.until("its word", lambda: told(stage, job, "cannot be brought here: No space left on device"))
        await stage.until("a while", lambda: len(tries) >= 10)  # longer than one is waited for that may not be there
        room.append(1)
        assert await going_on == 500

    play(scene, fleet(target))


def is_ready(stage: Stage) -> bool:
    return any(w.stage.value == "ready" for w in stage.world.workers.values())
