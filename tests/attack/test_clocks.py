"""A real dispatcher whose wall clock alone is set: by libfaketime, while it runs and while it is dead, both ways.

The cheaper tests, `tests/dispatcher/lifecycle/test_trusted_time.py` and `test_limits_and_clocks.py`, have injected
clocks; here are the kernel's, through a kill of the process and to the bill after the end.
"""

from __future__ import annotations

import glob
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotfleet.api import Fleet
from spotfleet.errors import SpotfleetError
from spotfleet.providers.local import LocalCloud
from tests.conftest import NETGUARD
from tests.support.e2e.e2e_stage import COUNTING, Stage, hosts, trains, wait_for

LIBRARY = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")
WRONG = (("+20h", "20.0 h ahead of"), ("-26h", "26.0 h behind"))
LIMITS = "autostop: {idle_minutes: 30, down: true}\nmax_lifetime: 2h\nmax_cost: 1\n"

# Runs at the start of every Python process; the dispatcher's begins again under the library. The last line is the
# guard that every process of a test has.
BEGIN = f"""
import os, runpy, sys
if "spotfleet.dispatcher" in sys.orig_argv and "LD_PRELOAD" not in os.environ:
    os.environ.update(LD_PRELOAD={LIBRARY!r}, FAKETIME_TIMESTAMP_FILE=os.environ["TEST_CLOCK_FILE"],
                      FAKETIME_NO_CACHE="1", FAKETIME_DONT_FAKE_MONOTONIC="1", DONT_FAKE_MONOTONIC="1")
    os.execv(sys.executable, sys.orig_argv)
runpy.run_path({str(Path(NETGUARD) / "sitecustomize.py")!r})
"""

pytestmark = [pytest.mark.processes,
              pytest.mark.skipif(not LIBRARY, reason="no libfaketime here: `apt-get install faketime`")]


@dataclass(frozen=True)
class Clocks:
    """A home whose dispatchers have a clock of their own."""

    stage: Stage
    file: Path

    def set(self, ahead: str) -> None:
        self.file.write_text(ahead)

    @property
    def dispatcher(self) -> int:
        """The pid of the dispatcher's process; 0 while there is none."""
        machine = next(m for m in self.stage.cloud.truth() if "-d-" in m.request_id)
        return next((pid for pid in machine.processes if is_faked(pid)), 0)

    def kill_dispatcher(self) -> None:
        wait_for("a dispatcher", lambda: self.dispatcher)  # a signal to process 0 would end the tests themselves
        before = self.dispatcher
        assert before > 0
        os.kill(before, signal.SIGKILL)
        wait_for("another dispatcher", lambda: self.dispatcher not in (0, before))


def is_faked(pid: int) -> bool:
    try:
        return LIBRARY in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    home, work, site = tmp_path / "home", tmp_path / "work", tmp_path / "site"
    work.mkdir()
    site.mkdir()
    (work / "counting.py").write_text(COUNTING)
    (site / "sitecustomize.py").write_text(BEGIN)
    made = Clocks(Stage(home, work), tmp_path / "clock")
    made.set("+0s")
    monkeypatch.setenv("SPOTFLEET_HOME", str(home))
    monkeypatch.setenv("SPOTFLEET_LOCAL_OWNER_PID", str(os.getpid()))
    monkeypatch.setenv("TEST_CLOCK_FILE", str(made.file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ["PYTHONPATH"]]))
    monkeypatch.chdir(work)
    try:
        yield made
    finally:
        LocalCloud(home).shutdown()


def why(fleet: Fleet) -> str:
    try:
        return fleet.status().why
    except SpotfleetError:  # its dispatcher starts
        return ""


def stays(fleet: Fleet, names: list[str]) -> None:
    status = fleet.status()
    assert status.state == "up", status.why
    assert sorted(h.host for h in hosts(fleet)) == names
    assert status.spent_micros is None or status.spent_micros < 100_000
    assert fleet.cost().micros < 100_000  # $1 is the limit, 20 hours would be $2 or more
    assert status.age_s < 3600 and status.ends_in_s is not None and status.ends_in_s > 3600


@pytest.mark.parametrize("moment", ["runs", "is dead"])
def test_no_limit_ends_a_fleet_and_its_bill_is_the_invoice(clocks: Clocks, moment: str):
    fleet = clocks.stage.fleet("ck", least=1, target=2, more=LIMITS)
    names = sorted(h.host for h in hosts(fleet))

    def set_clock(ahead: str, words: str) -> None:
        clocks.set(ahead)
        if moment == "is dead":
            clocks.kill_dispatcher()
        expected = f"the dispatcher's clock is {words} the cloud's time, and is not used"
        wait_for("the clock to be noticed", lambda: expected in why(fleet))

    for ahead, words in WRONG:
        set_clock(ahead, words)
        stays(fleet, names)  # idle: autostop

    wait_for("the hosts to return", lambda: bool(state := why(fleet)) and "to report" not in state)
    job = clocks.stage.counting(fleet, 10_000, (1, 2))
    wait_for("training", lambda: trains(job, 2, step=3))
    generation = job.status().generation
    for ahead, words in WRONG:
        version = job.status().version
        set_clock(ahead, words)
        wait_for("more steps", lambda version=version: trains(job, 2, step=version + 10))
        assert job.status().generation == generation
        stays(fleet, names)

    fleet.down()  # under a wrong clock
    assert clocks.stage.cloud.invoice("ck").micros == fleet.cost().micros
    assert clocks.stage.cloud.truth() == []


def test_a_clock_that_is_set_right_is_used_again(clocks: Clocks):
    fleet = clocks.stage.fleet("right", least=1, target=1, more=LIMITS)
    names = [h.host for h in hosts(fleet)]
    clocks.set("+20h")
    wait_for("the clock to be noticed", lambda: "and is not used" in why(fleet))
    clocks.set("+0s")
    wait_for("the clock to be used", lambda: bool(state := why(fleet)) and "is not used" not in state)
    stays(fleet, names)
    assert [e for e in fleet.events() if e["kind"] == "ClockSetBack"] == []
