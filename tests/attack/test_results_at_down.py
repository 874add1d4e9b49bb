"""`down` while results are on their way from a host of a running fleet, also to a dispatcher without room for them.

Only real processes show that the parts agree: agent, dispatcher and command send, wait, stop and go on together.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotfleet.api import Fleet, Job
from spotfleet.api.lifecycle import down
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import NOT_COLLECTED
from spotfleet.providers.local import LocalCloud
from tests.support.e2e.e2e_stage import Stage, output, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]
LONG = bool(os.environ.get("SPOTFLEET_LONG"))
FILE_BYTES = 1_000_000
LEAVES = f"""
# Leaves so many files at once.
import os, sys
out = os.environ["SPOTFLEET_OUTPUT"]
for number in range(int(sys.argv[1])):
    with open(os.path.join(out, f"{{number}}.bin"), "wb") as file:
        file.write(bytes([number % 256]) * {FILE_BYTES})
print("done", flush=True)
"""


@pytest.fixture
def sending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    (work / "leaves.py").write_text(LEAVES)
    monkeypatch.setenv("SPOTFLEET_HOME", str(home))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    monkeypatch.setattr(down, "QUIET_S", 5.0)
    monkeypatch.setattr(down, "LEAST_S", 2.0)
    monkeypatch.chdir(work)
    try:
        yield Stage(home, work)
    finally:
        LocalCloud(home).shutdown()


@pytest.fixture
def small_disk(sending: Stage) -> Iterator[Path]:
    """The folder of the dispatcher of the fleet "full", on a file system with room for about 38 files."""
    path = sending.home / "local" / "hosts" / "full-d-0"
    path.mkdir(parents=True, mode=0o700)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=70m,mode=700", "tmpfs", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system may be mounted here: {made.stderr.decode().strip()}")
    try:
        yield path
    finally:
        LocalCloud(sending.home).shutdown()
        subprocess.run(["umount", "-l", str(path)], check=True)


def left(stage: Stage, fleet: str, files: int) -> Job:
    """A job whose script has left so many files and ended."""
    job = stage.fleet(fleet, 1, 1).train("leaves.py", [str(files)], np=(1, 1), detach=True)
    wait_for("its last line", lambda: "done" in output(job), 300.0)
    return job


def home(stage: Stage, fleet: str) -> dict[str, int]:
    """The collected files, by name; all of them must be whole."""
    found = {p.name: p for p in (stage.home / "fleets" / fleet / "archive").rglob("*.bin")}
    sizes = {name: path.stat().st_size for name, path in found.items()}
    assert set(sizes.values()) <= {FILE_BYTES}, {n: s for n, s in sizes.items() if s != FILE_BYTES}
    assert all(path.read_bytes()[-1] == int(path.stem) % 256 for path in found.values())
    return sizes


def test_down_at_once_after_the_last_line_brings_every_file_home(sending: Stage):
    files = 4000 if LONG else 300
    job = left(sending, "many", files)
    sending.cli("down", "many", "-y")
    assert len(home(sending, "many")) == files, job.id
    assert not (sending.home / "fleets/many/archive" / NOT_COLLECTED).exists()


def full(stage: Stage) -> tuple[Job, str]:
    """A job with 60 files for a dispatcher without room for them, and the words with which `down` stops."""
    job = left(stage, "full", 60)
    fleet = Fleet("full")
    wait_for("a full disk", lambda: any("disk is full" in u.why for u in fleet.status().unsent))
    wait_for("the job says so", lambda: "full-0 sends its output" in job.status().why)
    with pytest.raises(SpotfleetError, match="not all results are here") as caught:
        fleet.down()
    assert machines(stage) == ["full-0", "full-d-0"]  # it goes on trying
    assert "full-0 still holds 2" in fleet.status().why
    return job, str(caught.value)


def machines(stage: Stage) -> list[str]:
    return sorted(m.request_id for m in stage.cloud.truth() if m.processes)


def test_down_stops_for_a_dispatcher_without_room_and_goes_on_once_there_is_some(sending: Stage, small_disk: Path):
    job, why = full(sending)
    assert "full-0 still holds 2" in why and f"of the output of {job.id}" in why and "disk is full" in why
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    assert Fleet("full").down().missing == ()
    assert len(home(sending, "full")) == 60


def test_discard_gives_up_what_a_dispatcher_without_room_does_not_take_and_records_it(sending: Stage, small_disk: Path):
    job, _ = full(sending)
    done = Fleet("full").down(discard=True)
    kept = home(sending, "full")
    assert 20 < len(kept) < 60
    (missing,) = done.missing
    assert f"of the output of {job.id} (lost with full-0)" in missing
    listed = json.loads((Path(done.archive) / NOT_COLLECTED).read_text())
    (lost,) = listed["lost"]
    torn = len(listed["partial_files"])
    assert (60 - len(kept) - torn) * FILE_BYTES <= lost["bytes"] <= (60 - len(kept)) * FILE_BYTES
    assert machines(sending) == []
