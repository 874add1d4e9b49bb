"""The checkpoint target: whole files, of one fleet only."""

from __future__ import annotations

import os
import shutil

import pytest

from spotfleet.storage.folder import FolderStore, checkpoint_name


@pytest.fixture
def target(tmp_path):
    return FolderStore(str(tmp_path / "target"), "digits", "CERTIFICATE A")


def test_what_is_put_is_found_by_another_process_of_the_fleet(target, tmp_path):
    source = tmp_path / "a.ckpt"
    source.write_bytes(b"weights")
    target.put(checkpoint_name("job-1", 7, 3), source)
    target.write("ledger.db", b"rows")
    again = FolderStore(str(tmp_path / "target"), "digits", "CERTIFICATE A")
    assert again.names() == ["jobs/job-1/checkpoints/7-3.ckpt", "ledger.db"]
    assert again.find("jobs/job-1/checkpoints/7-3.ckpt").read_bytes() == b"weights"
    assert again.names("jobs/job-1") == ["jobs/job-1/checkpoints/7-3.ckpt"]


def test_a_later_fleet_of_the_same_name_finds_nothing_of_it(target, tmp_path):
    target.write("ledger.db", b"rows")
    later = FolderStore(str(tmp_path / "target"), "digits", "CERTIFICATE B")
    assert later.names() == [] and later.find("ledger.db") is None


def test_a_file_that_could_not_be_written_leaves_the_older_one_whole(target, tmp_path):
    target.write("ledger.db", b"rows")
    with pytest.raises(FileNotFoundError):
        target.put("ledger.db", tmp_path / "none")
    assert target.find("ledger.db").read_bytes() == b"rows"
    assert target.names() == ["ledger.db"]


def test_only_its_owner_can_read_it(target):
    target.write("ledger.db", b"rows")
    assert target.find("ledger.db").stat().st_mode & 0o777 == 0o600


def test_what_is_dropped_is_gone_and_may_be_dropped_again(target):
    target.write("ledger.db", b"rows")
    target.drop("ledger.db")
    target.drop("ledger.db")
    assert target.names() == []


def test_two_machines_that_write_the_same_name_at_once_leave_one_whole_file(target, tmp_path, monkeypatch):
    """Their processes may bear the same number."""
    (tmp_path / "source").write_bytes(b"mine")
    copy = shutil.copyfileobj

    def slowly(source, out, size):
        out.write(source.read(1))
        target.write("7-1.ckpt", b"theirs")
        copy(source, out, size)

    monkeypatch.setattr("spotfleet.storage.folder.shutil.copyfileobj", slowly)
    target.put("7-1.ckpt", tmp_path / "source")
    assert target.find("7-1.ckpt").read_bytes() == b"mine"
    assert target.names() == ["7-1.ckpt"]


def test_what_a_machine_that_is_gone_was_just_writing_is_swept_and_what_is_being_written_stays(target):
    target.write("jobs/j/checkpoints/7-1.ckpt", b"rows")
    folder = target.folder / "jobs/j/checkpoints"
    left, fresh, other = folder / ".8-1.ckpt.1234.part", folder / ".9-1.ckpt.1234.part", folder / "mine.part"
    for path in (left, fresh, other):
        path.write_bytes(b"half")
    for path in (left, other, folder / "7-1.ckpt"):
        os.utime(path, (0, 0))
    target.sweep()
    assert sorted(p.name for p in folder.iterdir()) == [".9-1.ckpt.1234.part", "7-1.ckpt", "mine.part"]
