"""Files and folders after a power cut: what `storage/atomic.py` promises of each change."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.storage import atomic
from tests.support.power_cut import ForgetfulDisk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch):
    with ForgetfulDisk(monkeypatch) as found:
        yield found


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_written_file_is_there_after_a_power_cut_also_in_a_new_folder(disk: ForgetfulDisk, tmp_path: Path):
    home = tmp_path / "home"
    atomic.make_folder(home / "jobs" / "one-1")
    atomic.write(home / "jobs" / "one-1" / "job.json", "old")
    atomic.write(home / "jobs" / "one-1" / "job.json", "new")
    assert tree(disk.cut(tmp_path, tmp_path / "cut")) == {"home/jobs/one-1/job.json": "new"}


def test_a_file_that_needs_no_durability_may_be_gone(disk: ForgetfulDisk, tmp_path: Path):
    atomic.write(tmp_path / "a", "old")
    atomic.write(tmp_path / "a", "new", sync=False)
    assert tree(disk.cut(tmp_path, tmp_path / "cut")) == {"a": "old"}


def test_a_renamed_folder_has_its_new_name_and_its_content_after_a_power_cut(disk: ForgetfulDisk, tmp_path: Path):
    (tmp_path / "part" / "in").mkdir(parents=True)
    (tmp_path / "part" / "in" / "a").write_text("text")
    atomic.sync_tree(tmp_path / "part")
    atomic.rename(tmp_path / "part", tmp_path / "archive")
    assert tree(disk.cut(tmp_path, tmp_path / "cut")) == {"archive/in/a": "text"}


def test_a_file_that_moves_to_another_folder_is_in_one_of_them_after_a_power_cut(disk: ForgetfulDisk, tmp_path: Path):
    for name in ("here", "there"):
        atomic.make_folder(tmp_path / name)
    atomic.write(tmp_path / "here" / "a", "text")
    atomic.rename(tmp_path / "here" / "a", tmp_path / "there" / "b")
    assert tree(disk.cut(tmp_path, tmp_path / "cut")) == {"there/b": "text"}


def test_a_removed_file_does_not_come_back(disk: ForgetfulDisk, tmp_path: Path):
    atomic.write(tmp_path / "secrets.json", "text")
    atomic.remove(tmp_path / "secrets.json")
    atomic.remove(tmp_path / "secrets.json")
    assert tree(disk.cut(tmp_path, tmp_path / "cut")) == {}
