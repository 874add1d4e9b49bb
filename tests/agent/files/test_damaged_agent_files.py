"""Damaged files in a host's folder: each way of damage, and what the next agent or worker does without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spotfleet.agent.boot import AgentBoot
from spotfleet.agent.files.mount_process import Item, _is_here, _journal
from spotfleet.agent.files.setup import _Step
from spotfleet.agent.policy.orphan import Instant, OrphanPhase, OrphanState
from spotfleet.agent.processes.child import WorkerResult, read_result
from spotfleet.agent.shutdown.controller import read_life, write_life
from spotfleet.agent.shutdown.stash import CheckpointStash, StashedCheckpoint
from spotfleet.codec import to_json
from spotfleet.protocol.messages import Checkpoint, dump
from spotfleet.storage import json_file
from tests.support.damage import EACH_WAY, Damage
from tests.support.dispatcher.checkpoint_sets import files_of, read, whole, write

NOW = Instant("boot", 5000.0)
BOOT = AgentBoot("f", "f-1", "local", 1, "https://127.0.0.1:1", "the fleet's certificate", "token")


@EACH_WAY
def test_a_damaged_result_counts_as_none(tmp_path: Path, damage: Damage):
    path = tmp_path / "exit.json"
    path.write_text(dump(WorkerResult(done=True)))
    assert read_result(path).done
    damage(path)
    assert isinstance(read_result(path), WorkerResult)


def test_a_result_that_is_no_text_counts_as_none(tmp_path: Path):
    (tmp_path / "exit.json").write_bytes(b'{"done": true, "error": "\xff"}')
    assert read_result(tmp_path / "exit.json") == WorkerResult()


@EACH_WAY
def test_a_setup_whose_mark_is_damaged_runs_again(tmp_path: Path, damage: Damage):
    step = _Step(tmp_path / "setup.done", "pip install x")
    step.mark()
    assert step.done
    damage(step.marker)
    assert not step.done
    (tmp_path / "setup.done").write_bytes(b"\xff" * 64)
    assert not step.done


@EACH_WAY
def test_a_host_whose_life_is_damaged_begins_it_anew(tmp_path: Path, damage: Damage):
    write_life(tmp_path, OrphanState(NOW, age_s=4000.0, silent_s=300.0, phase=OrphanPhase.SAVING, phase_s=10.0))
    assert read_life(tmp_path, NOW).phase is OrphanPhase.SAVING
    damage(tmp_path / "life.json")
    assert read_life(tmp_path, NOW) == OrphanState(NOW)


def test_a_life_with_a_changed_digit_does_not_end_the_host(tmp_path: Path):
    write_life(tmp_path, OrphanState(NOW, silent_s=300.0))
    path = tmp_path / "life.json"
    path.write_text(path.read_text().replace("300.0", "900.0"))
    assert read_life(tmp_path, NOW).silent_s == 0.0


@EACH_WAY
def test_a_stashed_checkpoint_without_a_readable_record_is_not_used(tmp_path: Path, damage: Damage):
    (tmp_path / "made").write_bytes(b"a checkpoint")
    stash = CheckpointStash(BOOT, tmp_path)
    stash.keep("job", Checkpoint(7, "d" * 64, 12, 2, path=str(tmp_path / "made")))
    (record,) = (tmp_path / "legacy").glob("*.json")
    assert len(CheckpointStash(BOOT, tmp_path).kept()) == 1
    damage(record)
    assert CheckpointStash(BOOT, tmp_path).kept() == []


def test_what_release_0_1_stashed_is_found_and_removed(tmp_path: Path):
    place = tmp_path / "legacy"
    place.mkdir()
    (place / "job-2-7.ckpt").write_bytes(b"a checkpoint")
    kept = StashedCheckpoint("job", Checkpoint(7, "d" * 64, 12, 2, path=str(place / "job-2-7.ckpt")))
    (place / "job-2-7.json").write_text(json_file.text_of(to_json(kept)))
    stash = CheckpointStash(BOOT, tmp_path)
    assert stash.kept() == [kept]
    stash.drop(kept)
    assert list(place.iterdir()) == []


def test_the_files_of_a_manifest_are_stashed_beside_it(tmp_path: Path):
    files = files_of(7)
    made = replace(whole(files), path=str(write(files, tmp_path / "made") / "manifest.json"))
    CheckpointStash(BOOT, tmp_path).keep("job", made)
    (kept,) = CheckpointStash(BOOT, tmp_path).kept()
    assert read(Path(kept.checkpoint.path).parent) == files


@EACH_WAY
def test_an_object_of_a_bucket_with_a_damaged_record_is_fetched_again(tmp_path: Path, damage: Damage):
    item = Item("s3://b", "a", "data/a", 3, "etag")
    (tmp_path / item.id).write_bytes(b"abc")
    record = tmp_path / f"{item.id}.json"
    record.write_text(str((tmp_path / item.id).stat().st_mtime_ns))
    assert _is_here(tmp_path, item)
    damage(record)
    assert not _is_here(tmp_path, item)
    record.write_bytes(b"\xff")
    assert not _is_here(tmp_path, item)


@EACH_WAY
def test_a_damaged_journal_of_pieces_names_only_pieces_that_exist(tmp_path: Path, damage: Damage):
    item = Item("s3://b", "a", "data/a", 3, "etag")
    path = tmp_path / f"{item.id}.pieces"
    path.write_bytes(b"0\n0\n0\n")
    damage(path)
    assert _journal(tmp_path, item) <= {0}
    path.write_bytes(b"\xff\n0\n")
    assert _journal(tmp_path, item) == {0}
