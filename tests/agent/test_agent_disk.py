"""A host's disk is full: the host says so, and its workers' failures are the host's, not the script's."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.protocol.messages import Assignment, Checkpoint, Exit, WorkerOrders
from tests.support.agent.agent_stage import HOST, Stage, eventually

pytestmark = pytest.mark.processes
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


def test_a_checkpoint_for_which_there_is_no_room_ends_its_worker_here_so_that_another_host_is_tried(
        stage: Stage, small: Path):
    stage.patch = "from spotfleet.agent.files import checkpoint_downloads\ncheckpoint_downloads.FULL_S = 0.3"
    stage.boot()
    data = bytes(DISK_MIB << 20)
    stage.dispatcher.checkpoints[7] = (3, data)
    kept = Checkpoint(7, hashlib.sha256(data).hexdigest(), len(data), 3)
    name = f"{HOST}/0/1"
    stage.job("import os, socket\ns = socket.socket(socket.AF_UNIX)\ns.connect(os.environ['SPOTFLEET_SOCKET'])\n"
              "s.sendall(b'{\"worker\": \"%s\", \"job\": \"job\"}\\n' % os.environ['SPOTFLEET_WORKER'].encode())\n"
              "while s.recv(1 << 16): pass\n")
    place = Assignment(4, 0, (name,), "127.0.0.1:1")
    stage.order(name, orders=WorkerOrders(place, founded=True, restore=kept))
    ended = stage.dispatcher.wait_worker(name, lambda w: w.exit)
    assert ended.report.blame_host and ended.report.error.startswith(f"checkpoint 7 finds no room here: {FULL}")
    reports = [r for _, r in stage.dispatcher.seen]
    assert any(f"fetching checkpoint 7, for which there is no room: {FULL}" in r.why for r in reports)
    assert any(w.report.fetched for r in reports for w in r.workers)
    assert not list(stage.home.rglob("restore/*"))
