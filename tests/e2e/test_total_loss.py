"""All hosts are taken at once and nothing can replace them: for a while the job is its checkpoint alone."""

from __future__ import annotations

import os
import signal

import pytest

from spotfleet.api import Fleet, Job
from spotfleet.errors import SpotfleetError
from spotfleet.providers.local.market.pools import default_rules
from tests.support.e2e.e2e_stage import Stage, hosts_of, output, trains, wait_for

pytestmark = pytest.mark.processes

POOLS = [(p.name, p.capacity) for p in default_rules().pools if p.instance_type == "cpu.small"]
NOTICE_S = 8.0


def sell(stage: Stage, *, any_more: bool) -> None:
    for pool, capacity in POOLS:
        stage.cloud.set_capacity(pool, capacity if any_more else 0)


def take_all(stage: Stage, job: Job, notice_s: float | None) -> None:
    """Returns when the job has no host left."""
    sell(stage, any_more=False)
    for host in hosts_of(job):
        stage.cloud.interrupt(host, notice_s)
    wait_for("the end of all hosts", lambda: len(stage.cloud.truth()) == 1)  # the dispatcher's
    wait_for("its word that it knows", lambda: not job.status().workers)


def resumed(fleet: Fleet, job: Job) -> list[tuple[int, int, int]]:
    """(newest checkpoint before it, step at which it began, steps repeated in it) of each generation, oldest first."""
    kept, begun, found = 0, {}, []
    for event in [e for e in fleet.events() if e.get("job") == job.id]:
        if event["kind"] == "CheckpointKept":
            kept = event["version"]
        elif event["kind"] == "GenerationFormed":
            begun[event["generation"]] = (kept, event["version"])
        elif event["kind"] == "JobResumed":
            found.append((*begun[event["generation"]], event["repeated"]))
    return found


def test_a_job_that_loses_every_host_goes_on_by_itself_from_all_that_there_was_time_to_save(stage: Stage):
    fleet = stage.fleet("lost", least=2, target=2, more="checkpoint: {interval: 1s}")
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("a checkpoint", lambda: job.status().checkpoint > 5)
    lost = hosts_of(job)
    for host in lost:
        stage.cloud.interrupt(host, None)
    wait_for("training on others", lambda: trains(job, 2, step=1) and not set(lost) & set(hosts_of(job)))

    take_all(stage, job, NOTICE_S)
    saved = job.status()
    assert (saved.state, saved.checkpoint) == ("recovering", saved.version)  # all that was done until the last moment
    (told,) = [e for e in fleet.events() if e["kind"] == "CheckpointInTime"]
    assert (told["version"], told["kept_version"], told["why"] in saved.why) == (saved.version, saved.version, True)
    assert 0 < told["seconds_left"] < NOTICE_S
    sell(stage, any_more=True)
    wait_for("training", lambda: trains(job, 2, step=saved.version + 1))

    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)
    _, (kept, begun, repeated), warned = resumed(fleet, job)
    assert begun >= kept > 5 and repeated >= 0  # it may have made a step when it is told to have formed
    kept, begun, repeated = warned
    assert begun >= kept == saved.version and repeated == 0


@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="what a step does is tested in tests/train")
def test_down_keeps_what_the_last_worker_of_too_few_holds_in_memory(stage: Stage):
    fleet = stage.fleet("few", least=2, target=2)  # checkpoints come once a minute, so none by itself
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("some steps", lambda: trains(job, 2, step=5))
    sell(stage, any_more=False)
    stage.cloud.interrupt(hosts_of(job)[0], None)
    wait_for("standing by", lambda: job.status().state == "recovering")
    held = job.status()
    assert (held.checkpoint, held.version > 0) == (0, True)
    fleet.down()
    kept = (stage.home / "fleets" / "few" / "archive" / "jobs" / job.id / "checkpoints").iterdir()
    assert [int(p.name.partition("-")[0]) for p in kept] == [held.version]


def kill_dispatcher(stage: Stage, fleet: Fleet) -> None:
    machine = next(m for m in stage.cloud.truth() if "-d-" in m.request_id)
    before = machine.processes[0]
    os.kill(before, signal.SIGKILL)

    def back() -> bool:
        try:
            return bool(fleet.status()) and before not in next(
                m for m in stage.cloud.truth() if "-d-" in m.request_id).processes
        except SpotfleetError:
            return False

    wait_for("another dispatcher process", back)


@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="a longer form of the test above")
@pytest.mark.parametrize("notice_s", [None, NOTICE_S])
def test_nor_does_it_matter_that_the_dispatcher_dies_while_no_host_is_there(stage: Stage, notice_s: float | None):
    fleet = stage.fleet("alone", least=2, target=2, more="checkpoint: {interval: 1s}")
    job = stage.counting(fleet, 400, (2, 2))
    for _ in range(2):
        step = job.status().checkpoint + 5
        wait_for("a checkpoint", lambda step=step: trains(job, 2) and job.status().checkpoint > step)
        take_all(stage, job, notice_s)
        kept = job.status().checkpoint
        kill_dispatcher(stage, fleet)
        assert (job.status().checkpoint, job.status().state) == (kept, "recovering")
        sell(stage, any_more=True)
        wait_for("training", lambda kept=kept: trains(job, 2, step=kept + 1))
    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)
    assert notice_s is None or job.status().repeated == 0
