"""One copy of a checkpoint per host: fetched once, whoever is killed, and gone once all have read it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotfleet.protocol.messages import Checkpoint
from spotfleet.train.checkpoint import host_copy
from spotfleet.train.checkpoint.host_copy import CopyChanged, HostCopy

NAMED = Checkpoint(7, "d" * 64, 10, 2)
DATA = b"0123456789"


class Fetches:
    """A store of one file, which counts how often it is fetched."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, into: Path, progress) -> None:
        self.number += 1
        (into / "file").write_bytes(DATA)
        progress(len(DATA))


def nothing(size: int) -> None:
    pass


def read(folder: Path, fetch, readers: int = 1, progress=nothing, meanwhile=lambda: None) -> bytes:
    with HostCopy(folder, NAMED, readers).opened(fetch, progress) as copy:
        meanwhile()
        return (copy / "file").read_bytes()


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_one_worker_fetches_for_all_of_its_host_and_the_last_reader_removes_the_copy(tmp_path: Path, monkeypatch):
    """The workers are threads here: each opens the lock for itself."""
    pids, fetch, together = threading.local(), Fetches(), threading.Barrier(3)
    monkeypatch.setattr(host_copy.os, "getpid", lambda: pids.number)

    def worker(number: int) -> bytes:
        pids.number = number
        return read(tmp_path, fetch, 3, meanwhile=together.wait)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(worker, range(3))) == [DATA] * 3
    assert (fetch.number, left(tmp_path)) == (1, ["lock"])


def test_a_late_worker_finds_the_copy(tmp_path: Path):
    fetch = Fetches()
    assert read(tmp_path, fetch, readers=2) == DATA
    assert read(tmp_path, fetch, readers=1) == DATA
    assert (fetch.number, left(tmp_path)) == (1, ["lock"])


def test_a_copy_that_changed_on_this_host_is_fetched_again(tmp_path: Path):
    fetch = Fetches()
    read(tmp_path, fetch, readers=2)
    (copy,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    (copy / "file").write_bytes(b"changed")
    with pytest.raises(CopyChanged):
        read(tmp_path, fetch, readers=2)
    assert (read(tmp_path, fetch, readers=2), fetch.number) == (DATA, 2)


def test_what_a_worker_could_not_finish_is_there_for_the_next_and_frees_the_lock(tmp_path: Path):
    def breaks_off(into: Path, progress) -> None:
        (into / "file").write_bytes(DATA)
        raise ConnectionError("the store went away")

    def goes_on(into: Path, progress) -> None:
        assert (into / "file").read_bytes() == DATA

    with pytest.raises(ConnectionError):
        read(tmp_path, breaks_off)
    assert read(tmp_path, goes_on) == DATA


def test_a_full_disk_is_freed_of_what_had_come(tmp_path: Path):
    def full(into: Path, progress) -> None:
        (into / "file").write_bytes(DATA)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        read(tmp_path, full)
    assert left(tmp_path) == ["lock"]


def test_copies_of_other_checkpoints_go_and_files_of_others_stay(tmp_path: Path):
    for name in (f"6-2-{'e' * 16}", f"6-2-{'f' * 16}.part", "output"):
        (tmp_path / name).mkdir()
    read(tmp_path, Fetches(), readers=2)
    assert [name for name in left(tmp_path) if ".read." not in name] == [f"7-2-{'d' * 16}", "lock", "output"]


def test_a_worker_that_waits_for_the_fetch_of_another_reports_its_progress(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(host_copy, "POLL_S", 0.001)
    reported, begun, seen = [], threading.Event(), threading.Event()

    def slow(into: Path, progress) -> None:
        (into / "file").write_bytes(DATA)
        begun.set()
        assert seen.wait(30)

    def received(size: int) -> None:
        reported.append(size)
        seen.set()

    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(read, tmp_path, slow, 2)
        assert begun.wait(30)
        assert read(tmp_path, Fetches(), 2, received) == DATA
        assert fetching.result() == DATA
    assert reported == [len(DATA)]
