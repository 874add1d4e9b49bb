"""What an agent sees of a worker's process besides its reports: whether it stands still, is mute, or hangs."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest

from spotfleet.agent.workers import liveness
from spotfleet.agent.workers.liveness import Liveness
from spotfleet.protocol.messages import Exit, WorkerReport
from tests.agent.workers.test_agent_sockets import TALK
from tests.support.agent.agent_stage import HOST, Stage

FIRST, SECOND = f"{HOST}/0/1", f"{HOST}/1/1"
TRAINS = WorkerReport(FIRST, "job", generation=3, version=7, waits=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands at its only element."""
    now = [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    return now


def test_a_worker_is_quiet_since_its_version_changed_in_its_generation(clock: list[float]):
    beat = Liveness()
    beat.record(TRAINS)
    clock[0] += 40.5
    beat.record(TRAINS)
    assert beat.quiet_s == 40.0
    beat.record(WorkerReport(FIRST, "job", generation=3, version=8))
    assert beat.quiet_s == 0.0


def test_a_long_evaluation_on_all_ranks_is_no_hang_of_those_that_come_last_to_its_end(clock: list[float]):
    """No step is made in it; the watchdog acts once all are quiet for long and some of them wait for others."""
    beats, computes = {"a": Liveness(), "b": Liveness()}, replace(TRAINS, waits=False)
    for beat in beats.values():
        beat.record(computes)
    clock[0] += 60.0
    beats["a"].record(TRAINS)
    beats["b"].record(computes)
    clock[0] += 10.0
    assert {name: beat.quiet_s for name, beat in beats.items()} == {"a": 10.0, "b": 70.0}


def test_outside_of_any_generation_nobody_is_quiet(clock: list[float]):
    beat = Liveness()
    beat.record(WorkerReport(FIRST, "job", version=7))
    clock[0] += 100.0
    assert beat.quiet_s == 0.0
    beat.record(TRAINS)
    clock[0] += 40.0
    beat.record(replace(TRAINS, generation=4))  # the next has formed, and its first step is still to come
    assert beat.quiet_s == 0.0


def test_a_worker_that_says_nothing_more_is_not_believed_to_wait_for_its_peers(clock: list[float]):
    beat = Liveness()
    beat.record(TRAINS)
    clock[0] += 5.0
    assert beat.corrected(TRAINS).waits
    clock[0] += 0.1
    assert not beat.corrected(TRAINS).waits


@pytest.mark.processes
def test_a_stopped_worker_is_reported_lives_on_and_is_reported_when_it_goes_on(stage: Stage):
    stage.boot()
    stage.job(TALK + "say()\nfor line in lines: say(stage='ready')\n")
    stage.order(FIRST)
    pid = stage.dispatcher.wait_worker(FIRST, lambda w: w.report.stage.value == "ready").pid
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    stage.dispatcher.wait_worker(FIRST, lambda w: w.stopped)
    print(f"seen after {time.monotonic() - begun:.2f} s")
    os.kill(pid, signal.SIGCONT)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: not w.stopped).pid == pid


@pytest.mark.processes
def test_a_workers_end_is_known_also_while_the_process_that_forks_them_is_stopped(stage: Stage):
    stage.boot()
    stage.job(TALK + "say(stage='ready')\ntime.sleep(1000)\n")
    stage.order(FIRST)
    pid = stage.dispatcher.wait_worker(FIRST, lambda w: w.report.stage.value == "ready").pid
    (zygote,) = [p for p in stage.processes() if "spotfleet.agent.processes.zygote" in p.cmdline() and p.pid != pid]
    zygote.suspend()
    os.kill(pid, signal.SIGKILL)
    assert stage.dispatcher.wait_worker(FIRST, lambda w: not w.pid).exit is None
    zygote.resume()
    stage.dispatcher.wait_worker(FIRST, lambda w: w.exit == Exit(-9))


@pytest.mark.processes
def test_one_that_hangs_leaves_its_stacks_in_its_log_when_it_is_ended_and_one_that_trains_does_not(stage: Stage):
    stage.patch = "import spotfleet.agent.workers.worker as w; w.HANGS_S = 3.0"
    stage.boot()
    stage.job(TALK + """
def hangs_here():
    time.sleep(1000)
version = 5
print(version)
say(generation=1, version=version)
while os.environ["SPOTFLEET_LOCAL_RANK"] == "1":
    time.sleep(0.02)
    version += 1
    say(generation=1, version=version)
hangs_here()
""")
    stage.order(FIRST, SECOND)
    stage.dispatcher.wait_worker(SECOND, lambda w: w.report.version > 5)
    stage.dispatcher.wait_worker(FIRST, lambda w: w.quiet_s >= 3.0)
    stage.order()
    stage.dispatcher.wait(lambda r: not r.workers)
    log = stage.log(FIRST)
    assert log.startswith("5\nspotfleet: no step for ") and "in hangs_here" in log and 'train.py", line ' in log
    assert stage.log(SECOND) == "5\n"
