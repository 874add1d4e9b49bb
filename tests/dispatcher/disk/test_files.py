"""Logs and uploads on the dispatcher's disk."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.disk import files
from spotfleet.dispatcher.disk.files import TooLarge, receive
from spotfleet.dispatcher.disk.jobfile import name_for
from spotfleet.dispatcher.disk.logs import FILE_BYTES, JobLogs
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import LogsCut
from spotfleet.fleet.ledger import Ledger
from spotfleet.model import JobSpec

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


def everything(logs: JobLogs, source: int | str, offset: int = 0) -> str:
    """Read a log as `spotfleet logs` does."""
    text = b""
    while (piece := logs.read(source, offset)).next_offset > offset:
        text, offset = text + piece.data, piece.next_offset
    return text.decode()


def test_a_log_without_end_keeps_the_newest_and_a_reader_learns_how_much_is_gone(tmp_path: Path):
    limit = 6 * FILE_BYTES + 100
    logs = JobLogs(tmp_path, limit, segment_bytes=20)
    size = 0
    for n in range(100):
        size = logs.append(W1, 0, size, f"line {n:04}\n".encode())
        assert sum(p.stat().st_size + FILE_BYTES for p in tmp_path.iterdir()) <= limit
    assert size == 1000  # the sender goes on from here
    first, *rest = everything(logs, 0).splitlines()
    assert first.startswith("spotfleet: 9") and "of older output are not kept" in first
    assert rest == [f"line {n:04}" for n in range(100 - len(rest), 100)] and len(rest) >= 4
    assert everything(logs, 0, 980) == "line 0098\nline 0099\n"
    assert everything(logs, W1).endswith("line 0099\n") and logs.workers() == {W1: 1000}
    again = JobLogs(tmp_path, limit, segment_bytes=20)
    assert everything(again, 0) == everything(logs, 0)
    assert again.append(W1, 0, 990, b"line 0099\nafter a restart\n") == 1016
    assert everything(again, 0, 1000) == "after a restart\n"


def test_a_host_that_prints_without_end_removes_its_own_output_only(tmp_path: Path):
    logs = JobLogs(tmp_path, 8 * FILE_BYTES, segment_bytes=20)
    logs.append(W2, 1, 0, b"of another host\n")
    for n in range(60):
        logs.append(f"h-1/0/{n}", 0, 0, b"x" * 30)  # under another name each time
    assert everything(logs, W2) == everything(logs, 1) == "of another host\n"
    assert len(os.listdir(tmp_path)) <= 8


def test_the_first_removal_of_each_source_is_an_event_and_a_remark(tmp_path: Path):
    logs = JobLogs(tmp_path, 4 * FILE_BYTES, segment_bytes=20)
    logs.append(W1, -1, 0, b"x" * 20)
    assert (logs.take_news("j", 5.0), logs.remark) == ([], "")
    size = 20
    for _ in range(10):
        size = logs.append(W1, -1, size, b"y" * 20)
    assert logs.take_news("j", 5.0) == [LogsCut(5.0, "j", "h-1", 4 * FILE_BYTES)] and logs.take_news("j", 6.0) == []
    assert logs.remark == "its oldest output is removed (h-1): logs of a job may take 262.1 kB"


def test_a_chunk_that_finds_no_room_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs = JobLogs(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("spotfleet.dispatcher.disk.logs._append", no_room)
        logs.append(W1, 0, 0, b"one\n")
    assert logs.workers() == {} and logs.read(0, 0).data == b""
    assert logs.append(W1, 0, 0, b"one\n") == 4 and logs.workers() == {W1: 4}


def no_room(path: Path, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_last_lines_of_a_log_are_found_across_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spotfleet.dispatcher.disk.logs.BLOCK_BYTES", 7)
    logs = JobLogs(tmp_path, segment_bytes=20)
    for n in range(10):
        logs.append(W1, 0, 10 * n, f"line {n:04}\n".encode())
    assert [logs.start(0, lines=n) for n in (0, 1, 3, 9, 10, 99)] == [100, 90, 70, 10, 0, 0]
    logs.append(W1, 0, 100, b"half a line")
    assert [logs.start(W1, lines=n) for n in (0, 1, 2)] == [111, 100, 90]
    assert logs.start("h-9/0/1", lines=3) == logs.start(7, since_s=5.0) == 0, "a log that does not exist"


def test_output_of_the_last_seconds_begins_where_it_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, disk = [0.0], "spotfleet.dispatcher.disk.logs"
    monkeypatch.setattr(f"{disk}.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1e9 + now[0]))
    logs = JobLogs(tmp_path, segment_bytes=20)
    for n in range(300):
        now[0] = 10.0 * n
        logs.append(W1, 0, 10 * n, f"line {n:04}\n".encode())
    assert [logs.start(0, since_s=s) for s in (5.0, 25.0, 105.0)] == [2990, 2970, 2890]
    assert [logs.start(0, since_s=s, lines=2) for s in (5.0, 105.0)] == [2990, 2980]
    assert 1200 < logs.start(0, since_s=1005.0) <= 2000, "older output begins too early at most"
    now[0] += 100
    assert logs.start(0, since_s=50.0) == 3000
    monkeypatch.undo()
    after, moment = JobLogs(tmp_path, segment_bytes=20), time.time()
    for path in tmp_path.glob("rank-0.log*"):
        age = 3000 - int(path.suffix.removeprefix(".")) if path.suffix != ".log" else 3000
        os.utime(path, (moment - age, moment - age))
    assert after.start(0, since_s=110.0) == 2900, "a process that began later knows the ages of the files"


def test_the_end_of_a_removed_log_is_known_to_its_sender(tmp_path: Path):
    logs = JobLogs(tmp_path, 3 * FILE_BYTES, segment_bytes=20)
    logs.append(W1, -1, 0, b"x" * 20)
    for n in range(2):
        logs.append(f"h-1/0/{n + 2}", -1, 0, b"y" * 20)
    assert everything(logs, W1).startswith("spotfleet: 20 bytes of older output are not kept")
    assert logs.append(W1, -1, 0, b"") == 20


def test_the_archive_holds_each_log_as_one_file(tmp_path: Path):
    logs = JobLogs(tmp_path / "jobs" / "j-1" / "logs", segment_bytes=20)
    for n in range(10):
        logs.append(W1, 0, 10 * n, f"line {n:04}\n".encode())
    cut = JobLogs(tmp_path / "jobs" / "j-2" / "logs", 3 * FILE_BYTES, segment_bytes=20)
    for n in range(10):
        cut.append(W1, -1, 10 * n, f"line {n:04}\n".encode())
    ledger = Ledger(tmp_path / "ledger.db")
    archive.write_folder(tmp_path, ledger, tmp_path / "plain")
    sent = bytearray()
    archive.send_tar(tmp_path, ledger, sent.extend)
    ledger.close()
    (tmp_path / "packed").mkdir()
    with tarfile.open(fileobj=io.BytesIO(bytes(sent))) as tar:
        tar.extractall(tmp_path / "packed", filter="data")
    for there in (tmp_path / "plain" / "jobs", tmp_path / "packed" / "jobs"):
        assert sorted(p.name for p in there.glob("j-1/logs/*")) == ["h-1@0@1.log", "rank-0.log"]
        assert (there / "j-1/logs/rank-0.log").read_text() == everything(logs, 0)
        assert (there / "j-2/logs/h-1@0@1.log").read_text().splitlines()[1:] == everything(cut, W1).splitlines()[1:]
        assert (there / "j-2/logs/h-1@0@1.log").read_text().startswith("spotfleet: ")


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


@pytest.mark.parametrize(("name", "job"), [("f", "f-run-4"), ("f-d", "f-d-run-4"), ("fit", "fit-4"), ("f-w", "f-w-4")])
def test_a_job_never_has_the_name_of_a_machine_of_its_fleet(name, job):
    assert name_for(JobSpec(name), ["train-3"], 0, "f") == job


def test_a_job_has_the_name_of_no_host_of_a_group_either():
    assert [name_for(JobSpec(name), (), 0, "f", ("gpu",)) for name in ("f-gpu", "f-cpu")] == ["f-gpu-run-1", "f-cpu-1"]
