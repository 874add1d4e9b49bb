"""What a dispatcher on an empty disk takes back from the checkpoint target, and what it keeps there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.codec import from_json, to_text
from spotfleet.dispatcher.checkpoints.backup import Backup
from spotfleet.dispatcher.checkpoints.ledger_restore import SealedJob, lock, sealed_name
from spotfleet.dispatcher.checkpoints.seals import SealKey
from spotfleet.dispatcher.disk import jobfile
from spotfleet.model import CheckpointSpec, JobState
from spotfleet.protocol.messages import JOB_KEY, Checkpoint, Exit
from spotfleet.protocol.proofs import MemberProof
from spotfleet.storage.folder import fleet_store
from tests.dispatcher.recovery.test_adoption import LONG, in_a_hurry, pids
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script
from tests.support.dispatcher.quarantine import left_there

LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="with --long only")
pytestmark = pytest.mark.usefixtures(in_a_hurry.__name__)


def with_target(folder: Path) -> object:
    folder.mkdir()
    return spec(checkpoint=CheckpointSpec(target=str(folder)))


async def copied(stage: Stage, job: str) -> None:
    """Wait until what is known now is at the target."""
    backup, journal = stage.daemon.dispatcher.backup, stage.daemon.dispatcher.core.journal
    await journal.flush()
    seq = journal.after(0)[-1][0]
    await stage.until("a copy", lambda: backup.copied_to >= seq and not backup.why)


def holds(path: Path, text: bytes) -> bool:
    """Is this a file, which others may just be replacing, with `text` in it?"""
    try:
        return path.is_file() and text in path.read_bytes()
    except FileNotFoundError:
        return False


def test_history_jobs_and_secrets_come_back_from_the_target(play, tmp_path: Path):
    target = tmp_path / "target"

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        ended = await stage.submit(Script(steps=5), (1, 1), "short")
        await stage.stands(ended, "succeeded")
        job = await stage.submit(LONG, (1, 2), secrets={"KEY": "s3cr3t-value"})
        await stage.at_version(job, 5)
        before = await stage.events()
        await copied(stage, job)
        assert not any(holds(path, b"s3cr3t-value") for path in target.rglob("*"))
        workers = pids(stage)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        after = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        assert pids(stage) == workers and after.repeated == 0
        again = await stage.events()
        assert again[:len(before)] == before
        assert (await stage.job(ended)).state == "succeeded"
        assert [e["restored"] for e in again if e["kind"] == "TakenOver"] == [True]
        assert await stage.submit(LONG, (1, 1), "next") == "next-1001"  # another job 3 may have been lost uncopied

    play(scene, with_target(target))


def test_secrets_that_this_disk_has_lost_stay_at_the_target(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)
        job = await stage.submit(LONG, (1, 1), secrets={"KEY": "s3cr3t-value"})
        await stage.at_version(job, 1)
        await copied(stage, job)
        there = fleet_store(stage.boot.spec.checkpoint.target, stage.boot.fleet, stage.boot.ca)

        def kept() -> str:
            return from_json(SealedJob, json.loads(lock(stage.boot.fleet_secret).decrypt(
                there.find(sealed_name(job)).read_bytes()))).secrets.get("KEY", "")

        assert kept() == "s3cr3t-value"
        await stage.stop_dispatcher()
        (stage.home / "jobs" / job / "secrets.json").write_text("{")
        stage.agents[host].shut = True
        await stage.start_dispatcher()
        assert stage.daemon.dispatcher.core.jobs[job].secrets_lost
        await copied(stage, job)
        assert kept() == "s3cr3t-value"
        stage.agents[host].shut = False
        await stage.until("the secrets are back", lambda: not stage.daemon.dispatcher.core.jobs[job].secrets_lost)
        await stage.call("POST", f"/v1/jobs/{job}/cancel")
        await stage.stands(job, "cancelled")
        await stage.until("the end is copied, without secrets", lambda: not kept())

    play(scene, replace(with_target(tmp_path / "target"), nodes=spec(1).nodes))


def test_a_job_whose_hosts_are_gone_too_comes_back_from_the_target(play, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=100_000), (1, 1), secrets={"KEY": "s3cr3t-value"})
        before = await stage.at_version(job, 1)
        await copied(stage, job)
        await stage.stop_dispatcher()
        for host in list(stage.agents):
            stage.cloud.interrupt(host, None)
        await stage.until("the end of all", lambda: not stage.agents)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        assert stage.daemon.dispatcher.core.jobs[job].secrets["KEY"] == "s3cr3t-value"
        stage.world.scripts["train"].steps = 20
        after = await stage.stands(job, "succeeded")
        assert after.generation > before.generation  # not founded anew: a checkpoint would be restored

    play(scene, replace(with_target(tmp_path / "target"), nodes=spec(1).nodes))


def test_a_new_machine_that_is_killed_while_it_begins_begins_again_where_it_was(play, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch):
    def killed(*_: object) -> None:
        raise KeyError("killed here")

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(LONG, (1, 1), secrets={"KEY": "s3cr3t-value"})
        await stage.at_version(job, 1)
        await copied(stage, job)
        await stage.lose_dispatcher_machine()
        for place in ("spotfleet.fleet.reconcile.record_listing",
                      "spotfleet.dispatcher.recovery.first_start._record_takeover",
                      "spotfleet.dispatcher.recovery.first_start._complete"):
            with monkeypatch.context() as patch, pytest.raises(KeyError):
                patch.setattr(place, killed)
                await stage.start_dispatcher()
            stage.daemon = None
        await stage.start_dispatcher()
        await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        assert [(e["host"], e["restored"]) for e in await stage.events("TakenOver")] == [("f-d-1", True)]
        assert not list(stage.home.glob(".restored"))

    play(scene, replace(with_target(tmp_path / "target"), nodes=spec(1).nodes))


def test_a_job_of_which_only_the_ledger_knows_is_said_to_be_lost(play, tmp_path: Path):
    target = tmp_path / "target"

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(LONG, (1, 1))
        await stage.at_version(job, 1)
        await copied(stage, job)
        await stage.stop_dispatcher()
        shutil.rmtree(next(target.glob("*/jobs")))
        stage.cloud.interrupt("f-0", None)
        await stage.until("the end of all", lambda: not stage.agents)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()

        async def lost() -> list[str]:
            return [e["why"] for e in await stage.events("JobChanged") if e["state"] == "failed"]

        why = await stage.until("the word", lost)
        assert why == ["lost with the dispatcher's machine: no host holds it, and no copy of it is kept"]

    play(scene, replace(with_target(target), nodes=spec(1).nodes))


def test_a_copy_that_is_a_generation_behind_makes_nobody_form_anew(play, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.checkpoints.backup.AGAIN_S", 0.1)
    target, away = tmp_path / "target", tmp_path / "away"

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(LONG)
        first = (await stage.at_version(job, 5)).generation
        await copied(stage, job)
        target.rename(away)
        stage.kill_worker(next(iter(stage.agents)), Exit(-9))
        await stage.until("the next generation", lambda: stage.world.history[-1][1] > first)
        before = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        workers, formed = pids(stage), len(stage.world.history)
        await stage.lose_dispatcher_machine()
        away.rename(target)
        await stage.start_dispatcher()
        after = await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 10)
        assert (after.generation, pids(stage), len(stage.world.history)) == (before.generation, workers, formed)

    play(scene, with_target(target))


def test_no_generation_of_which_a_checkpoint_is_at_the_target_is_ordered_again(play, tmp_path: Path):
    """The copy of the job's record was made before its first generation."""
    data = b"state 500"
    kept = Checkpoint(500, hashlib.sha256(data).hexdigest(), len(data), generation=40)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(LONG, (1, 1))
        await stage.at_version(job, 1)
        await copied(stage, job)
        await stage.stop_dispatcher()
        stage.cloud.interrupt("f-0", None)
        await stage.until("the end of all", lambda: not stage.agents)
        there = fleet_store(stage.boot.spec.checkpoint.target, stage.boot.fleet, stage.boot.ca)
        record, secrets = jobfile.load(stage.home / "jobs" / job)
        proof = MemberProof(job, secrets[JOB_KEY], SealKey(stage.boot.fleet_secret).grant(job, 40))
        behind = SealedJob(replace(record, state=JobState.QUEUED, groups=(), hosts=(), version=0), secrets)
        there.put(sealed_name(job), [lock(stage.boot.fleet_secret).encrypt(to_text(behind).encode())])
        left_there(stage, job, kept, data, proof)
        await stage.lose_dispatcher_machine()
        await stage.start_dispatcher()
        assert stage.daemon.dispatcher.core.jobs[job].checkpoints.awaited
        after = await stage.at_version(job, 501)  # from the checkpoint
        assert after.generation > 40
        path = f"/v1/jobs/{job}/checkpoints/600?generation={after.generation}&digest={kept.digest}"
        await stage.call("PUT", path, token=stage.token(after.workers[0].host), data=data)

    play(scene, replace(with_target(tmp_path / "target"), nodes=spec(1).nodes))


def test_a_target_that_is_still_being_mounted_is_waited_for_by_a_new_machine(play, tmp_path: Path):
    target, away = tmp_path / "target", tmp_path / "unmounted"

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(LONG, (1, 1))
        await stage.at_version(job, 1)
        await copied(stage, job)
        await stage.stop_dispatcher()
        stage.cloud.interrupt("f-0", None)
        await stage.until("the end of all", lambda: not stage.agents)
        target.rename(away)
        await stage.lose_dispatcher_machine()
        asyncio.get_running_loop().call_later(0.5, away.rename, target)
        await stage.start_dispatcher()
        assert list(stage.daemon.dispatcher.core.jobs) == [job]

    play(scene, replace(with_target(target), nodes=spec(1).nodes))


def test_a_target_that_cannot_be_read_by_a_new_machine_is_said_though_nothing_else_is_left(
        play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "target"

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await stage.stop_dispatcher()
        stage.cloud.interrupt("f-0", None)
        await stage.until("the end of all", lambda: not stage.agents)
        target.rename(tmp_path / "unmounted")
        await stage.lose_dispatcher_machine()
        monkeypatch.setattr("spotfleet.dispatcher.recovery.first_start.MOUNT_S", 0.0)
        await stage.start_dispatcher()
        (taken,) = await stage.events("TakenOver")
        assert not taken["restored"] and f"{target} is no folder here: is it mounted?" in taken["why"]

    play(scene, replace(with_target(target), nodes=spec(1).nodes))


def test_a_job_whose_end_finds_no_room_on_the_disk_is_copied_once_it_is_written(play, tmp_path: Path,
                                                                                monkeypatch: pytest.MonkeyPatch):
    full, save = [True], jobfile.try_save
    monkeypatch.setattr(jobfile, "try_save", lambda folder, record: not (record.state.ended and full[0])
                        and save(folder, record))

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=3), (1, 1))
        await stage.stands(job, "succeeded")
        await copied(stage, job)  # though not its record, which still says that it runs
        full[0] = False
        there = fleet_store(stage.boot.spec.checkpoint.target, stage.boot.fleet, stage.boot.ca)

        def ended() -> bool:
            sealed = there.find(sealed_name(job))
            return sealed is not None and b"succeeded" in lock(stage.boot.fleet_secret).decrypt(sealed.read_bytes())

        await stage.until("its end", ended)

    play(scene, replace(with_target(tmp_path / "target"), nodes=spec(1).nodes))


def test_records_do_not_wait_for_a_large_bundle(play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, copy, release = b"a working directory", Backup._copy_bundle, threading.Event()

    def slowly(backup: Backup, digest: str) -> None:
        release.wait(30)
        copy(backup, digest)

    monkeypatch.setattr(Backup, "_copy_bundle", slowly)

    async def scene(stage: Stage) -> None:
        digest = hashlib.sha256(data).hexdigest()
        await stage.call("PUT", f"/v1/bundles/{digest}", data=data)
        there = fleet_store(stage.boot.spec.checkpoint.target, stage.boot.fleet, stage.boot.ca)
        try:
            for name in ("train", "other"):
                job = await stage.submit(LONG, (1, 1), name, bundle=digest)
                await stage.until("its record", lambda job=job: there.find(sealed_name(job)))
            assert there.find(f"bundles/{digest}") is None
        finally:
            release.set()
        await stage.until("the bundle", lambda: there.find(f"bundles/{digest}"))

    play(scene, replace(with_target(tmp_path / "target"), nodes=spec(1).nodes))


@pytest.mark.parametrize("damage", ["newest", pytest.param("all", marks=LONGER)])
def test_a_damaged_copy_of_the_ledger_is_refused_and_the_fleet_goes_on(play, tmp_path: Path, damage: str):
    target = tmp_path / "target"

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        job = await stage.submit(LONG)
        await stage.at_version(job, 5)
        await copied(stage, job)
        await stage.submit(LONG, (1, 1), "queued")
        await copied(stage, job)
        workers = pids(stage)
        await stage.lose_dispatcher_machine()
        copies = sorted(target.glob("*/ledger/*.db"))
        for path in copies if damage == "all" else copies[-1:]:
            path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))
        await stage.start_dispatcher()
        await stage.at_version(job, max(w.version for w in stage.world.workers.values()) + 5)
        assert pids(stage) == workers
        taken = (await stage.events("TakenOver"))[0]
        assert "is refused: its digest is wrong" in taken["why"]
        assert taken["restored"] is (damage == "newest")

    play(scene, with_target(target))


def test_a_target_that_is_away_is_said_and_written_to_when_it_is_back(play, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.checkpoints.backup.AGAIN_S", 0.1)
    target = tmp_path / "target"

    async def scene(stage: Stage) -> None:
        target.rename(tmp_path / "unmounted")
        await stage.up(2)
        job = await stage.submit(LONG)
        await stage.at_version(job, 5)

        async def why() -> str:
            return (await stage.call("GET", "/v1/status"))[1]["why"]

        async def said() -> bool:
            return f"the checkpoint target {target} cannot be written to" in await why()

        await stage.until("what is wrong", said)
        assert not target.exists()  # made by nobody: it may be where something is to be mounted
        (tmp_path / "unmounted").rename(target)
        await copied(stage, job)
        await stage.until("another event", lambda: stage.daemon.dispatcher.backup.why == "")
        changes = [bool(e["why"]) for e in await stage.events("TargetChanged")]
        assert changes == [True, False] and "target" not in await why()

    play(scene, with_target(target))
