"""Keys of the archive: contents of several files by ranges, a ledger that grows, and a target that hangs."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from spotfleet.dispatcher.checkpoints import archive, archive_files
from spotfleet.dispatcher.checkpoints.archive import Content, logs_in
from spotfleet.dispatcher.checkpoints.archive_files import ArchiveFiles, TargetGlance
from spotfleet.errors import DiskFull
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.ledger import Ledger
from spotfleet.protocol.archive import LEDGER, ArchiveFile, ArchiveHead, parse
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.folder import FolderStore, checkpoint_name
from spotfleet.storage.mirror import Piece


def manifest(files: ArchiveFiles) -> dict[str, ArchiveFile]:
    sent: list[bytes] = []
    files.send_manifest(sent.append, {}, None, 5.0)
    head, *found = filter(None, parse(sent))
    assert isinstance(head, ArchiveHead) and head.files == len(found)
    return {file.key: file for file in found}


def read(files: ArchiveFiles, file: ArchiveFile) -> bytes:
    return b"".join(files.contents([file.key])[0].read(0, file.bytes))


def test_a_content_of_several_files_is_read_by_any_range(tmp_path: Path):
    for name, data in (("one", b"2345"), ("two", b""), ("three", b"6789")):
        (tmp_path / name).write_bytes(data)
    content = Content([tmp_path / "one", tmp_path / "two", tmp_path / "three"], b"01")
    assert content.size() == 10
    for start in range(11):
        for end in range(start, 11):
            assert b"".join(content.read(start, end)) == b"0123456789"[start:end]
    with pytest.raises(FileNotFoundError, match="only 10 bytes"):
        list(content.read(0, 11))


def test_a_log_is_one_key_with_a_line_for_its_removed_beginning(tmp_path: Path):
    logs = tmp_path / "jobs/a-1/logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log.1000").write_bytes(b"middle ")
    (logs / "rank-0.log.1007").write_bytes(b"end")
    files = ArchiveFiles(tmp_path, Ledger(tmp_path / "ledger.db"))
    found = manifest(files)["jobs/a-1/logs/rank-0.log"]
    text = read(files, found)
    assert text.startswith(b"spotfleet: ") and text.endswith(b"\nmiddle end") and len(text) == found.bytes
    with (logs / "rank-0.log.1007").open("ab") as file:
        file.write(b" of a later time")
    assert read(files, found) == text


def test_the_logs_of_a_job_are_listed_once_for_all_keys_of_a_request(tmp_path: Path, monkeypatch):
    logs = tmp_path / "jobs/a-1/logs"
    logs.mkdir(parents=True)
    for rank in range(9):
        (logs / f"rank-{rank}.log").write_bytes(b"%d" % rank)
    listed = []
    monkeypatch.setattr(archive, "logs_in", lambda job: (listed.append(job), logs_in(job))[1])
    files = ArchiveFiles(tmp_path, Ledger(tmp_path / "ledger.db"))
    pieces = [Piece(f"jobs/a-1/logs/rank-{rank}.log", 0, 1) for rank in range(9)]
    found = files.contents([piece.key for piece in pieces])
    assert (b"".join(archive_files.blocks(found, pieces)), listed) == (b"012345678", [tmp_path / "jobs/a-1"])


@pytest.mark.parametrize("full", [False, True])
def test_the_ledgers_copy_stays_until_a_manifest_has_newer_events(tmp_path: Path, monkeypatch, full: bool):
    ledger = Ledger(tmp_path / "ledger.db")
    files = ArchiveFiles(tmp_path, ledger)
    with pytest.raises(FileNotFoundError):  # a dispatcher that has restarted since the manifest
        files.contents([LEDGER])
    if full:
        def refuse(path):
            raise DiskFull("no room")

        monkeypatch.setattr(ledger, "copy_to", refuse)
    first = manifest(files)[LEDGER]
    data = read(files, first)
    ledger.append(FleetDown(1.0, "asked"))
    assert read(files, first) == data
    later = manifest(files)[LEDGER]
    assert later.sha256 != first.sha256 and b"FleetDown" in read(files, later)


def test_a_target_that_hangs_is_waited_for_once_and_its_checkpoints_are_copied(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(archive_files, "TARGET_S", 0.1)
    store, checkpoint = FolderStore(tmp_path), Checkpoint(7, "0" * 64, 3, 1)
    path = store.path(checkpoint_name("a-1", 7, 1))
    path.parent.mkdir(parents=True)
    os.mkfifo(path.with_suffix(".json"))  # opening it waits
    glance, looks = TargetGlance(store), []
    monkeypatch.setattr(glance, "_look", lambda *given, look=glance._look: (looks.append(given), look(*given)))
    assert [glance.place_of("a-1", checkpoint), glance.place_of("a-1", checkpoint)] == ["", ""]
    assert len(looks) == 1
    path.with_suffix(".json").write_text(json.dumps({}))  # it answers: the thread ends
    for thread in threading.enumerate():
        if thread.name == "target":
            thread.join(30)
