"""Logs, checkpoints and uploads on the dispatcher's disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from spotfleet.dispatcher import files
from spotfleet.dispatcher.checkpoints import CheckpointStore, Outdated
from spotfleet.dispatcher.files import TooLarge, receive
from spotfleet.dispatcher.logs import JobLogs
from spotfleet.errors import UsageError
from spotfleet.messages import Checkpoint

W1, W2 = "h-1/0/1", "h-2/0/2"


async def body(*chunks: bytes, then: Exception | None = None):
    for chunk in chunks:
        yield chunk
    if then:
        raise then


def point(version: int, generation: int, data: bytes) -> Checkpoint:
    return Checkpoint(version, hashlib.sha256(data).hexdigest(), 0, generation)


def put(store: CheckpointStore, version: int, generation: int, data: bytes = b"state", fence: int = 0) -> Checkpoint:
    return asyncio.run(store.put(point(version, generation, data), lambda: fence, body(data)))


def test_a_repeated_chunk_is_stored_once_and_a_gap_is_not_filled(tmp_path: Path):
    logs = JobLogs(tmp_path)
    assert logs.append(W1, 0, 0, b"one\n") == 4
    assert logs.append(W1, 0, 0, b"one\n") == 4
    assert logs.append(W1, 0, 99, b"later\n") == 4
    assert logs.append(W1, 0, 0, b"one\ntwo\n") == 8
    assert logs.read(W1, 0).data == b"one\ntwo\n"
    assert logs.read(0, 0).data == b"one\ntwo\n"


def test_the_log_of_a_rank_goes_on_with_whoever_holds_the_rank_next(tmp_path: Path):
    logs = JobLogs(tmp_path)
    logs.append(W1, 0, 0, b"first\n")
    logs.append(W2, 0, 0, b"second\n")
    assert logs.read(0, 0).data == b"first\nsecond\n"
    assert logs.read(0, 6).data == b"second\n"
    assert logs.read(1, 0).data == b""
    assert sorted(logs.workers()) == [W1, W2]


def test_the_newest_checkpoints_are_kept_and_survive_a_restart(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    for version in (10, 20, 30):
        put(store, version, 1, b"%d" % version)
    again = CheckpointStore(tmp_path, keep=2)
    assert again.newest == store.newest
    assert again.newest is not None and again.newest.version == 30
    assert again.find(10) is None
    path = again.find(20)
    assert path is not None and path.read_bytes() == b"20"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["20-1.ckpt", "30-1.ckpt", "index.json"]


def test_a_checkpoint_of_a_replaced_generation_is_refused(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    put(store, 10, 3)
    with pytest.raises(Outdated):
        put(store, 50, 2)
    with pytest.raises(Outdated):
        put(store, 50, 3, fence=4)
    assert store.newest is not None and store.newest.version == 10


def test_a_newer_generation_wins_although_its_version_is_lower(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=1)
    put(store, 50, 1, b"old")
    put(store, 40, 2, b"new")
    assert store.newest == Checkpoint(40, hashlib.sha256(b"new").hexdigest(), 3, 2)


def test_a_transfer_that_breaks_off_leaves_the_kept_checkpoint_and_nothing_else(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    put(store, 10, 1)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConnectionError):
        asyncio.run(store.put(point(20, 1, b"whole"), lambda: 0, body(b"who", then=ConnectionError("gone"))))
    with pytest.raises(UsageError, match="digest"):
        asyncio.run(store.put(point(20, 1, b"whole"), lambda: 0, body(b"other")))
    assert sorted(os.listdir(tmp_path)) == before
    assert store.newest is not None and store.newest.version == 10


def test_a_checkpoint_sent_twice_is_kept_once(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    assert put(store, 10, 1) == put(store, 10, 1)
    assert sorted(os.listdir(tmp_path)) == ["10-1.ckpt", "index.json"]


def test_a_body_beyond_the_limit_is_refused_before_it_fills_the_disk(tmp_path: Path):
    with pytest.raises(TooLarge):
        asyncio.run(receive(body(b"x" * 6, b"x" * 6), tmp_path / "file", 10))
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_refused_when_its_generation_is_replaced_while_it_is_on_its_way(tmp_path: Path):
    fence = [0]

    async def slow():
        yield b"sta"
        fence[0] = 2
        yield b"te"

    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(Outdated):
        asyncio.run(store.put(point(50, 1, b"state"), lambda: fence[0], slow()))
    assert store.newest is None


def test_a_sender_that_stalls_is_given_up_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def stalls():
        yield b"half"
        await asyncio.Event().wait()

    monkeypatch.setattr(files, "STALL_S", 0.05)
    with pytest.raises(UsageError, match="stalled"):
        asyncio.run(receive(stalls(), tmp_path / "bundle", 100))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_dispatcher_was_writing_is_swept_and_nothing_else(tmp_path: Path):
    left = (".down.json.1.part", "bundles/.ab.1.part", "jobs/a-1/.secrets.json.1.part",
            "jobs/a-1/checkpoints/.9-1.1.part", "jobs/a-1/outputs/.h@0@1.tar.gz", "jobs/a-1/outputs/.h@0@1.part/half")
    kept = ("bundles/ab", "jobs/a-1/secrets.json", "jobs/a-1/checkpoints/9-1.ckpt", "jobs/a-1/outputs/h@0@1/.x.part")
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files.sweep(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == set(kept)
