"""Damaged files of a dispatcher's home: each way of damage, each file, and what a start does without them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.bootstrap import WHEEL
from spotfleet.codec import to_json
from spotfleet.dispatcher.checkpoints.ledger_restore import Restored, found_before
from spotfleet.dispatcher.disk import jobfile, wheel
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.jobfile import JobRecord, StoredJob
from spotfleet.dispatcher.journal import Journal
from spotfleet.dispatcher.lifecycle.shutdown import FleetShutdown
from spotfleet.dispatcher.recovery.lost_jobs import find_jobs, names_in, workers_in
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import (
    DownDecided,
    Event,
    GenerationFormed,
    HostDraining,
    JobChanged,
    JobsPruned,
    JobSubmitted,
    TakenOver,
    event_from_json,
)
from spotfleet.model import JobSpec, JobState
from spotfleet.storage.json_file import digest_of_json
from tests.dispatcher.recovery.test_power_cut import packed
from tests.support.damage import EACH_UNREADABLE_WAY, EACH_WAY, Damage, missing
from tests.support.dispatcher.fake_fleet import Stage, spec
from tests.support.dispatcher.fake_workers import Script


def refuse_records(patch: pytest.MonkeyPatch) -> list[Path]:
    """As a full disk does. Returns the files that were refused so far."""
    refused: list[Path] = []

    def refuse(path: Path, *_: object) -> None:
        refused.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(jobfile, "write_json", refuse)
    return refused


SECRETS = {"KEY": "hidden-value", "JOB_KEY": "0" * 64}
NAME = "one-1"
SUBMITTED = JobSubmitted(1000.0, NAME, "one", "train.py", 1, 2)
FORMED = GenerationFormed(1001.0, NAME, 3, ("h-1/0/2-5", "h-2/0/2-6"), "start", "")
SUCCEEDED = JobChanged(1002.0, NAME, JobState.SUCCEEDED, "rank 0's script has ended", 70)


def record(state: JobState = JobState.RUNNING) -> JobRecord:
    groups = ((3, ("h-1/0/2-5", "h-2/0/2-6")),)
    return JobRecord(NAME, JobSpec("one", argv=("train.py",), max_workers=2), 1000.0, state, groups=groups,
                     hosts=("h-1", "h-2"), ended_at=1002.0 if state.ended else 0.0)


def stored(home: Path, state: JobState = JobState.RUNNING) -> Path:
    """A home with one job and its secrets; the job's folder."""
    folder = home / "jobs" / NAME
    written = record(state)
    if not state.ended:
        written = replace(written, secrets_digest=digest_of_json(SECRETS))
        jobfile.save_secrets(folder, SECRETS)
    jobfile.save(folder, written)
    return folder


def reports(damage: DamagedFiles) -> list[tuple[str, bool]]:
    """Each report's file, and whether the file was kept."""
    return [(event.file, bool(event.kept_as)) for event in damage.take_news()]


# ---- job.json


def test_what_is_left_of_a_pruned_job_makes_no_job(tmp_path: Path):
    (tmp_path / "jobs" / NAME / "outputs").mkdir(parents=True)
    found = DamagedFiles(tmp_path)
    assert find_jobs(tmp_path, [SUBMITTED, FORMED, JobsPruned(1003.0, (NAME,), 9)], found) == ([], {})
    assert find_jobs(tmp_path, [SUBMITTED, SUCCEEDED, JobsPruned(1003.0, (NAME,), 9)], found) == ([], {})
    assert reports(found) == []


@pytest.mark.parametrize("events", [[SUBMITTED, FORMED], [SUBMITTED, FORMED, SUCCEEDED]], ids=["live", "ended"])
def test_a_job_that_has_left_memory_is_not_lost(tmp_path: Path, events: list[Event]):
    stored(tmp_path, JobState.SUCCEEDED)
    (tmp_path / "past").mkdir()
    (tmp_path / "jobs" / NAME).rename(tmp_path / "past" / NAME)
    (tmp_path / "jobs" / NAME / "outputs").mkdir(parents=True)  # written by a request that came late
    found = DamagedFiles(tmp_path)
    assert find_jobs(tmp_path, events, found) == ([], {}) and reports(found) == []
    assert not (tmp_path / "jobs" / NAME / "job.json").exists()


@EACH_WAY
def test_a_running_job_without_its_file_is_lost_and_asked_for(tmp_path: Path, damage: Damage):
    folder, found = stored(tmp_path), DamagedFiles(tmp_path)
    other = tmp_path / "jobs" / "two-2"
    jobfile.save(other, replace(record(), job="two-2"))
    damage(folder / "job.json")
    jobs, lost = find_jobs(tmp_path, [SUBMITTED, FORMED], found)
    assert [job.record.job for job in jobs] == ["two-2"]  # the rest goes on
    assert {name: job.hosts for name, job in lost.items()} == {NAME: frozenset({"h-1", "h-2"})}
    assert reports(found) == [(f"jobs/{NAME}/job.json", damage is not missing)]
    assert not (folder / "job.json").exists() and (folder / "secrets.json").exists()  # its hosts may bring it back


@EACH_WAY
def test_an_ended_job_without_its_file_is_made_again_from_the_ledger(tmp_path: Path, damage: Damage):
    folder, found = stored(tmp_path, JobState.SUCCEEDED), DamagedFiles(tmp_path)
    damage(folder / "job.json")
    (job,), lost = find_jobs(tmp_path, [SUBMITTED, FORMED, SUCCEEDED], found)
    assert (lost, job.record.state, job.record.why, job.record.version) == ({}, JobState.SUCCEEDED, SUCCEEDED.why, 70)
    assert reports(found) == [(f"jobs/{NAME}/job.json", damage is not missing)]
    assert len(list(folder.glob("job.json.damaged-*"))) == (damage is not missing)
    (again,), _ = find_jobs(tmp_path, [SUBMITTED, FORMED, SUCCEEDED], found)
    assert (again.record, reports(found)) == (job.record, [])  # once for each damage


@EACH_WAY
def test_a_job_that_nothing_else_knows_keeps_its_number_but_not_its_secrets(tmp_path: Path, damage: Damage):
    folder, found = stored(tmp_path), DamagedFiles(tmp_path)
    damage(folder / "job.json")
    assert find_jobs(tmp_path, [], found) == ([], {})
    assert jobfile.name_for(JobSpec("new"), names_in(tmp_path, []), 0) == "new-2"
    assert not list(folder.glob("secrets.json*"))


def test_a_job_of_the_ledger_without_a_folder_keeps_its_number(tmp_path: Path):
    assert jobfile.name_for(JobSpec("new"), names_in(tmp_path, [SUBMITTED, SUCCEEDED]), 0) == "new-2"
    assert find_jobs(tmp_path, [SUBMITTED, SUCCEEDED], DamagedFiles(tmp_path)) == ([], {})  # its end is known


def test_a_changed_value_in_valid_json_is_found(tmp_path: Path):
    path = stored(tmp_path) / "job.json"
    path.write_text(path.read_text().replace('"train.py"', '"drain.py"'))
    with pytest.raises(ValueError, match="it has another content than was written"):
        jobfile.load_record(path.parent)


def test_a_file_of_an_earlier_release_is_read_without_a_digest(tmp_path: Path):
    path = stored(tmp_path) / "job.json"
    value = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("sha256", "secrets_digest")}
    path.write_text(json.dumps(value))
    (job,), _ = find_jobs(tmp_path, [SUBMITTED], DamagedFiles(tmp_path))
    assert (job.record, job.secrets, job.secrets_lost) == (record(), SECRETS, False)


# ---- secrets.json, boots.json, down.json, a manifest


@EACH_WAY
def test_a_job_whose_secrets_are_damaged_has_none(tmp_path: Path, damage: Damage):
    folder, found = stored(tmp_path), DamagedFiles(tmp_path)
    damage(folder / "secrets.json")
    (job,), lost = find_jobs(tmp_path, [SUBMITTED], found)
    assert (job.secrets, job.secrets_lost, lost) == ({}, True, {})
    (event,) = found.take_news()
    assert event.file == f"jobs/{NAME}/secrets.json" and "hidden-value" not in event.text


def test_other_secrets_than_those_that_were_given_are_not_used(tmp_path: Path):
    path = stored(tmp_path) / "secrets.json"
    path.write_text(path.read_text().replace("hidden-value", "hiddem-value"))
    (job,), _ = find_jobs(tmp_path, [SUBMITTED], DamagedFiles(tmp_path))
    assert (job.secrets, job.secrets_lost) == ({}, True)


@EACH_WAY
def test_a_damaged_count_of_starts_gives_no_name_twice(tmp_path: Path, damage: Damage):
    folder, found = stored(tmp_path), DamagedFiles(tmp_path)
    used = jobfile.highest_start(jobfile.workers_in([StoredJob(folder, record())]), machine=0)
    write_json(tmp_path / "boots.json", 2)
    damage(tmp_path / "boots.json")
    number = jobfile.next_boot(tmp_path, used, found)
    assert (used, number > 2) == (2, True)
    assert jobfile.next_boot(tmp_path, used, found) == number + 1


@pytest.mark.parametrize("text", ["1", "0", "-2", "2.5", "true", '"2"', "[2]"])
def test_a_count_that_is_below_the_starts_in_names_is_damage(tmp_path: Path, text: str):
    found = DamagedFiles(tmp_path)
    (tmp_path / "boots.json").write_text(text)
    assert jobfile.next_boot(tmp_path, 2, found) > 1_000_000_000
    assert reports(found) == [("boots.json", True)]


def test_only_names_of_this_machine_count_as_its_starts():
    names = {"h/0/7", "h/1/3-2", "h/0/d1-9-4"}
    assert [jobfile.highest_start(names, machine) for machine in (0, 1, 2)] == [3, 9, 0]
    assert jobfile.highest_start({"h/0/7"}, 0) == 1
    assert workers_in([FORMED]) == set(FORMED.members)


def test_a_missing_count_of_starts_is_only_normal_at_the_first(tmp_path: Path):
    found = DamagedFiles(tmp_path)
    assert jobfile.next_boot(tmp_path, 0, found, first=True) == 1
    (tmp_path / "boots.json").unlink()
    assert jobfile.next_boot(tmp_path, 0, found) > 1_000_000_000
    assert reports(found) == [("boots.json", False)]


DECIDED = DownDecided(1003.0, "asked by `spotfleet down`", False)
DRAINED = HostDraining(1004.0, "h-1", "the fleet goes down")
ELSEWHERE = TakenOver(1005.0, "f-d-1", True, "")


@EACH_WAY
@pytest.mark.parametrize(("events", "why"), [
    ([DECIDED], DECIDED.why), ([], ""), ([DECIDED, ELSEWHERE], ""), ([DRAINED, ELSEWHERE], "")],
    ids=["the ledger has it", "nothing is known", "an older fleet's", "an older fleet's drain"])
def test_a_decision_to_end_is_neither_lost_nor_invented(tmp_path: Path, damage: Damage, events: list[Event], why: str):
    FleetShutdown(tmp_path).begin("asked by `spotfleet down`", by_ourselves=False, at=1003.0)
    damage(tmp_path / "down.json")
    shutdown, found = FleetShutdown(tmp_path), DamagedFiles(tmp_path)
    shutdown.load(events, found)
    assert shutdown.why == why
    told = [event.then for event in found.take_news()]
    assert [("goes down as decided" in then, "`spotfleet down` ends it" in then) for then in told] == (
        [(True, False)] if why else [] if damage is missing else [(False, True)])
    again = FleetShutdown(tmp_path)
    again.load([], found)
    assert (again.why, reports(found)) == (why, [])


def test_the_ledgers_copy_of_a_decision_has_all_of_it_and_each_change(tmp_path: Path):
    noted: list[Event] = []
    shutdown = FleetShutdown(tmp_path, unix=lambda: 1020.0, note=noted.append)
    shutdown.begin("idle", by_ourselves=True, at=1003.0)
    shutdown.begin("asked by `spotfleet down`", by_ourselves=False, at=1010.0)  # changes nothing
    shutdown.begin("asked by `spotfleet down`", by_ourselves=False, at=1010.0, discard=True)
    shutdown.limit()
    assert noted == [DownDecided(1003.0, "idle", True), DownDecided(1010.0, "idle", True, discard=True),
                     DownDecided(1020.0, "idle", True, limited=True, discard=True)]
    (tmp_path / "down.json").unlink()
    again, found = FleetShutdown(tmp_path), DamagedFiles(tmp_path)
    again.load(noted, found)
    assert again.decision == shutdown.decision
    assert [event.then for event in found.take_news()] == [
        "a full disk may have refused it; the ledger has the decision, and the fleet goes down as decided"]
    assert event_from_json({"kind": "DownDecided", "at": 1003.0, "why": "idle", "by_ourselves": True}) == noted[0]


@EACH_UNREADABLE_WAY
def test_a_decision_whose_record_is_damaged_shows_in_the_drains_of_an_older_ledger(tmp_path: Path, damage: Damage):
    FleetShutdown(tmp_path).begin("idle", by_ourselves=True, at=1003.0)
    damage(tmp_path / "down.json")
    shutdown = FleetShutdown(tmp_path, keep_s=60.0)
    shutdown.load([DRAINED], DamagedFiles(tmp_path))
    assert shutdown.why.startswith("decided before a restart")


@EACH_WAY
def test_a_damaged_manifest_counts_as_not_sent(tmp_path: Path, damage: Damage):
    digest, blobs = packed(tmp_path)
    found = DamagedFiles(tmp_path)
    store = BundleStore(tmp_path, found)
    store.folder.mkdir()
    for name, data in blobs.items():
        store.path(name).write_bytes(data)
    store.refuse_incomplete(digest)
    assert store.is_whole(digest)
    damage(store.path(digest))
    with pytest.raises(UsageError, match="has not been uploaded"):
        store.refuse_incomplete(digest)
    assert store.missing([digest]) == [digest]  # so the laptop sends it again
    assert [file for file, _ in reports(found)] == ([] if damage is missing else [f"bundles/{digest}"])
    store.path(digest).write_bytes(blobs[digest])
    store.refuse_incomplete(digest)
    damage(store.path(digest))
    store = BundleStore(tmp_path, found)  # the next process, asked for the pieces of a running job
    assert store.pieces(digest) == frozenset() and store.missing([digest]) == [digest]
    store.path(digest).write_bytes(blobs[digest])
    assert store.pieces(digest) == blobs.keys() - {digest}


# ---- the whole dispatcher


def small_files(home: Path) -> list[Path]:
    """Every file that a start reads, but for the ledger (`tests/bad_days/test_corrupt_ledger.py`)."""
    return [p for p in sorted(home.rglob("*")) if p.is_file() and not p.name.startswith("ledger.db")]


@EACH_WAY
def test_a_dispatcher_starts_with_every_file_damaged_at_once(play, tmp_path: Path, damage: Damage):
    digest, blobs = packed(tmp_path)

    async def scene(stage: Stage) -> None:
        await stage.up(2)
        for name, data in blobs.items():
            await stage.call("PUT", f"/v1/bundles/{name}", data=data)
        ended = await stage.submit(Script(steps=2), (1, 1), "short")
        await stage.stands(ended, "succeeded")
        job = await stage.submit(Script(steps=1_000_000), (2, 2), bundle=digest, secrets={"KEY": "hidden-value"})
        before = await stage.at_version(job, 3)
        for agent in stage.agents.values():
            agent.bundles = dict(blobs)
        text = b"a checkpoint"
        query = f"generation={before.generation}&digest={hashlib.sha256(text).hexdigest()}"
        await stage.call("PUT", f"/v1/jobs/{job}/checkpoints/3?{query}", data=text,
                         token=stage.token(before.workers[0].host))
        await stage.stop_dispatcher()
        for path in small_files(stage.home):
            damage(path)
        await stage.start_dispatcher()
        after = await stage.at_version(job, before.version + 20)
        assert (after.generation, after.repeated) == (before.generation, 0)  # training did not notice
        assert stage.daemon.dispatcher.core.jobs[job].secrets["KEY"] == "hidden-value"
        assert (await stage.job(ended)).state == "succeeded"
        assert len(await stage.events("JobSubmitted")) == 2
        told = {event["file"] for event in await stage.events("FileDamaged")}
        assert {f"jobs/{ended}/job.json", "boots.json"} <= told
        assert f"jobs/{job}/job.json" in told or damage is missing  # without `begun` a takeover asks
        status = (await stage.call("GET", "/v1/status"))[1]
        assert any(f"{file}: " in status["why"] for file in told)
        assert (await stage.submit(Script(steps=2), (1, 1), "third")) == "third-3"

    play(scene, spec(2))


def test_a_lost_job_that_no_host_holds_has_failed_and_its_output_is_there(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=1_000_000), (1, 1))
        worker = (await stage.at_version(job, 3)).workers[0]
        path = f"/v1/jobs/{job}/logs/{worker.worker.replace('/', '%2F')}?offset=0"
        await stage.call("POST", path, data=b"the last words\n", token=stage.token(worker.host))
        await stage.stop_dispatcher()
        (stage.home / "jobs" / job / "job.json").write_text("{")
        for agent in stage.agents.values():
            agent.launches.clear()  # a restarted agent has forgotten
        await stage.start_dispatcher()
        status = await stage.stands(job, "failed")
        assert status.why == ("its job.json was lost, and no host that answers holds the job: submit it again with "
                              "`spotfleet train`")
        assert (await stage.call("GET", f"/v1/jobs/{job}/logs?rank=0"))[1] == b"the last words\n"
        ends = [e for e in await stage.events("JobChanged") if e["job"] == job and e["state"] == "failed"]
        assert len(ends) == 1 and ends[0]["why"] == status.why
        await stage.stop_dispatcher()
        await stage.start_dispatcher()
        assert (await stage.job(job)).state == "failed"
        await stage.stop_dispatcher()
        shutil.rmtree(stage.home / "jobs" / job)
        await stage.start_dispatcher()
        assert await stage.submit(Script(steps=2), (1, 1), "next") == "next-2"

    play(scene, spec(1))


@pytest.mark.parametrize("file", ["job.json", "secrets.json"])
def test_a_full_disk_ends_no_start_that_gets_a_job_back_from_its_hosts(play, monkeypatch: pytest.MonkeyPatch,
                                                                       file: str):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=1_000_000), (1, 1), secrets={"KEY": "hidden-value"})
        before = await stage.at_version(job, 3)
        await stage.stop_dispatcher()
        folder = stage.home / "jobs" / job
        (folder / file).write_text("{")
        with monkeypatch.context() as full:
            refused = refuse_records(full)
            await stage.start_dispatcher()
            await stage.until("two refused attempts", lambda: len(refused) > 2)
            version = max(w.version for w in stage.world.workers.values())
            await stage.until("training to go on", lambda: any(w.version > version
                                                               for w in stage.world.workers.values()))
            assert not stage.daemon.dispatcher.core.settled
        after = await stage.at_version(job, before.version + 5)
        assert after.generation == before.generation
        assert jobfile.load(folder)[1] == stage.daemon.dispatcher.core.jobs[job].secrets

    play(scene, spec(1))


def test_a_host_that_never_had_a_lost_job_cannot_bring_another_in_its_place(play):
    async def scene(stage: Stage) -> None:
        hosts = await stage.up(2)
        job = await stage.submit(Script(steps=1_000_000), (1, 1))
        worker = (await stage.at_version(job, 3)).workers[0]
        await stage.stop_dispatcher()
        (stage.home / "jobs" / job / "job.json").unlink()
        stranger = stage.agents[next(h for h in hosts if h != worker.host)]
        owner = stage.agents[worker.host]
        stranger.launches, owner.launches = dict(owner.launches), {}
        name, known = f"{stranger.host}/0/1", stage.world.workers[worker.worker]
        stage.world.workers[name] = replace(known, order=replace(known.order, worker=name))
        stranger.workers = [name]
        await stage.start_dispatcher()
        await stage.until("the stranger reports a worker", lambda: any(
            w.report.worker == name for c in stage.daemon.dispatcher.core.connections.values()
            for w in c.report.workers))
        await stage.stands(job, "failed")
        assert stranger.tell == ()

    play(scene, spec(2))


@pytest.mark.parametrize("brought", ["right", "other", "none"])
def test_secrets_come_back_from_a_host_that_was_given_them_or_the_job_fails(play, brought: str):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=1_000_000), (1, 1), secrets={"KEY": "hidden-value"})
        before = await stage.at_version(job, 3)
        await stage.stop_dispatcher()
        (stage.home / "jobs" / job / "secrets.json").write_text("")
        (agent,) = stage.agents.values()
        launch, fetched_at = agent.launches[job]
        if brought == "none":
            agent.launches.clear()
        elif brought == "other":
            agent.launches[job] = replace(launch, secrets={**launch.secrets, "KEY": "another"}), fetched_at
        await stage.start_dispatcher()
        if brought == "right":
            after = await stage.at_version(job, before.version + 5)
            assert after.generation == before.generation
            assert jobfile.load(stage.home / "jobs" / job)[1] == launch.secrets
        else:
            assert "no host that answers holds its secrets" in (await stage.stands(job, "failed")).why
            assert not list((stage.home / "jobs" / job).glob("secrets.json*"))

    play(scene, spec(1))


def test_a_file_that_is_damaged_while_the_dispatcher_runs_is_written_again(play, tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.checkpoints.backup.KEEP_S", 0.05)
    target = tmp_path / "target"
    target.mkdir()
    wanted = spec(1)
    wanted = replace(wanted, checkpoint=replace(wanted.checkpoint, target=str(target)))

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=1_000_000), (1, 1))
        await stage.at_version(job, 3)
        path = stage.home / "jobs" / job / "job.json"
        path.write_text("{")

        def whole() -> bool:
            try:
                return jobfile.load_record(path.parent).job == job
            except ValueError:
                return False

        await stage.until("the file is whole again", whole)
        await stage.at_version(job, 10)

    play(scene, wanted)


def test_hosts_that_have_sent_logs_or_outputs_of_a_lost_job_may_bring_it_back(tmp_path: Path):
    folder = stored(tmp_path)
    for name in ("logs/h-4@0@1.log", "logs/h-5#setup.log", "logs/rank-0.log", "outputs/h-6@0@1/a",
                 "outputs/.h-7@0@1/a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "job.json").unlink()
    _, lost = find_jobs(tmp_path, [SUBMITTED], DamagedFiles(tmp_path))
    assert lost[NAME].hosts == {"h-4", "h-5", "h-6"}


def test_the_ledger_has_the_decision_to_end(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await stage.call("POST", "/v1/down", {})
        (decided,) = await stage.events("DownDecided")
        assert (decided["why"], decided["by_ourselves"]) == ("asked by `spotfleet down`", False)
        await stage.stop_dispatcher()
        (stage.home / "down.json").write_text("")
        await stage.start_dispatcher()
        assert (await stage.call("GET", "/v1/status"))[1]["state"] in ("going down", "down")

    play(scene, spec(1))


def test_a_start_reads_the_ledger_once(play, monkeypatch: pytest.MonkeyPatch):
    reads: list[bool] = []

    def each(journal: Journal) -> Iterator[Event]:
        reads.append(True)
        return (event for _, event in journal.ledger.each())

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=20), (1, 1))
        await stage.stands(job, "succeeded")
        await stage.stop_dispatcher()
        monkeypatch.setattr(Journal, "each", each)
        await stage.start_dispatcher()
        await stage.until("settled", lambda: stage.daemon.dispatcher.core.settled)
        assert len(reads) == 1

    play(scene, spec(1))


def test_a_damaged_piece_is_not_sent_to_a_host_and_taken_again(play, tmp_path: Path):
    digest, blobs = packed(tmp_path)
    piece = next(name for name in blobs if name != digest)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        for name, data in blobs.items():
            await stage.call("PUT", f"/v1/bundles/{name}", data=data)
        job = await stage.submit(Script(steps=1_000_000), (1, 1), bundle=digest)
        host = (await stage.at_version(job, 3)).workers[0].host
        path = stage.home / "bundles" / piece
        path.write_bytes(path.read_bytes()[:-1])
        assert (await stage.call("GET", f"/v1/bundles/{piece}", token=stage.token(host), ok=False))[0] == 404
        (event,) = await stage.until("the event", lambda: stage.events("FileDamaged"))
        assert event["file"] == f"bundles/{piece}" and "`spotfleet train` sends it again" in event["then"]
        assert (await stage.call("POST", "/v1/bundles/missing", {"digests": [piece]}))[1] == {"missing": [piece]}
        await stage.call("PUT", f"/v1/bundles/{piece}", data=blobs[piece])
        assert (await stage.call("GET", f"/v1/bundles/{piece}", token=stage.token(host)))[1] == blobs[piece]

    play(scene, spec(1))


@EACH_WAY
def test_a_first_start_goes_on_without_the_list_of_what_was_restored(tmp_path: Path, damage: Damage):
    write_json(tmp_path / "restored.json", to_json(Restored(True, ("one-1",))))
    assert found_before(tmp_path) == Restored(True, ("one-1",))
    damage(tmp_path / "restored.json")
    found = found_before(tmp_path)
    assert (found.ledger, found.jobs, bool(found.troubles)) == (False, (), damage is not missing)


@EACH_WAY
def test_code_that_was_damaged_is_copied_again_at_the_next_start(tmp_path: Path, damage: Damage,
                                                                 monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.whl").write_bytes(b"the code of this process")
    monkeypatch.setenv(WHEEL, str(tmp_path / "x.whl"))
    digest = wheel.keep(tmp_path)
    damage(tmp_path / "bundles" / digest)
    damage(tmp_path / "code")
    assert wheel.digest(tmp_path) != digest
    assert wheel.keep(tmp_path) == wheel.digest(tmp_path) == digest
    assert (tmp_path / "bundles" / digest).read_bytes() == b"the code of this process"
