"""Files that are whole or absent, whenever writing fails; and who waits for the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotfleet.storage import atomic


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`file` or `folder` for each fsync."""
    found: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        found.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_a_file_is_replaced_whole_and_no_draft_is_left(tmp_path: Path):
    path = tmp_path / "a.json"
    for text in ("old", "ä"):
        atomic.write(path, text)
    assert (path.read_bytes(), names(tmp_path)) == ("ä".encode(), ["a.json"])


@pytest.mark.parametrize("draft", ["", "a.new"])
def test_a_body_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path, draft: str):
    path = tmp_path / "a.json"
    atomic.write(path, "old")
    with pytest.raises(OSError, match="full"):
        with atomic.replacing(path, draft=tmp_path / draft if draft else None) as file:
            file.write(b"new")
            raise OSError("full")
    assert (path.read_text(), names(tmp_path)) == ("old", ["a.json"])


def test_a_file_is_its_owners_alone_unless_the_umask_decides(tmp_path: Path):
    before = os.umask(0o022)
    try:
        atomic.write(tmp_path / "secret", "")
        atomic.write(tmp_path / "public", "", mode=atomic.BY_UMASK)
    finally:
        os.umask(before)
    assert [oct((tmp_path / n).stat().st_mode & 0o777) for n in ("secret", "public")] == ["0o600", "0o644"]


@pytest.mark.parametrize(("wishes", "expected"), [
    ({}, ["file", "folder"]), ({"sync": False}, []), ({"data_synced": True}, ["folder"])], ids=str)
def test_what_is_awaited_from_the_disk(tmp_path: Path, synced: list[str], wishes: dict, expected: list[str]):
    with atomic.replacing(tmp_path / "a", **wishes):
        pass
    assert synced == expected


def test_the_bytes_are_on_the_disk_before_the_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _descriptor: seen.append(names(tmp_path)))
    atomic.write(tmp_path / "a", "text")
    assert [name.endswith(".part") for found in seen for name in found] == [True, False]  # then the folder is synced
