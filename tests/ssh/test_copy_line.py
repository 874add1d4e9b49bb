"""Copies from a machine, without ssh: the command lines of rsync, and tar after an interruption."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from shutil import which as real_which

import pytest

from spotfleet.errors import SpotfleetError
from spotfleet.ssh import copy
from spotfleet.ssh.fanout import FanoutTarget


def test_sources_are_compressed_on_their_way_up_and_results_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines: list[list[str]] = []

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        return subprocess.CompletedProcess(line, 0, "rsync  version 3.2.7", "")

    monkeypatch.setattr(copy.subprocess, "run", run)
    monkeypatch.setattr(copy.shutil, "which", lambda name: f"/usr/bin/{name}")
    place = FanoutTarget("lab-w0", "lab-0", tmp_path / "config")
    copy.up(place, str(tmp_path), "x")
    copy.down(place, "out/", str(tmp_path))
    copy.down(place, "out/", str(tmp_path), ["-z"])
    up, down, on_demand = (line for line in lines if "--version" not in line)
    assert up[:3] == ["rsync", "-az", "--partial"] and up[-1] == "lab-w0:x"
    assert down[:3] == ["rsync", "-a", "--partial"] and "-z" not in down and down[-2] == "lab-w0:out/"
    assert "-z" in on_demand


class Here(FanoutTarget):
    """This machine, as if ssh had led to it."""

    def command(self, *words: str) -> list[str]:
        return ["sh", "-c", words[-1]]


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the far machine; neither side has rsync."""
    monkeypatch.setattr(copy.shutil, "which", lambda name: None)
    (tmp_path / "far/out").mkdir(parents=True)
    (tmp_path / "far/out/a.bin").write_bytes(os.urandom(300_000))
    (tmp_path / "far/out/b.txt").write_text("b")
    return tmp_path / "far/out"


def fetch(far: Path, near: Path) -> list[str]:
    lines: list[str] = []
    copy.down(Here("lab-w0", "lab-0", near), str(far), str(near), progress=lines.append)
    return lines


def cut_off(far: Path, near: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupt a copy, and return what it has left."""
    with monkeypatch.context() as patch:
        patch.setattr(copy.bundle, "extract", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch(far, near)
    (left,) = near.glob(".spotfleet-*.part")
    os.truncate(left, 200_000)
    return left


@pytest.mark.parametrize("meanwhile", ["nothing", "damaged here", "changed there"])
def test_an_interrupted_copy_by_tar_goes_on_if_the_bytes_are_the_same(far: Path, tmp_path: Path, meanwhile: str,
                                                                      monkeypatch: pytest.MonkeyPatch):
    near = tmp_path / "near"
    near.mkdir()
    left = cut_off(far, near, monkeypatch)
    if meanwhile == "damaged here":
        left.write_bytes(b"x" + left.read_bytes()[1:])
    elif meanwhile == "changed there":
        (far / "a.bin").write_bytes(os.urandom(300_000))
    assert ("0 MB are here already" in fetch(far, near)) == (meanwhile == "nothing")
    assert {p.name: p.read_bytes() for p in (near / "out").iterdir()} == {p.name: p.read_bytes() for p in far.iterdir()}
    assert sorted(p.name for p in near.iterdir()) == ["out"]


def test_a_copy_by_tar_that_is_interrupted_while_it_puts_files_in_their_place_goes_on_and_leaves_no_half_file(
        far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    near, move = tmp_path / "near", copy.shutil.move
    near.mkdir()

    def interrupt(source: str, target: str) -> None:
        if list(near.glob("out/*")):
            raise KeyboardInterrupt
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(copy.shutil, "move", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(far, near)
    (first,) = near.glob("out/*")
    assert first.read_bytes() == (far / first.name).read_bytes()
    assert "0 MB are here already" in fetch(far, near)
    assert {p.name: p.read_bytes() for p in (near / "out").iterdir()} == {p.name: p.read_bytes() for p in far.iterdir()}
    assert sorted(p.name for p in near.iterdir()) == ["out"]


def test_a_file_that_changes_under_a_continued_copy_is_copied_anew(far: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch):
    near, digest, calls = tmp_path / "near", copy._far_digest, []
    near.mkdir()
    cut_off(far, near, monkeypatch)

    def change_after_the_first(place: FanoutTarget, script: str) -> str:
        calls.append(script)
        found = digest(place, script)
        if len(calls) == 1:
            (far / "a.bin").write_bytes(os.urandom(300_000))
        return found

    monkeypatch.setattr(copy, "_far_digest", change_after_the_first)
    fetch(far, near)
    assert (near / "out/a.bin").read_bytes() == (far / "a.bin").read_bytes() and len(calls) == 2


def test_a_copy_that_tar_fails_leaves_nothing(far: Path, tmp_path: Path):
    near = tmp_path / "near"
    near.mkdir()
    with pytest.raises(SpotfleetError, match="has failed"):
        fetch(far.parent / "none", near)
    assert list(near.iterdir()) == []


def test_a_continued_copy_that_tar_fails_has_failed(far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    near, tar = tmp_path / "near", tmp_path / "bin/tar"
    near.mkdir()
    cut_off(far, near, monkeypatch)
    tar.parent.mkdir()
    tar.write_text(f'#!/bin/sh\n{real_which("tar")} "$@"; echo "tar: c: Cannot open" >&2; exit 2\n')
    tar.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tar.parent}:{os.environ['PATH']}")
    with pytest.raises(SpotfleetError, match=r"has failed \(2\): .*tar: c: Cannot open"):
        fetch(far, near)
    assert list(near.iterdir()) == []


def test_an_interrupted_copy_is_for_its_owner_only_and_follows_no_link(far: Path, tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch):
    near, other = tmp_path / "near", tmp_path / "other"
    near.mkdir()
    left = cut_off(far, near, monkeypatch)
    assert left.stat().st_mode & 0o077 == 0
    left.unlink()
    other.write_text("mine")
    left.symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        fetch(far, near)
    assert other.read_text() == "mine"


def test_two_commands_do_not_copy_a_folder_by_tar_to_the_same_place(far: Path, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch):
    near, extract = tmp_path / "near", copy.bundle.extract
    near.mkdir()

    def and_again(*given: Path) -> None:
        with pytest.raises(SpotfleetError, match="another command is copying lab-w0:"):
            fetch(far, near)
        extract(*given)

    monkeypatch.setattr(copy.bundle, "extract", and_again)
    fetch(far, near)
    assert {p.name: p.read_bytes() for p in (near / "out").iterdir()} == {p.name: p.read_bytes() for p in far.iterdir()}
    assert [p.name for p in near.iterdir()] == ["out"]
