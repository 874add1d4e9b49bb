"""Scripts beside the head: started once, ended when they are not wanted, their status kept. No Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from spotfleet.codec import to_json
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.ray.drivers import DriverDesk
from spotfleet.protocol.ray_cluster import DriverStart
from spotfleet.ray.cluster.drivers import Drivers

ENV = {"PATH": os.environ["PATH"], "OF": "the head"}


def submitted(folder: Path, command: str) -> str:
    (folder / "work").mkdir(parents=True)
    write_json(folder / "start.json", to_json(DriverStart(command, {"OF_SCRIPT": "its own"})))
    return str(folder)


def wait(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_script_runs_once_in_its_directory_with_its_variables_and_its_status_is_kept(tmp_path: Path):
    one = submitted(tmp_path / "d1", 'echo "$OF, $OF_SCRIPT, ${PWD##*/}"; cat /proc/self/oom_score_adj; exit 7')
    drivers = Drivers(ENV)
    drivers.match((one,))
    wait((tmp_path / "d1" / "exit").exists)
    drivers.match((one,))
    assert (tmp_path / "d1" / "exit").read_text() == "7"
    assert DriverDesk.read(tmp_path / "d1", 0) == (b"the head, its own, work\n1000\n", True)
    Drivers(ENV).match((one,))
    assert DriverDesk.read(tmp_path / "d1", 16) == (b"n, work\n1000\n", True)


def test_a_script_that_is_not_wanted_any_more_is_ended_with_its_children(tmp_path: Path):
    one = submitted(tmp_path / "d1", "sleep 600 & echo $! > child; wait")
    drivers = Drivers(ENV)
    drivers.match((one,))
    child = tmp_path / "d1" / "work" / "child"
    wait(lambda: child.exists() and child.read_text().strip())
    drivers.match(())
    wait((tmp_path / "d1" / "exit").exists)
    assert (tmp_path / "d1" / "exit").read_text() == "143"
    wait(lambda: not Path(f"/proc/{child.read_text().strip()}").exists())


def test_a_script_whose_supervisor_was_lost_is_not_started_a_second_time(tmp_path: Path):
    one = submitted(tmp_path / "d1", "echo again")
    (tmp_path / "d1" / "begun").touch()
    Drivers(ENV).match((one,))
    assert (tmp_path / "d1" / "exit").read_text() == "137" and not (tmp_path / "d1" / "log").exists()


def test_a_script_that_is_ended_before_it_has_begun_never_begins_and_keeps_nobody_waiting(tmp_path: Path):
    top = tmp_path / "job" / "drivers"
    submitted(top / "d1", "echo runs")
    (top / "d1" / "command").write_text("echo runs")
    core = SimpleNamespace(jobs={"j": SimpleNamespace(folder=tmp_path / "job")})
    desk = DriverDesk(core)
    assert desk.wanted("j") == (str(top / "d1"),) and desk.status("j")[0].state == "running"
    desk.stop(top / "d1")
    for one in (desk, DriverDesk(core)):  # the next dispatcher, too
        assert one.wanted("j") == () and one.status("j")[0].state == "stopped"
        assert one.read(top / "d1", 0) == (b"", True)


def test_a_script_whose_files_cannot_be_written_delays_no_other_and_no_drain(tmp_path: Path):
    good = submitted(tmp_path / "d2", "exit 3")
    drivers = Drivers(ENV)
    drivers.match((str(tmp_path / "gone"), good))
    wait((tmp_path / "d2" / "exit").exists)
    assert (tmp_path / "d2" / "exit").read_text() == "3"


def test_a_status_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("spotfleet.ray.cluster.drivers.AGAIN_S", 0.01)
    one = submitted(tmp_path / "d1", "touch ../done; exit 3")
    (tmp_path / "d1" / "exit.part").mkdir()  # as on a full disk
    Drivers(ENV).match((one,))
    wait((tmp_path / "d1" / "done").exists)
    time.sleep(0.05)
    assert not (tmp_path / "d1" / "exit").exists()
    (tmp_path / "d1" / "exit.part").rmdir()
    wait((tmp_path / "d1" / "exit").exists)
    assert (tmp_path / "d1" / "exit").read_text() == "3"


def test_a_damaged_submission_ends_as_a_failure(tmp_path: Path):
    (tmp_path / "d1" / "work").mkdir(parents=True)
    (tmp_path / "d1" / "start.json").write_text("{")
    Drivers(ENV).match((str(tmp_path / "d1"),))
    assert (tmp_path / "d1" / "exit").read_text() == "1"
