"""Scripts beside the head: started once, ended when they are not wanted, their status kept. No Ray."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from spotfleet.codec import to_json
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.logs import JobLogs
from spotfleet.dispatcher.ray.drivers import DriverDesk
from spotfleet.model import JobState
from spotfleet.protocol.ray_cluster import DriverStart
from spotfleet.ray.cluster import drivers as of_drivers
from spotfleet.ray.cluster.account import HeadUser
from spotfleet.ray.cluster.drivers import Drivers

ENV = {"PATH": os.environ["PATH"], "OF": "the head"}


def submitted(folder: Path, command: str) -> str:
    (folder / "work").mkdir(parents=True)
    output = folder.with_name(f"output of {folder.name}")
    output.mkdir()
    write_json(folder / "start.json", to_json(DriverStart(command, {
        "OF_SCRIPT": "its own", "SPOTFLEET_OUTPUT": str(output)})))
    return str(folder)


def output(folder: Path) -> bytes:
    return JobLogs(folder.parent / "logs").read(folder.name, 0).data


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
    assert output(tmp_path / "d1") == b"the head, its own, work\n1000\n"
    Drivers(ENV).match((one,))
    assert output(tmp_path / "d1") == b"the head, its own, work\n1000\n"


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
    assert (tmp_path / "d1" / "exit").read_text() == "137" and not output(tmp_path / "d1")


def test_a_script_that_is_ended_before_it_has_begun_never_begins_and_keeps_nobody_waiting(tmp_path: Path):
    top = tmp_path / "job" / "drivers"
    submitted(top / "d1", "echo runs")
    (top / "d1" / "command").write_text("echo runs")
    core = SimpleNamespace(jobs={"j": SimpleNamespace(folder=tmp_path / "job", state=JobState.RUNNING)})
    desk = DriverDesk(core)
    assert desk.wanted("j") == (str(top / "d1"),) and desk.status("j")[0].state == "running"
    desk.stop(top / "d1")
    for one in (desk, DriverDesk(core)):  # the next dispatcher, too
        assert one.wanted("j") == () and one.status("j")[0].state == "stopped"
        assert one.read(top / "d1", 0) == (b"", 0, True)
    (top / "d1" / "exit").write_text("137")
    assert (desk.status("j")[0].state, desk.status("j")[0].exit_status) == ("stopped", 137), "it ignored SIGTERM"


def test_what_a_shell_has_started_may_end_in_its_own_time(tmp_path: Path):
    saves = "trap 'sleep 0.2; touch saved; exit' TERM; touch begun; sleep 600 & wait"
    one = submitted(tmp_path / "d1", f"bash -c {shlex.quote(saves)} & wait")
    drivers = Drivers(ENV)
    drivers.match((one,))
    wait((tmp_path / "d1" / "work" / "begun").exists)
    drivers.match(())
    wait((tmp_path / "d1" / "work" / "saved").exists)


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
    assert b"the script was not started" in output(tmp_path / "d1")


def test_of_too_much_output_the_oldest_goes_of_the_script_that_printed_most(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of_drivers, "DRIVER_LOG_BYTES", 20 << 20)
    drivers = Drivers(ENV)
    drivers.match((submitted(tmp_path / "d1", "echo few words"),))
    drivers.match((str(tmp_path / "d1"), submitted(tmp_path / "d2", "yes spotfleet | head -c 40000000; echo the end")))
    wait(lambda: all((tmp_path / name / "exit").exists() for name in ("d1", "d2")))
    assert output(tmp_path / "d1") == b"few words\n"
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < 20 << 20
    assert b"of older output are not kept" in output(tmp_path / "d2")
    assert max((tmp_path / "logs").glob("d2.log*"), key=lambda p: p.stat().st_mtime).read_bytes().endswith(b"the end\n")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a script as another user")
def test_a_script_of_another_user_owns_its_directory_and_cannot_read_the_dispatchers_files(tmp_path: Path):
    keys = tmp_path / "home" / "boot.json"
    keys.parent.mkdir(mode=0o700)
    keys.write_text("secret")
    keys.chmod(0o600)
    command = (f"cat {keys}; touch /proc/{os.getpid()}/oom_score_adj; id -u; echo made > made; cat given; "
               "grep NoNewPrivs /proc/self/status; kill -0 1; kill -0 $PPID; echo weights > $SPOTFLEET_OUTPUT/model")
    one = submitted(keys.parent / "d1", command)
    (keys.parent / "d1" / "work" / "given").write_text("shipped\n")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # where others may enter, unlike pytest's
        Path(folder).chmod(0o711)
        Drivers(ENV, HeadUser(358_123), Path(folder)).match((one,))
        wait((keys.parent / "d1" / "exit").exists)
        text = output(keys.parent / "d1").decode()
        assert (Path(folder) / "d1" / "work" / "made").stat().st_uid == 358_123
    assert "358123\nshipped\nNoNewPrivs:\t1\n" in text and "secret" not in text, text
    assert text.count("ermission denied") == 2 and text.count("not permitted") == 2, text
    assert (keys.parent / "output of d1" / "model").read_text() == "weights\n"
    assert (keys.parent / "d1" / "exit").read_text() == "0"
