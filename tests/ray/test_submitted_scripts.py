"""Scripts beside the head: started once, ended when they are not wanted, their status kept. No Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

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


def test_a_damaged_submission_ends_as_a_failure(tmp_path: Path):
    (tmp_path / "d1" / "work").mkdir(parents=True)
    (tmp_path / "d1" / "start.json").write_text("{")
    Drivers(ENV).match((str(tmp_path / "d1"),))
    assert (tmp_path / "d1" / "exit").read_text() == "1"
