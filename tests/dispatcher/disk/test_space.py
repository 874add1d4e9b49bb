"""Room for small records on a full disk of the dispatcher."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.dispatcher.disk import jobfile, space
from spotfleet.errors import DiskFull

SPARES = list(space.SPARES)


def spares(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("spare-*"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "jobs" / "a-1").mkdir(parents=True)
    space.create_spares(tmp_path)
    assert spares(tmp_path) == SPARES
    return tmp_path


def save_where_room_comes_with(home: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> bool:
    """Save a record that fits once no more than `left` spares are there."""
    def save(folder: Path, record: object) -> None:
        if len(spares(home)) > left:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jobfile, "save", save)
    return jobfile.try_save(home / "jobs" / "a-1", SimpleNamespace())


def test_a_record_that_finds_no_room_takes_that_of_a_spare(home: Path, monkeypatch):
    monkeypatch.setattr(space, "why", lambda _: "full")
    assert save_where_room_comes_with(home, monkeypatch, 3)
    assert spares(home) == SPARES[1:]


def test_a_record_that_never_finds_room_is_tried_again_later(home: Path, monkeypatch):
    assert not save_where_room_comes_with(home, monkeypatch, -1)
    assert spares(home) == []


def test_spares_come_back_with_the_next_record_once_there_is_room(home: Path, monkeypatch):
    space.remove_spare(home)
    assert save_where_room_comes_with(home, monkeypatch, 4)
    assert spares(home) == SPARES


def limited(monkeypatch: pytest.MonkeyPatch, files: int, left: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(
        f_files=files, f_favail=left, f_bavail=1 << 30, f_bfree=1 << 30, f_blocks=1 << 31, f_frsize=4096))


def test_a_disk_without_room_for_files_is_full_too(home: Path, monkeypatch):
    limited(monkeypatch, 1500, 12)
    full = "the dispatcher's disk is full: 12 of 1,500 files (inodes) free"
    assert space.why(home) == full
    with pytest.raises(DiskFull) as refused:
        space.refuse_if_full(home)
    assert str(refused.value) == full


def test_a_file_system_without_a_limit_on_files_is_not_full(home: Path, monkeypatch):
    limited(monkeypatch, 0, 0)
    assert space.why(home) == ""
    space.refuse_if_full(home)
