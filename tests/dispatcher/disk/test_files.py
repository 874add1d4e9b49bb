"""Logs and uploads on the dispatcher's disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from spotfleet.dispatcher.disk import files
from spotfleet.dispatcher.disk.files import TooLarge, receive
from spotfleet.dispatcher.disk.logs import FILE_BYTES, JobLogs
from spotfleet.errors import UsageError

W1, W2 = "h-1/0/1", "h-2/0/2"


async def body(*chunks: bytes, then: Exception | None = None):
    for chunk in chunks:
        yield chunk
    if then:
        raise then


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


def test_a_host_that_writes_without_end_is_cut_short_and_the_log_says_so(tmp_path: Path):
    logs = JobLogs(tmp_path, limit_bytes=FILE_BYTES + 10)
    assert logs.append(W1, 0, 0, b"x" * 8) == 8
    assert logs.append(W1, 0, 8, b"y" * 8) == 16  # as if all were held: the sender must not try for ever
    assert logs.append(W1, 0, 16, b"z" * 8) == 24
    assert logs.append("h-1/1/2", 1, 0, b"more") == 4  # under another name
    assert logs.append(W2, 1, 0, b"mine") == 4
    head, _, tail = logs.read(0, 0).data.decode().partition("\n")
    assert head == "x" * 8 + "yy" and "h-1 has written" in tail and "not kept" in tail
    assert logs.workers().keys() == {W1, W2}
    again = JobLogs(tmp_path, limit_bytes=FILE_BYTES + 10)
    assert again.append(W1, 0, 24, b"after a restart") == 39
    assert again.read(0, 0) == logs.read(0, 0)


def test_logs_are_for_their_owner_only(tmp_path: Path):
    logs = JobLogs(tmp_path / "logs")
    logs.append(W1, 0, 0, b"what a script prints is its own affair\n")
    assert {oct(p.stat().st_mode & 0o777) for p in logs.folder.iterdir()} == {"0o600"}
    assert oct(logs.folder.stat().st_mode & 0o777) == "0o700"


def test_a_body_beyond_the_limit_is_refused_before_it_fills_the_disk(tmp_path: Path):
    with pytest.raises(TooLarge):
        asyncio.run(receive(body(b"x" * 6, b"x" * 6), tmp_path / "file", 10))
    assert os.listdir(tmp_path) == []


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
            "jobs/a-1/checkpoints/.9-1.1.part", "jobs/a-1/outputs/.h@0@1.part/draft")
    kept = ("bundles/ab", "jobs/a-1/secrets.json", "jobs/a-1/checkpoints/9-1.ckpt", "jobs/a-1/outputs/h@0@1/.x.part")
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    files.sweep(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == set(kept)
