"""Copies of workers' output folders on the dispatcher's disk: which names, how much, and what a restart counts."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from functools import partial as partial_of
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints import archive
from spotfleet.dispatcher.disk import outputs, partials, space
from spotfleet.dispatcher.disk.files import TooLarge, sweep
from spotfleet.dispatcher.disk.outputs import Outputs, RequestStopped
from spotfleet.errors import DiskFull, UsageError
from spotfleet.fleet.ledger import Ledger
from spotfleet.protocol.messages import OutputPiece
from spotfleet.storage import names

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


def test_a_file_that_is_renamed_to_its_own_name_makes_no_room_and_stays_partial(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(outputs, "LIMIT_BYTES", 10)
    held = Outputs(tmp_path)
    held.apply(WORKER, [(OutputPiece("append", "a", 0, 8, whole=9), bytes(8))])
    for _ in range(3):
        assert held.apply(WORKER, [(OutputPiece("rename", "a", to="a"), b"")]) == [8]
    with pytest.raises(TooLarge, match="10 bytes"):
        held.apply(WORKER, [(OutputPiece("append", "b", 0, 3), bytes(3))])
    assert held.bytes == 8
    assert list(partials.PartialMarkers(tmp_path / "f-1@0@1").files()) == ["a"]


@pytest.mark.parametrize(("old", "new"), [("a", "a/b"), ("a/b", "a"), ("a/b/c", "a"), ("a", "a/b/c")])
def test_a_file_that_takes_the_place_of_its_folder_or_goes_below_its_name_is_followed(tmp_path: Path, old: str,
                                                                                      new: str):
    held = Outputs(tmp_path)
    held.apply(WORKER, [(OutputPiece("append", old, 0, 3), b"one")])
    assert held.apply(WORKER, [(OutputPiece("rename", old, to=new), b"")]) == [3]
    assert contents(tmp_path) == {f"f-1@0@1/{new}": b"one"} and held.bytes == 3
    assert held.apply(WORKER, [(OutputPiece("rename", old, to=new), b"")]) == [3]  # the answer was lost


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


def listed(home: Path) -> list[str]:
    """What an archive or a download has of the job "j"."""
    return [name for name, _ in archive.outputs(home / "jobs" / "j")]


def test_a_file_that_has_arrived_in_part_is_never_one_of_the_collected_ones(tmp_path: Path):
    held = Outputs(tmp_path / "jobs/j/outputs")
    first, rest = OutputPiece("append", "a", 0, 4, whole=7), OutputPiece("append", "a", 4, 3, whole=7)
    assert held.apply(WORKER, [(first, b"half"), (OutputPiece("append", "b", 0, 3, whole=3), b"all")]) == [4, 3]
    assert listed(tmp_path) == ["f-1@0@1/a.partial", "f-1@0@1/b"]
    assert archive.not_collected(tmp_path, ()) == {
        "lost": [], "partial_files": [{"job": "j", "worker": WORKER, "file": "a"}]}
    sweep(tmp_path)  # as a dispatcher does when it starts
    again = Outputs(tmp_path / "jobs/j/outputs")
    assert listed(tmp_path) == ["f-1@0@1/a.partial", "f-1@0@1/b"]
    assert again.apply(WORKER, [(rest, b"way")]) == [7]
    assert listed(tmp_path) == ["f-1@0@1/a", "f-1@0@1/b"] and archive.not_collected(tmp_path, ()) is None


def test_a_part_of_a_file_that_is_renamed_replaced_or_compared_is_followed(tmp_path: Path):
    held = Outputs(tmp_path / "jobs/j/outputs")
    sha = hashlib.sha256(b"half").hexdigest()
    for name in ("a", "b", "c"):
        held.apply(WORKER, [(OutputPiece("append", name, 0, 4, whole=7), b"half")])
    held.apply(WORKER, [(OutputPiece("rename", "a", to="d"), b"")])
    assert listed(tmp_path) == [f"f-1@0@1/{n}.partial" for n in "bcd"]
    held.apply(WORKER, [(OutputPiece("draft", "b", 0, 4, last=True, sha256=sha), b"half")])
    held.apply(WORKER, [(OutputPiece("check", "c", 0, 4, last=True, sha256=sha), b"")])  # it was cut there since
    held.apply(WORKER, [(OutputPiece("rename", "b", to="d"), b"")])
    assert listed(tmp_path) == ["f-1@0@1/c", "f-1@0@1/d"]


def test_pieces_of_an_older_agent_name_no_size_and_count_as_they_come(tmp_path: Path):
    Outputs(tmp_path / "jobs/j/outputs").apply(WORKER, [(OutputPiece("append", "log", 0, 4), b"half")])
    assert listed(tmp_path) == ["f-1@0@1/log"] and archive.not_collected(tmp_path, ()) is None


def partial(held: Outputs, *names_of_files: str) -> None:
    """Collect half of each file."""
    for name in names_of_files:
        held.apply(WORKER, [(OutputPiece("append", name, 0, 4, whole=9), b"half")])


LONG_NAME = "n" * 250
UNLUCKY = ("x", "x.partial", "y", LONG_NAME, "é" * 125, f"d/{LONG_NAME}", f"{'m' * 9}~{'0' * 64}")
UNLUCKY_WHOLE = ("y.partial/z", f"{'n' * (255 - 8 - 65)}~{names.digest_of(LONG_NAME)}.partial")


def unlucky(home: Path) -> Path:
    """A job with partial files whose names with a suffix are too long, or those of other files; its folder."""
    held = Outputs(home / "jobs/j/outputs")
    partial(held, *UNLUCKY)
    for name in UNLUCKY_WHOLE:
        held.apply(WORKER, [(OutputPiece("append", name, 0, 5, whole=5), b"whole")])
    return home / "jobs/j"


def test_no_name_of_a_partial_file_is_too_long_or_that_of_another_file_and_each_is_found_by_it(tmp_path: Path):
    job = unlucky(tmp_path)
    found = dict(archive.outputs(job))
    assert len(found) == len([*archive.outputs(job)]) == len(UNLUCKY) + len(UNLUCKY_WHOLE)
    assert {f"f-1@0@1/{name}" for name in UNLUCKY_WHOLE} | {"f-1@0@1/x.partial.partial"} < set(found)
    assert all(len(part.encode()) <= 255 for name in found for part in name.split("/"))
    folder = job / "outputs/f-1@0@1"
    for name, path in found.items():
        assert partials.find(folder, name.removeprefix("f-1@0@1/")) == path
        assert (path.read_bytes() == b"half") is name.endswith(".partial") is (
            str(path.relative_to(folder)) in UNLUCKY) or path.name in UNLUCKY_WHOLE
    listed = archive.not_collected(tmp_path, ())["partial_files"]
    assert {row["file"]: row.get("at", row["file"] + ".partial") for row in listed} == {
        str(path.relative_to(folder)): name.removeprefix("f-1@0@1/") for name, path in found.items()
        if str(path.relative_to(folder)) in UNLUCKY}
    for marker in (job / "outputs/.f-1@0@1.partial").iterdir():
        marker.write_text("")  # as a power failure may leave it
    assert all(partials.find(folder, name.removeprefix("f-1@0@1/")) == path for name, path in found.items())


def test_the_archive_of_a_fleet_that_ends_by_itself_holds_partial_files_with_unlucky_names(tmp_path: Path):
    unlucky(tmp_path / "home")
    archive.write_folder(tmp_path / "home", Ledger(tmp_path / "home/ledger.db"), tmp_path / "archive")
    found = contents(tmp_path / "archive/jobs/j/outputs/f-1@0@1")
    assert len(found) == len(UNLUCKY) + len(UNLUCKY_WHOLE) and "refused" not in json.loads(
        (tmp_path / "archive/not-collected.json").read_text())


def test_a_file_that_the_archive_cannot_hold_is_set_aside_and_one_that_cannot_be_read_is_listed(tmp_path: Path,
                                                                                               monkeypatch):
    bad, gone, good = tmp_path / "bad", tmp_path / "gone", tmp_path / "good"
    bad.write_bytes(b"bad")
    good.write_bytes(b"good")
    found = [("jobs/j/outputs/w/x", good), ("jobs/j/outputs/w/x/y", bad), ("jobs/j/outputs/w/g", gone),
             ("jobs/j/outputs/w/z", good)]
    monkeypatch.setattr(archive, "members", lambda _home: ((name, archive.Content([path])) for name, path in found))
    archive.write_folder(tmp_path, Ledger(tmp_path / "ledger.db"), tmp_path / "archive")
    aside = names.aside("jobs/j/outputs/w/x/y")
    assert (tmp_path / "archive" / aside).read_bytes() == b"bad"
    assert contents(tmp_path / "archive/jobs/j/outputs/w") == {"x": b"good", "z": b"good"}
    assert json.loads((tmp_path / "archive/not-collected.json").read_text())["refused"] == [
        {"name": "jobs/j/outputs/w/x/y", "at": aside, "why": "File exists"},
        {"name": "jobs/j/outputs/w/g", "at": "", "why": "No such file or directory"}]


def test_very_many_partial_files_are_listed_in_part_and_those_with_short_names_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(archive, "LISTED_BYTES", 550)
    partial(Outputs(tmp_path / "jobs/j/outputs"), *(f"{n:0100}" for n in range(9)), LONG_NAME)
    found = archive.not_collected(tmp_path, ())
    assert found["more_partial_files"] and [row["file"] for row in found["partial_files"]] == [LONG_NAME]


def test_a_file_that_makes_way_stays_partial_and_takes_no_name_that_is_too_long(tmp_path: Path):
    held = Outputs(tmp_path / "jobs/j/outputs")
    partial(held, "a", "b/c", "l" * 254)
    for name in ("a/new", "b", f"{'l' * 254}/new"):
        held.apply(WORKER, [(OutputPiece("append", name, 0, 3, whole=3), b"new")])
    found = {name.removeprefix("f-1@0@1/") for name, _ in archive.outputs(tmp_path / "jobs/j")}
    (long,) = [name for name in found if "~" in name]
    assert found == {"a.1.partial", "b.1/c.partial", "a/new", "b", f"{'l' * 254}/new", long}
    assert long.endswith(".partial")


def test_a_folder_deeper_than_a_walk_can_go_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="is no name of a file"):
        Outputs(tmp_path).apply(WORKER, [(OutputPiece("append", "a/" * 101 + "b", 0, 1), b"x")])


def test_one_request_may_have_a_bounded_number_of_bytes_compared(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(outputs, "READ_BYTES", 20)
    held, sha = Outputs(tmp_path), hashlib.sha256(bytes(8)).hexdigest()
    held.apply(WORKER, [(OutputPiece("append", "a", 0, 8), bytes(8))])
    check = OutputPiece("check", "a", 0, 8, last=True, sha256=sha)
    assert held.apply(WORKER, [(check, b"")] * 2) == [8, 8]
    assert held.apply(WORKER, [(replace(check, sha256=""), b"")] * 9) == [8] * 9  # nothing is read
    with pytest.raises(UsageError, match="may compare 20 bytes"):
        held.apply(WORKER, [(check, b"")] * 3)
    again = (OutputPiece("draft", "a", 4, 4, last=True, sha256=sha), bytes(4))  # resent, so the file is compared
    assert held.apply(WORKER, [again] * 5) == [8, 8, 8, -1, -1]


def test_work_that_is_stopped_ends_between_two_pieces_and_while_it_compares(tmp_path: Path):
    held = Outputs(tmp_path)
    big = bytes(3 << 20)
    held.apply(WORKER, [(OutputPiece("append", "a", 0, len(big)), big)])
    asked: list[int] = []

    def stopped(after: int) -> bool:
        asked.append(1)
        return len(asked) > after

    pieces = [(OutputPiece("append", name, 0, 1), b"x") for name in ("b", "c")]
    with pytest.raises(RequestStopped):
        held.apply(WORKER, pieces, partial_of(stopped, 1))
    assert set(contents(tmp_path)) == {"f-1@0@1/a", "f-1@0@1/b"}
    asked.clear()
    with pytest.raises(RequestStopped):
        held.apply(WORKER, [(OutputPiece("check", "a", 0, len(big), sha256="0"), b"")], partial_of(stopped, 2))
    assert len(asked) == 3


def on_disk(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_piece_that_writes_nothing_leaves_no_marker_and_no_folder(tmp_path: Path):
    held = Outputs(tmp_path)
    pieces = [(OutputPiece("append", f"{n}/{n}", at=5, whole=100), b"") for n in range(5)]
    assert held.apply(WORKER, pieces) == [0] * 5 and on_disk(tmp_path) == ["f-1@0@1"]


def test_files_with_markers_folders_and_drafts_are_limited_before_anything_is_written(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(outputs, "MOST_FILES", 2)
    monkeypatch.setattr(outputs, "MOST_DRAFTS", 2)
    for held in (Outputs(tmp_path), Outputs(tmp_path)):  # the second as after a restart
        if not (tmp_path / "f-1@0@1").exists():
            partial(held, "a/b", "a/c")
        before = on_disk(tmp_path)
        for piece in (OutputPiece("append", "d", 0, 4, whole=9), OutputPiece("append", "x/y/d", 0, 4)):
            with pytest.raises(TooLarge, match="2 files"):
                held.apply(WORKER, [(piece, b"half")])
        assert on_disk(tmp_path) == before and len([name for name in before if ".partial/" in name]) == 2
    with pytest.raises(TooLarge, match="2 folders"):
        held.apply("f-2/0/1", [(OutputPiece("append", "x/y/z/d", 0, 4), b"half")])
    assert not on_disk(tmp_path / "f-2@0@1")
    for n in range(5):
        held.apply("f-2/0/1", [(OutputPiece("draft", str(n), 0, 4), b"half")])
    assert len([*(tmp_path / ".f-2@0@1.part").iterdir()]) == 2
    sha = hashlib.sha256(b"half").hexdigest()
    assert held.apply("f-2/0/1", [(OutputPiece("draft", "0", 4, last=True, sha256=sha), b"")]) == [-1]  # sent again
    assert held.apply("f-2/0/1", [(OutputPiece("draft", "4", 4, last=True, sha256=sha), b"")]) == [4]


def test_folders_take_no_room_of_the_reserve(tmp_path: Path, monkeypatch):
    held = Outputs(tmp_path)
    monkeypatch.setattr(space, "free_bytes", lambda _folder: space.RESERVE_BYTES + 3 * outputs.BLOCK_BYTES)
    assert held.apply(WORKER, [(OutputPiece("append", "a/b", 0, 3), b"one")]) == [3]
    with pytest.raises(DiskFull):
        held.apply(WORKER, [(OutputPiece("append", "c/d/e", 0, 3), b"one")])
    assert on_disk(tmp_path) == ["f-1@0@1", "f-1@0@1/a", "f-1@0@1/a/b"]


def test_the_drafts_of_one_worker_count_together(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(outputs, "LIMIT_BYTES", 10)
    held = Outputs(tmp_path)
    held.apply(WORKER, [(OutputPiece("draft", "a", 0, 6), bytes(6))])
    with pytest.raises(TooLarge, match="10 bytes"):
        held.apply(WORKER, [(OutputPiece("draft", "b", 0, 6), bytes(6))])
    assert held.apply(WORKER, [(OutputPiece("draft", "a", 0, 8), bytes(8))]) == [8]


def test_markers_are_not_read_to_list_partial_files(tmp_path: Path, monkeypatch):
    partial(Outputs(tmp_path / "jobs/j/outputs"), "a", "b")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("a marker is read"))
    assert [row["file"] for row in archive.not_collected(tmp_path, ())["partial_files"]] == ["a", "b"]
    assert listed(tmp_path) == ["f-1@0@1/a.partial", "f-1@0@1/b.partial"]


def test_comparisons_count_as_progress_a_few_times_only(tmp_path: Path):
    held, sha = Outputs(tmp_path), hashlib.sha256(bytes(8)).hexdigest()
    assert held.moved(WORKER) == 0
    held.apply(WORKER, [(OutputPiece("append", "a", 0, 8), bytes(8)), (OutputPiece("append", "empty"), b"")])
    seen = [held.moved(WORKER)]
    for _ in range(2 * outputs.COMPARED):
        held.apply(WORKER, [(OutputPiece("check", "a", 0, 8, last=True, sha256=sha), b"")])
        seen.append(held.moved(WORKER))
    assert outputs.COMPARED <= len(set(seen)) - 1 < outputs.COMPARED + 2
    held.apply(WORKER, [(OutputPiece("append", "a", 0, 8), bytes(8)), (OutputPiece("append", "empty"), b"")])
    assert held.moved(WORKER) == seen[-1]
