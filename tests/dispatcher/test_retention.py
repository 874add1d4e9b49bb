"""Ended jobs leave memory, keep their files until a person prunes them, and their numbers are never given twice."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spotfleet.dispatcher import retention
from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.checkpoints.ledger_restore import sealed_jobs, sealed_name
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.jobs.desk import load_job
from spotfleet.dispatcher.lifecycle.unsent import UnsentTracker
from spotfleet.errors import DiskFull, UsageError
from spotfleet.fleet.domain.events import JobsPruned, JobSubmitted
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import CheckpointSpec, JobSpec, JobState
from spotfleet.protocol.messages import AgentReport, Unsent
from spotfleet.storage.folder import fleet_store
from spotfleet.transport.client import DispatcherClient, Endpoint
from tests.support.dispatcher.fake_fleet import ADMIN, Stage, spec
from tests.support.dispatcher.fake_workers import Script

LONG = Script(steps=1_000_000)


def ended_job(home: Path, name: str, *, output: bytes = b"", fetched_at: float = 0.0, folder: str = "jobs",
              hosts: tuple[str, ...] = ()) -> None:
    """Write a job that ended a while ago to the dispatcher's disk."""
    place, long_ago = home / folder / name, time.time() - 2 * retention.REST_S
    spec = JobSpec(name.rpartition("-")[0], argv=("train.py",))
    jobfile.save(place, JobRecord(name, spec, long_ago - 10, JobState.SUCCEEDED, ended_at=long_ago,
                                  fetched_at=fetched_at, hosts=hosts))
    (place / "logs").mkdir()
    (place / "logs" / "rank-0.log").write_bytes(b"printed by " + name.encode())
    if output:
        (place / "outputs" / "h@0@1").mkdir(parents=True)
        (place / "outputs" / "h@0@1" / "result").write_bytes(output)
        os.utime(place / "outputs" / "h@0@1" / "result", (long_ago, long_ago))


async def pages(stage: Stage, keep: int) -> list[dict[str, Any]]:
    rows, after, more = [], "", True
    while more:
        found = (await stage.call("GET", f"/v1/ended?keep={keep}&after={after}"))[1]
        rows, more = rows + found["jobs"], found["more"]
        after = rows[-1]["job"] if rows else ""
    return rows


async def restarted_with(stage: Stage, write: Any) -> None:
    await stage.stop_dispatcher()
    write(stage.home)
    await stage.start_dispatcher()
    await stage.up(1)


def test_ended_jobs_beyond_the_newest_leave_memory_and_are_found_by_name(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "KEPT", 2)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: [ended_job(home, f"t-{n}", output=b"xy") for n in (1, 2, 3, 4)])
        core = stage.daemon.dispatcher.core
        await stage.until("two jobs left memory", lambda: len(core.jobs) == 2)
        assert sorted(core.jobs) == ["t-3", "t-4"] and sorted(os.listdir(stage.home / "past")) == ["t-1", "t-2"]
        status = (await stage.call("GET", "/v1/status"))[1]
        assert (status["past_jobs"], [j["job"] for j in status["jobs"]]) == (2, ["t-3", "t-4"])
        assert (await stage.job("t-1")).state == "succeeded"
        assert (await stage.call("GET", "/v1/jobs/t-1/logs?rank=0"))[1] == b"printed by t-1"
        assert (await stage.call("GET", "/v1/jobs/..%2Fjobs%2Ft-3", ok=False))[0] == 404
        assert {name for name, _ in archive.members(stage.home)} >= {
            f"jobs/t-{n}/{file}" for n in (1, 2, 3, 4) for file in ("logs/rank-0.log", "outputs/h@0@1/result")}
        await restarted_with(stage, lambda home: None)
        assert sorted(stage.daemon.dispatcher.core.jobs) == ["t-3", "t-4"]
        assert await stage.submit(LONG, (1, 1), "next") == "next-5"

    play(scene, spec(1))


def test_pruning_shows_what_was_never_copied_and_removes_only_ended_jobs(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        now = time.time()

        def write(home: Path) -> None:
            ended_job(home, "t-1", output=b"four", folder="past")
            ended_job(home, "t-2", output=b"copied", fetched_at=now)
            ended_job(home, "t-3")
            ended_job(home, "t-4")

        await restarted_with(stage, write)
        live = await stage.submit(LONG, (1, 1), "live")
        rows = await pages(stage, keep=1)
        assert [(row["job"], row["unfetched_bytes"]) for row in rows] == [("t-1", 4), ("t-2", 0), ("t-3", 0)]
        assert [row["job"] for row in await pages(stage, keep=2)] == ["t-1", "t-2"]
        asked = {"jobs": ["t-1", "t-2", live, "t-4", "t-99"]}
        assert (await stage.call("POST", "/v1/prune", asked))[1] == {"pruned": ["t-1", "t-2"]}
        assert sorted(os.listdir(stage.home / "jobs")) == [live, "t-3", "t-4"]
        assert os.listdir(stage.home / "past") == [] and not list(stage.home.glob(".*.part"))
        assert (await stage.call("GET", "/v1/jobs/t-1", ok=False))[0] == 404
        event, = await stage.events("JobsPruned")
        assert (event["jobs"], event["unfetched"]) == (["t-1", "t-2"], ["t-1"])

    play(scene, spec(1))


def test_outputs_count_as_fetched_once_they_were_downloaded_whole(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: [ended_job(home, f"t-{n}", output=b"four") for n in (1, 2)])
        assert [row["unfetched_bytes"] for row in await pages(stage, keep=1)] == [4]
        assert (await stage.call("GET", "/v1/jobs/t-1/outputs"))[0] == 200
        await stage.until("the download is recorded",
                          lambda: jobfile.load(stage.home / "jobs" / "t-1")[0].fetched_at > 0)
        assert [row["unfetched_bytes"] for row in await pages(stage, keep=1)] == [0]

    play(scene, spec(1))


def test_the_target_keeps_no_record_of_a_job_that_has_left_memory(play, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "KEPT", 1)
    monkeypatch.setattr("spotfleet.dispatcher.checkpoints.backup.KEEP_S", 0.05)
    target = tmp_path / "target"
    target.mkdir()

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        there = fleet_store(str(target), stage.boot.fleet, stage.boot.ca)
        there.put(sealed_name("t-1"), [b"written by the process before"])
        there.put(sealed_name("t-8"), [b"of a job that was pruned before a kill"])
        there.put(sealed_name("t-9"), [b"of a job that this dispatcher does not know"])

        def write(home: Path) -> None:
            ended_job(home, "t-1", folder="past")
            ended_job(home, "t-2")
            ended_job(home, "t-3")
            ledger = Ledger(home / "ledger.db")
            ledger.append(JobsPruned(time.time(), ("t-8",), 0))
            ledger.close()

        await restarted_with(stage, write)
        await stage.until("the newest alone is there", lambda: sorted(sealed_jobs(there)) == ["t-3", "t-9"])

    play(scene, replace(spec(1), checkpoint=CheckpointSpec(target=str(target))))


def test_a_client_reads_a_long_list_in_pages_and_prunes_it(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "PAGE", 2)
    monkeypatch.setattr("spotfleet.transport.client.JOBS_PER_REQUEST", 2)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: [ended_job(home, f"t-{n}", folder="past") for n in range(1, 7)])
        client = DispatcherClient(Endpoint(stage.url, ADMIN, stage.ca), patience_s=10.0)
        found = [job.job for job in await asyncio.to_thread(lambda: list(client.ended_jobs(1)))]
        assert found == [f"t-{n}" for n in range(1, 6)]
        assert await asyncio.to_thread(client.prune, found) == found
        assert os.listdir(stage.home / "past") == ["t-6"]
        assert (await asyncio.to_thread(client.status)).past_jobs == 1

    play(scene, spec(1))


def test_the_number_of_a_pruned_job_is_never_given_again(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        job = await stage.submit(Script(steps=1), (1, 1), "short")
        await stage.stands(job, "succeeded")
        await stage.events()
        await stage.stop_dispatcher()
        for folder in (stage.home / "jobs").iterdir():
            folder.rename(stage.home / f".{folder.name}.part")  # as `prune` leaves it when it is killed
        await stage.start_dispatcher()
        assert await stage.submit(LONG, (1, 1), "short") == "short-2"
        assert not list(stage.home.glob(".*.part"))

    play(scene, spec(1))


def test_the_fold_remembers_the_highest_number_of_a_job():
    events = [JobSubmitted(1.0, job, "t", "", 1, 1) for job in ("t-7", "u-3", "odd")]
    assert fold(events).last_job == 7


class Fake:
    def __init__(self, **more: Any) -> None:
        self.__dict__.update(more)


def retiring(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[retention.Retention, Fake, float]:
    """A retention with two ended jobs, the older of which is to leave memory; its core; and the time."""
    monkeypatch.setattr(retention, "KEPT", 1)
    boot = Fake(spec=spec(1), fleet_secret="s")
    core = Fake(home=home, jobs={}, unsent=UnsentTracker(), journal=Fake(full=None))
    for name in ("t-1", "t-2"):
        ended_job(home, name, output=b"four")
        core.jobs[name] = load_job(boot, jobfile.load_ended(home / "jobs" / name), Fake(next=None, machine=1))
    names = Fake(next=None, machine=1)
    found = retention.Retention(core, lambda folder: load_job(boot, jobfile.load_ended(folder), names),
                                lambda job: False)
    return found, core, time.time()


def test_a_job_whose_place_is_taken_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept, core, unix = retiring(tmp_path, monkeypatch)
    (tmp_path / "past" / "t-1" / "outputs").mkdir(parents=True)
    kept.step(unix)
    assert sorted(core.jobs) == ["t-1", "t-2"] and (tmp_path / "jobs" / "t-1" / "job.json").is_file()
    shutil.rmtree(tmp_path / "past" / "t-1")
    kept.step(unix)
    assert sorted(core.jobs) == ["t-2"] and (tmp_path / "past" / "t-1" / "job.json").is_file()


def test_on_a_full_disk_a_job_leaves_memory_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept, core, unix = retiring(tmp_path, monkeypatch)

    def no_room(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((Path, "mkdir"), (retention.atomic, "rename")):
        with monkeypatch.context() as full:
            full.setattr(module, name, no_room)
            kept.step(unix)
        assert sorted(core.jobs) == ["t-1", "t-2"] and kept.count == 0
    core.journal.full = DiskFull("the disk is full")  # the job's end may not be in the ledger yet
    kept.step(unix)
    assert sorted(core.jobs) == ["t-1", "t-2"]
    core.journal.full = None
    kept.step(unix)
    assert (sorted(core.jobs), kept.count, kept.left) == (["t-2"], 1, {"t-1"})


def test_a_job_that_a_request_uses_is_neither_pruned_nor_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept, core, unix = retiring(tmp_path, monkeypatch)
    core.unix, core.journal = time.time, Fake(full=None, state=Fake(down=None), note=lambda event: None, flush=nothing)
    with kept.using("t-1"), kept.using("t-1"):
        kept.step(unix)
        assert sorted(core.jobs) == ["t-1", "t-2"] and asyncio.run(kept.prune(["t-1"])) == []
    kept.step(unix)
    assert sorted(core.jobs) == ["t-2"]
    with kept.using("t-1"):  # that of a job in `past` may have left the cache meanwhile
        assert asyncio.run(kept.prune(["t-1"])) == []
    assert asyncio.run(kept.prune(["t-1"])) == ["t-1"]


async def nothing() -> None:
    return None


def test_nothing_is_pruned_or_moved_while_the_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept, core, unix = retiring(tmp_path, monkeypatch)
    core.unix, core.journal = time.time, Fake(full=None, state=Fake(down=None), note=lambda event: None, flush=nothing)

    async def scene() -> None:
        async with kept.archiving():
            kept.step(unix)
            assert sorted(core.jobs) == ["t-1", "t-2"]
            with pytest.raises(UsageError, match="archive"):
                await kept.prune(["t-1"])
        core.journal.state.down = Fake(at=unix)  # all hosts have ended: the archive is read next
        with pytest.raises(UsageError, match="archive"):
            await kept.prune(["t-1"])
        core.journal.state.down = None
        assert await kept.prune(["t-1"]) == ["t-1"]

    asyncio.run(scene())


def test_a_download_of_outputs_is_under_way_until_its_last_byte(play, monkeypatch: pytest.MonkeyPatch):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: [ended_job(home, f"t-{n}", output=b"four") for n in (1, 2)])
        pruned: list[Any] = []
        real, loop = archive.send_outputs, asyncio.get_running_loop()

        def slow(folder: Path, send: Any) -> None:
            prune = stage.call("POST", "/v1/prune", {"jobs": ["t-1"]})
            pruned.append(asyncio.run_coroutine_threadsafe(prune, loop).result(30)[1])
            real(folder, send)

        monkeypatch.setattr(archive, "send_outputs", slow)
        assert (await stage.call("GET", "/v1/jobs/t-1/outputs"))[0] == 200
        assert pruned == [{"pruned": []}]
        assert (await stage.call("POST", "/v1/prune", {"jobs": ["t-1"]}))[1] == {"pruned": ["t-1"]}

    play(scene, spec(1))


def test_outputs_whose_folder_is_gone_are_not_whole(tmp_path: Path):
    ended_job(tmp_path, "t-1", output=b"four")

    sent: list[bytes] = []
    archive.send_outputs(tmp_path / "jobs" / "t-1", sent.append)
    shutil.rmtree(tmp_path / "jobs" / "t-1")
    with pytest.raises(FileNotFoundError, match="removed"):
        archive.send_outputs(tmp_path / "jobs" / "t-1", sent.append)


def test_no_request_finds_a_job_while_its_files_are_removed(play, monkeypatch: pytest.MonkeyPatch):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: [ended_job(home, "t-1", folder="past"),
                                                  *(ended_job(home, f"t-{n}") for n in (2, 3))])
        journal, found, real = stage.daemon.dispatcher.core.journal, [], stage.daemon.dispatcher.core.journal.flush

        async def flush() -> None:
            monkeypatch.setattr(journal, "flush", real)
            found.extend([(await stage.call("GET", f"/v1/jobs/t-{n}", ok=False))[0] for n in (1, 2, 3)])
            await real()

        monkeypatch.setattr(journal, "flush", flush)
        assert (await stage.call("POST", "/v1/prune", {"jobs": ["t-1", "t-2"]}))[1] == {"pruned": ["t-1", "t-2"]}
        assert found == [404, 404, 200]

    play(scene, spec(1))


def test_a_prune_on_a_full_disk_is_in_the_ledger_before_it_is_answered(play, monkeypatch: pytest.MonkeyPatch):
    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: [ended_job(home, f"t-{n}", output=b"four") for n in (1, 2)])
        ledger = stage.daemon.dispatcher.core.journal.ledger
        real = ledger.append

        def append(*events: Any) -> int:
            if events and (stage.home / "jobs" / "t-1").exists():
                raise DiskFull("the disk is full")
            return real(*events)

        monkeypatch.setattr(ledger, "append", append)
        assert (await stage.call("POST", "/v1/prune", {"jobs": ["t-1"]}))[1] == {"pruned": ["t-1"]}
        assert any(isinstance(event, JobsPruned) for _, event in ledger.events())

    play(scene, spec(1))


def test_the_newest_number_and_the_newest_end_stay(play):
    async def scene(stage: Stage) -> None:
        await stage.up(1)

        def write(home: Path) -> None:
            for name in ("t-1", "t-2", "t-3"):
                ended_job(home, name)
            record = jobfile.load(home / "jobs" / "t-1")[0]
            jobfile.save(home / "jobs" / "t-1", replace(record, ended_at=time.time() - 1.2 * retention.REST_S))

        await restarted_with(stage, write)
        assert [row["job"] for row in await pages(stage, keep=1)] == ["t-2"]
        assert (await stage.call("POST", "/v1/prune", {"jobs": ["t-1", "t-2", "t-3"]}))[1] == {"pruned": ["t-2"]}

    play(scene, spec(1))


def test_a_job_with_something_on_its_way_stays_in_memory(tmp_path: Path):
    def job(**more: Any) -> Fake:
        fine = {"state": JobState.SUCCEEDED, "id": "t-1", "record": Fake(ended_at=1000.0), "unsaved": False,
                "workers": Fake(all={}), "outputs": Fake(is_busy=False)}
        return Fake(**{**fine, **more})

    core = Fake(home=tmp_path, jobs={}, unsent=UnsentTracker())
    kept = retention.Retention(core, lambda folder: None, lambda job: "behind" in vars(job))
    now = 1001.0 + retention.REST_S
    assert kept._is_still(job(), now)
    assert not kept._is_still(job(), 999.0 + retention.REST_S)
    busy = [{"state": JobState.RUNNING}, {"unsaved": True}, {"workers": Fake(all={"w": 1})},
            {"outputs": Fake(is_busy=True)}, {"behind": True}]
    assert not any(kept._is_still(job(**more), now) for more in busy)
    core.unsent.receive(AgentReport("h", "agent-1", "", 1, (), None, unsent=(Unsent("t-1", "output", 9),)),
                        lambda name: True, 0.0)
    assert not kept._is_still(job(), now) and kept._is_still(job(id="t-2"), now)


def test_outputs_that_a_host_still_holds_count_for_a_job_that_has_left_memory(play):
    async def scene(stage: Stage) -> None:
        (host,) = await stage.up(1)

        def write(home: Path) -> None:
            ended_job(home, "t-1", folder="past", hosts=(host,))
            ended_job(home, "t-2", folder="past")
            ended_job(home, "t-3", hosts=(host,))
            ended_job(home, "t-4")

        await restarted_with(stage, write)
        core, agent = stage.daemon.dispatcher.core, stage.agents[host]
        agent.unsent = tuple(Unsent(job, "output", 9, worker=f"{host}/0/1") for job in ("t-1", "t-2", "t-3", "t-9"))
        agent.changed.set()
        await stage.until("the output is known", lambda: core.unsent.of_job("t-3"))
        assert core.unsent.of_job("t-1") and not core.unsent.of_job("t-2")  # the host never had t-2
        assert (await stage.call("POST", "/v1/prune", {"jobs": ["t-1", "t-2"]}))[1] == {"pruned": ["t-2"]}

    play(scene, spec(1))


def test_a_request_under_way_goes_on_with_a_job_that_leaves_memory(play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "KEPT", 1)

    async def scene(stage: Stage) -> None:
        await stage.up(1)
        await restarted_with(stage, lambda home: ended_job(home, "t-1"))
        core = stage.daemon.dispatcher.core
        held = core.jobs["t-1"]
        ended_job(stage.home, "t-2")
        core.jobs["t-2"] = load_job(core.boot, jobfile.load_ended(stage.home / "jobs" / "t-2"),
                                    stage.daemon.dispatcher.desk.names)
        await stage.until("t-1 left memory", lambda: "t-1" not in core.jobs)
        assert held.logs.read(0, 0).data == b"printed by t-1"
        await asyncio.to_thread(held.outputs_fetched, 5.0)
        assert jobfile.load(stage.home / "past" / "t-1")[0].fetched_at == 5.0

    play(scene, spec(1))


def test_the_age_of_an_ended_job_is_its_duration_as_in_the_archive():
    record = JobRecord("j-1", JobSpec("j"), submitted_at=100.0)
    assert (record.age_s(160.0), replace(record, ended_at=130.0).age_s(160.0)) == (60.0, 30.0)
