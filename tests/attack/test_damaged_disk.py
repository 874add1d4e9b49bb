"""Damaged files of a running local fleet: real processes, the command line, and every folder that a fleet makes.

Only here do a supervisor restart a real dispatcher, and agents that know their jobs from before, meet a damaged disk.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from spotfleet.api import Fleet
from spotfleet.providers.local import LocalCloud
from tests.e2e.conftest import stage  # noqa: F401
from tests.support.damage import Damage, empty, flipped, missing, truncated
from tests.support.e2e.e2e_stage import Stage, wait_for
from tests.support.file_table import DISPATCHER, HOST, unknown

pytestmark = pytest.mark.processes
LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form only (SPOTFLEET_LONG=1)")

SCRIPT = """
import os, time
open(os.path.join(os.environ["SPOTFLEET_OUTPUT"], "result"), "w").write("a result")
print("secret", len(os.environ.get("PASSWORD", "")), flush=True)
while not os.path.exists(__file__ + ".end") and os.environ.get("WAITS"):
    time.sleep(0.1)
"""


class Disk:
    """The dispatcher of one fleet, and its disk."""

    def __init__(self, cloud: LocalCloud) -> None:
        self._cloud = cloud

    @property
    def _machine(self):
        return next(m for m in self._cloud.truth() if "-d-" in m.request_id)

    @property
    def home(self) -> Path:
        return Path(self._machine.folder)

    @property
    def hosts(self) -> list[Path]:
        return [Path(m.folder) for m in self._cloud.truth() if "-d-" not in m.request_id]

    def kill(self) -> None:
        """End the dispatcher's process at once; its machine starts another."""
        for pid in self._machine.processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def starts(self) -> int:
        return self._machine.starts


def kill_and_damage(disk: Disk, *damaged: tuple[Path, Damage]) -> None:
    """Damage files between two processes: the next one finds them so."""
    disk.kill()
    for path, damage in damaged:
        damage(path)


def begun(fleet: Fleet, **options) -> object:
    return fleet.train("job.py", np=(1, 1), detach=True, **options)


def file_events(fleet: Fleet) -> set[str]:
    return {e["file"] for e in fleet.events() if e["kind"] == "FileDamaged"}


def reached(fleet: Fleet, limit_s: float = 60.0) -> None:
    """Wait until the dispatcher answers again."""
    wait_for("the dispatcher to answer", lambda: not fleet.client.why_unreachable(), limit_s)


@pytest.mark.parametrize("damage", [flipped, missing, *(pytest.param(way, marks=LONGER) for way in (truncated, empty))])
def test_a_fleet_goes_on_with_damaged_files_and_every_command_works(stage: Stage, damage: Damage):  # noqa: F811
    (stage.work / "job.py").write_text(SCRIPT)
    fleet = stage.fleet("frail", least=1, target=1)
    disk = Disk(stage.cloud)
    ended = begun(fleet)
    wait_for("its end", lambda: ended.state.ended)
    running = begun(fleet, secrets={"PASSWORD": "seven-7"}, envs={"WAITS": "1"}, name="long")
    wait_for("it to run", lambda: b"secret 7" in b"".join(running.logs()))
    assert unknown(disk.home, DISPATCHER) == []
    assert [unknown(host, HOST) for host in disk.hosts] == [[]]
    worker = running.status().workers[0].worker

    jobs = disk.home / "jobs"
    kill_and_damage(disk, (jobs / ended.id / "job.json", damage), (jobs / running.id / "job.json", damage),
                    (jobs / running.id / "secrets.json", damage), (disk.home / "boots.json", damage),
                    *((path, damage) for path in (disk.home / "bundles").iterdir()))
    reached(fleet)
    wait_for("both jobs", lambda: {j.id for j in fleet.jobs()} == {ended.id, running.id})
    wait_for("the same worker", lambda: [w.worker for w in running.status().workers] == [worker])
    assert ended.status().state == "succeeded" and running.status().state in ("running", "starting")
    assert {f"jobs/{ended.id}/job.json", f"jobs/{running.id}/job.json", "boots.json"} <= file_events(fleet)
    said = stage.cli("status").stdout + stage.cli("events").stdout
    assert f"jobs/{running.id}/job.json: " in said
    # The working directory is the same, and its blobs were damaged: they are sent again.
    again = fleet.train("job.py", np=(1, 1), detach=True, wait=True, name="third")
    assert again.id == "third-3"

    stage.cli("cancel", again.id)
    stage.cli("cancel", running.id)
    stage.cli("down", "-y")
    archive = stage.home / "fleets" / "frail" / "archive"
    assert [p.read_text() for p in archive.glob(f"jobs/{ended.id}/outputs/*/result")] == ["a result"]


def test_a_damaged_decision_to_end_is_asked_again_and_a_known_one_goes_on(stage: Stage):  # noqa: F811
    fleet = stage.fleet("ending", least=1, target=1)
    disk = Disk(stage.cloud)
    disk.kill()
    (disk.home / "down.json").write_text("{")
    reached(fleet)
    assert "`spotfleet down` ends it" in fleet.status().why
    stage.cli("down", "-y")
    assert not stage.cloud.truth()


def test_a_dispatcher_that_cannot_start_gives_the_reason_to_each_command(stage: Stage):  # noqa: F811
    fleet = stage.fleet("stuck", least=1, target=1)
    disk = Disk(stage.cloud)
    disk.kill()
    boots = disk.home / "boots.json"
    boots.unlink()
    boots.mkdir()

    def told() -> bool:
        said = stage.cli("status", ok=False)
        return said.returncode == 1 and "error: the dispatcher cannot start: IsADirectoryError" in said.stderr

    wait_for("the reason", told)
    said = stage.cli("down", "-y", ok=False)
    assert said.returncode == 1 and "the dispatcher cannot start" in said.stderr and "--discard" in said.stderr
    boots.rmdir()
    reached(fleet, 90.0)
    stage.cli("down", "-y")


def test_a_damaged_boot_file_leaves_a_reason_in_the_console_log(stage: Stage):  # noqa: F811
    fleet = stage.fleet("bootless", least=1, target=1)
    disk = Disk(stage.cloud)
    starts = disk.starts()
    kill_and_damage(disk, (disk.home / "boot.json", truncated))
    wait_for("another start", lambda: disk.starts() > starts)
    wait_for("the reason", lambda: "boot.json" in (disk.home / "console.log").read_text().splitlines()[-1])
    time.sleep(0.2)
    said = stage.cli("status", ok=False)
    assert "no dispatcher runs there now" in said.stderr and "console.log" in said.stderr
    assert fleet.name == "bootless"
    stage.cli("down", "-y", "--discard")
    assert not stage.cloud.truth()
