"""A host's disk is full: the host says so, and its workers' failures are the host's, not the script's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_stage import HOST, Stage, eventually

from spotfleet.messages import Exit

pytestmark = pytest.mark.slow
DISK_MIB = 8
FULL = "this host's disk is full: "
FILL = """
with open("data", "wb", buffering=0) as file:
    while True:
        file.write(bytes(1 << 16))
"""


@pytest.fixture
def small(stage: Stage) -> Iterator[Path]:
    """The agent's home on a file system of DISK_MIB; the file in it that is answered takes all its room."""
    stage.home.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(stage.home)],
                          capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield stage.home / "filler"
    finally:
        stage.end()
        subprocess.run(["umount", "-l", str(stage.home)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def test_a_job_whose_files_find_no_room_blames_the_host_and_goes_on_there_when_there_is_room(stage: Stage, small: Path):
    stage.boot()
    fill(small)
    ended = stage.run("print('hello')\n" + "#" * 200_000)
    assert (ended.exit, ended.report.blame_host, ended.report.blame_peer) == (Exit(1), True, False)
    assert FULL in ended.report.error and "MB free" in ended.report.error
    eventually(lambda: FULL in stage.dispatcher.report.why)
    small.unlink()
    assert list(stage.home.glob("jobs/*/source-*")) == []
    second = f"{HOST}/0/2"
    stage.order(second)
    assert stage.dispatcher.wait_worker(second, lambda w: w.exit).exit == Exit(0, done=True)
    assert stage.log(second) == "hello\n"
    eventually(lambda: FULL not in stage.dispatcher.report.why)


def test_a_script_that_finds_no_room_blames_the_host_and_its_traceback_is_kept(stage: Stage, small: Path):
    stage.boot()
    ended = stage.run(FILL)
    assert ended.exit is not None and not ended.exit.done
    assert ended.report.blame_host and FULL in ended.report.error


def test_a_script_that_fails_where_there_is_room_blames_nobody_else(stage: Stage, small: Path):
    stage.boot()
    assert not stage.run("raise OSError(28, 'No space left on device')").report.blame_host
