"""Copies of workers' output folders on the dispatcher's disk: which names, how much, and what a restart counts."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.disk import outputs, space
from spotfleet.dispatcher.disk.files import TooLarge, sweep
from spotfleet.dispatcher.disk.outputs import Outputs
from spotfleet.errors import DiskFull, UsageError
from spotfleet.protocol.messages import OutputPiece

WORKER = "f-1/0/1"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a//b", ".", "", "a/\0", "x" * 256,
                                  "a/" * 1600 + "b"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str):
    for piece in (OutputPiece("append", name, 0, 1), OutputPiece("rename", "a", to=name or "..")):
        with pytest.raises(UsageError, match="is no name of a file inside a folder"):
            Outputs(tmp_path / "outputs").apply(WORKER, [(piece, b"x")])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_dispatcher_without_room_takes_nothing_and_keeps_what_it_has(tmp_path: Path, monkeypatch):
    held = Outputs(tmp_path)
    assert held.apply(WORKER, [(OutputPiece("append", "a", 0, 3), b"one")]) == [3]
    monkeypatch.setattr(space, "free_bytes", lambda _folder: space.RESERVE_BYTES + 2)
    with pytest.raises(DiskFull):
        held.apply(WORKER, [(OutputPiece("append", "a", 3, 3), b"two")])
    assert contents(tmp_path) == {"f-1@0@1/a": b"one"} and held.bytes == 3
    again, until = Outputs(tmp_path), time.monotonic() + 20  # a dispatcher that has restarted
    while again.bytes != 3 and time.monotonic() < until:
        time.sleep(0.005)
    assert again.bytes == 3 and again.age_s(time.time()) < 60


def test_one_worker_may_fill_no_more_than_its_share(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(outputs, "LIMIT_BYTES", 10)
    monkeypatch.setattr(outputs, "MOST_FILES", 2)
    held = Outputs(tmp_path)
    assert held.apply(WORKER, [(OutputPiece("append", "a", 0, 8), bytes(8))]) == [8]
    for more in (OutputPiece("append", "a", 8, 3), OutputPiece("draft", "b", 0, 3, last=True)):
        with pytest.raises(TooLarge, match="10 bytes"):
            held.apply(WORKER, [(more, bytes(3))])
    held.apply(WORKER, [(OutputPiece("append", "b"), b"")])
    with pytest.raises(TooLarge, match="2 files"):
        held.apply(WORKER, [(OutputPiece("append", "c"), b"")])
    assert held.apply("f-2/0/1", [(OutputPiece("append", "a", 0, 10), bytes(10))]) == [10]


def test_a_draft_that_is_not_what_it_was_said_to_be_takes_no_files_place(tmp_path: Path):
    held = Outputs(tmp_path)
    held.apply(WORKER, [(OutputPiece("append", "a", 0, 3), b"old")])
    pieces = [(OutputPiece("draft", "a", 0, 2), b"ne"),
              (OutputPiece("draft", "a", 2, 1, last=True, sha256="0" * 64), b"w")]
    assert held.apply(WORKER, pieces) == [2, -1]
    assert contents(tmp_path) == {"f-1@0@1/a": b"old"}


def test_a_piece_that_comes_twice_changes_nothing_more(tmp_path: Path):
    held = Outputs(tmp_path)
    sha = hashlib.sha256(b"newer").hexdigest()
    for pieces in ([OutputPiece("append", "log", 0, 5)], [OutputPiece("append", "log", 3, 5)],
                   [OutputPiece("append", "log", 9, 5)]):
        for _ in range(2):
            answer = held.apply(WORKER, [(p, b"abcde"[:p.bytes]) for p in pieces])
    assert answer == [8] and contents(tmp_path) == {"f-1@0@1/log": b"abcdecde"}  # no gap is filled
    half, whole = OutputPiece("draft", "log", 0, 3), OutputPiece("draft", "log", 3, 2, last=True, sha256=sha)
    assert held.apply(WORKER, [(half, b"new"), (whole, b"er")]) == [3, 5]
    assert held.apply(WORKER, [(whole, b"er")]) == [5]
    assert contents(tmp_path) == {"f-1@0@1/log": b"newer"}


def test_partial_files_of_a_job_that_has_left_memory_are_listed_as_not_collected(tmp_path: Path):
    Outputs(tmp_path / "past" / "j" / "outputs").apply(WORKER, [(OutputPiece("append", "a", 0, 3, whole=9), b"one")])
    assert archive.not_collected(tmp_path, ()) == {
        "lost": [], "partial_files": [{"job": "j", "worker": WORKER, "file": "a"}]}


def names(home: Path) -> list[str]:
    """What an archive or a download has of the job "j"."""
    return [name for name, _ in archive.outputs(home / "jobs" / "j")]


def test_a_file_that_has_arrived_in_part_is_never_one_of_the_collected_ones(tmp_path: Path):
    held = Outputs(tmp_path / "jobs/j/outputs")
    first, rest = OutputPiece("append", "a", 0, 4, whole=7), OutputPiece("append", "a", 4, 3, whole=7)
    assert held.apply(WORKER, [(first, b"half"), (OutputPiece("append", "b", 0, 3, whole=3), b"all")]) == [4, 3]
    assert names(tmp_path) == ["f-1@0@1/a.partial", "f-1@0@1/b"]
    assert archive.not_collected(tmp_path, ()) == {
        "lost": [], "partial_files": [{"job": "j", "worker": WORKER, "file": "a"}]}
    sweep(tmp_path)  # as a dispatcher does when it starts
    again = Outputs(tmp_path / "jobs/j/outputs")
    assert names(tmp_path) == ["f-1@0@1/a.partial", "f-1@0@1/b"]
    assert again.apply(WORKER, [(rest, b"way")]) == [7]
    assert names(tmp_path) == ["f-1@0@1/a", "f-1@0@1/b"] and archive.not_collected(tmp_path, ()) is None


def test_a_part_of_a_file_that_is_renamed_replaced_or_compared_is_followed(tmp_path: Path):
    held = Outputs(tmp_path / "jobs/j/outputs")
    sha = hashlib.sha256(b"half").hexdigest()
    for name in ("a", "b", "c"):
        held.apply(WORKER, [(OutputPiece("append", name, 0, 4, whole=7), b"half")])
    held.apply(WORKER, [(OutputPiece("rename", "a", to="d"), b"")])
    assert names(tmp_path) == [f"f-1@0@1/{n}.partial" for n in "bcd"]
    held.apply(WORKER, [(OutputPiece("draft", "b", 0, 4, last=True, sha256=sha), b"half")])
    held.apply(WORKER, [(OutputPiece("check", "c", 0, 4, last=True, sha256=sha), b"")])  # it was cut there since
    held.apply(WORKER, [(OutputPiece("rename", "b", to="d"), b"")])
    assert names(tmp_path) == ["f-1@0@1/c", "f-1@0@1/d"]


def test_pieces_of_an_older_agent_name_no_size_and_count_as_they_come(tmp_path: Path):
    Outputs(tmp_path / "jobs/j/outputs").apply(WORKER, [(OutputPiece("append", "log", 0, 4), b"half")])
    assert names(tmp_path) == ["f-1@0@1/log"] and archive.not_collected(tmp_path, ()) is None
