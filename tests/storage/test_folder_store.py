"""The checkpoint target: whole files, of one fleet only."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from spotfleet.storage.folder import checkpoint_name, fleet_store, read_range
from spotfleet.storage.store import UnsafeKey


@pytest.fixture
def target(tmp_path):
    return fleet_store(str(tmp_path / "target"), "digits", "CERTIFICATE A")


def test_what_is_put_is_found_by_another_process_of_the_fleet(target, tmp_path):
    source = tmp_path / "a.ckpt"
    source.write_bytes(b"weights")
    target.put(checkpoint_name("job-1", 7, 3), read_range(source))
    target.put("ledger.db", [b"rows"])
    again = fleet_store(str(tmp_path / "target"), "digits", "CERTIFICATE A")
    assert again.names() == ["jobs/job-1/checkpoints/7-3.ckpt", "ledger.db"]
    assert again.find("jobs/job-1/checkpoints/7-3.ckpt").read_bytes() == b"weights"
    assert again.names("jobs/job-1") == ["jobs/job-1/checkpoints/7-3.ckpt"]


def test_a_mounted_bucket_which_renames_nothing_is_named_with_what_to_do(target, monkeypatch):
    def replace(path: Path, _target: Path) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path))

    def denied(path: Path, missing_ok: bool = False) -> None:  # without --allow-delete
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="as in a mounted bucket: name the bucket itself") as caught:
        target.put("ledger.db", [b"rows"])
    assert caught.value.strerror.startswith("files cannot be renamed") and target.names() == []  # as `status` shows it
    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(OSError, match="cannot be renamed there"):
        target.put("ledger.db", [b"rows"])


def test_a_later_fleet_of_the_same_name_finds_nothing_of_it(target, tmp_path):
    target.put("ledger.db", [b"rows"])
    later = fleet_store(str(tmp_path / "target"), "digits", "CERTIFICATE B")
    assert later.names() == [] and later.find("ledger.db") is None


def test_a_file_that_could_not_be_written_leaves_the_older_one_whole(target, tmp_path):
    target.put("ledger.db", [b"rows"])
    with pytest.raises(FileNotFoundError):
        target.put("ledger.db", read_range(tmp_path / "none"))
    assert target.find("ledger.db").read_bytes() == b"rows"
    assert target.names() == ["ledger.db"]


def test_only_its_owner_can_read_it(target):
    target.put("ledger.db", [b"rows"])
    assert target.find("ledger.db").stat().st_mode & 0o777 == 0o600


def test_a_deleted_key_is_gone_and_may_be_deleted_again(target):
    target.put("ledger.db", [b"rows"])
    target.delete("ledger.db")
    target.delete("ledger.db")
    assert target.names() == []


def test_two_machines_that_write_the_same_key_at_once_leave_one_whole_file(target):
    """Their processes may have the same number."""
    def slowly():
        yield b"m"
        target.put("7-1.ckpt", [b"theirs"])
        yield b"ine"

    target.put("7-1.ckpt", slowly())
    assert target.find("7-1.ckpt").read_bytes() == b"mine"
    assert target.names() == ["7-1.ckpt"]


def test_a_range_is_read_and_a_put_returns_the_digest(target):
    assert target.put("a/b", [b"01234", b"56789"]) == hashlib.sha256(b"0123456789").hexdigest()
    assert b"".join(target.get("a/b", start=3, end=7)) == b"3456"
    assert b"".join(target.get("a/b", start=8)) == b"89" and list(target.get("a/b", start=10)) == []
    with pytest.raises(FileNotFoundError):
        list(target.get("a/c"))
    for prefix in ("a", "a/b", ""):
        assert [(e.key, e.bytes) for e in target.list(prefix)] == [("a/b", 10)]


def test_content_of_another_size_than_named_is_not_stored(target):
    with pytest.raises(OSError, match="3 bytes instead of 4"):
        target.put("a", [b"abc"], size=4)
    assert target.names() == []


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a/.", "a/", "a/\0", "x" * 256,
                                 "a\ud800"])
def test_no_key_leads_out_of_the_folder(target, key):
    for act in (lambda: target.put(key, [b"x"]), lambda: list(target.get(key)), lambda: target.delete(key)):
        with pytest.raises(UnsafeKey):
            act()
    assert not target.folder.exists()


def test_what_a_machine_that_is_gone_was_just_writing_is_swept_and_what_is_being_written_stays(target):
    target.put("jobs/j/checkpoints/7-1.ckpt", [b"rows"])
    folder = target.folder / "jobs/j/checkpoints"
    left, fresh, other = folder / ".8-1.ckpt.1234.part", folder / ".9-1.ckpt.1234.part", folder / "mine.part"
    for path in (left, fresh, other):
        path.write_bytes(b"half")
    for path in (left, other, folder / "7-1.ckpt"):
        os.utime(path, (0, 0))
    target.sweep()
    assert sorted(p.name for p in folder.iterdir()) == [".9-1.ckpt.1234.part", "7-1.ckpt", "mine.part"]
