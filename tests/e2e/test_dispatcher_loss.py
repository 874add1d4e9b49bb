"""The dispatcher's machine is gone, disk and all, while a job trains. Only here are the tag, the metadata server and an
agent's way to a dispatcher that it does not know real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotfleet.api import Fleet, Job
from tests.support.e2e.e2e_stage import COUNTING, Stage, hosts, hosts_of, output, trains, wait_for

pytestmark = pytest.mark.processes
LONGER = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="with --long only")


TALKING = COUNTING.replace("            linger()\n", '            print("step", flush=True)\n            linger()\n')


def dispatcher_of(stage: Stage) -> str:
    return next(m.request_id for m in stage.cloud.truth() if "-d-" in m.request_id)


def workers_of(stage: Stage) -> dict[str, tuple[int, ...]]:
    """Every process on the worker hosts that will not come back by itself when it ends."""
    return {m.request_id: tuple(sorted(m.processes)) for m in stage.cloud.truth() if "-d-" not in m.request_id}


def steps(stage: Stage, host: str) -> int:
    """Lines in the log of the host's worker, on its own disk: one per step."""
    machine = next(m for m in stage.cloud.truth() if m.request_id == host)
    return sum(p.read_text().count("step") for p in Path(machine.folder).glob("jobs/*/workers/*/log"))


def lose_and_come_back(stage: Stage, fleet: Fleet, job: Job) -> Job:
    """Kill the dispatcher's machine while the job trains, see that it goes on, and type `up` again; the job as the new
    one has it."""
    before, processes, host = job.status(), workers_of(stage), hosts_of(job)[0]
    stage.cloud.kill(dispatcher_of(stage))
    reached = steps(stage, host)
    wait_for("steps without a dispatcher", lambda: steps(stage, host) > reached + 3)
    looked = stage.cli("status", ok=False)
    assert looked.returncode == 1
    assert "machine is gone" in looked.stderr and "spotfleet up" in looked.stderr, looked.stderr

    said: list[str] = []
    fleet.up(progress=said.append, timeout_s=90)
    assert any("the dispatcher's machine is gone; a new one takes over 2 hosts" in line for line in said), said
    job = fleet.job(job.id)
    wait_for("the job with all its workers", lambda: trains(job, 2, step=before.version + 3))
    after = job.status()
    assert (after.generation, after.repeated) == (before.generation, before.repeated)
    assert workers_of(stage) == processes
    return job


def test_training_goes_on_when_the_dispatchers_machine_is_lost_and_a_new_one_takes_over(stage: Stage):
    target = stage.work / "target"
    target.mkdir()
    (stage.work / ".spotfleetignore").write_text("target\n")
    (stage.work / "counting.py").write_text(TALKING)
    fleet = stage.fleet("phoenix", least=2, target=2, more=f"checkpoint: {{target: {target}}}")
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    wait_for("a copy of the ledger", lambda: any(target.glob("*/ledger/*.db")))
    before = {e["request_id"] for e in fleet.events() if e["kind"] == "HostJoined" and e["ledger"] == "dispatcher"}

    job = lose_and_come_back(stage, fleet, job)
    stage.hurry()
    job.wait(120)

    assert "counted -400.0 of -400" in output(job)
    assert output(job).splitlines().count("step") == 400  # from its beginning, though the disk with that part is gone
    assert len(before) == 2 and len(hosts(fleet)) == 2
    seqs = [e for e in fleet.events() if e["ledger"] == "dispatcher"]
    assert [e["restored"] for e in seqs if e["kind"] == "TakenOver"] == [True]
    assert len([e for e in seqs if e["kind"] == "FleetCreated"]) == 1
    fleet.down()
    assert stage.cloud.invoice("phoenix").micros == fleet.cost().micros
    assert stage.cloud.truth() == []


@LONGER
def test_a_fleet_that_loses_every_machine_goes_on_from_its_target(stage: Stage):
    target = stage.work / "target"
    target.mkdir()
    (stage.work / ".spotfleetignore").write_text("target\n")
    fleet = stage.fleet("ashes", least=2, target=2, more=f"checkpoint: {{target: {target}, interval: 1s}}")
    job = stage.counting(fleet, 400, (2, 2), secrets={"KEY": "a-secret-of-the-job"})
    wait_for("a checkpoint at the target", lambda: any(target.glob(f"*/jobs/{job.id}/checkpoints/*.json")))
    wait_for("a copy of the ledger", lambda: any(target.glob("*/ledger/*.db")))
    wait_for("some more steps", lambda: trains(job, 2, step=30))

    for machine in stage.cloud.truth():
        stage.cloud.kill(machine.request_id)
    assert "all machines are gone" in stage.cli("status", ok=False).stderr
    said: list[str] = []
    fleet.up(progress=said.append, timeout_s=90)
    assert any(f"all machines are gone; a new one goes on from {target}" in line for line in said), said
    job = fleet.job(job.id)
    wait_for("the job from its checkpoint", lambda: trains(job, 2))
    formed = [e["version"] for e in fleet.events() if e["kind"] == "GenerationFormed"]
    assert len(formed) == 2 and formed[-1] > 0  # not from its beginning
    stage.hurry()
    job.wait(120)
    assert "counted -400.0 of -400" in output(job)
    fleet.down()
    assert stage.cloud.invoice("ashes").micros == fleet.cost().micros


@LONGER
def test_without_a_target_jobs_and_costs_of_living_hosts_survive_two_losses(stage: Stage):
    (stage.work / "counting.py").write_text(TALKING)
    fleet = stage.fleet("phoenix", least=2, target=2)
    job = stage.counting(fleet, 1000, (2, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    for _ in range(2):
        job = lose_and_come_back(stage, fleet, job)
    killed = hosts_of(job)[0]
    fleet.interrupt(killed, None)
    wait_for("a replacement, with the files of the job", lambda: trains(job, 2, without=killed))
    stage.hurry()
    job.wait(120)
    assert "counted -1000.0 of -1000" in output(job)
    fleet.down()
    assert stage.cloud.invoice("phoenix").micros == fleet.cost().micros  # no host had ended by the losses
