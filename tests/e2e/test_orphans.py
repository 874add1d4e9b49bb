"""Nobody is left who could end the hosts: no dispatcher, no laptop. What only real processes on a cloud can show."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from spotfleet.api import Fleet, Job
from tests.support.e2e.e2e_stage import Stage, hosts_of, output, trains, wait_for

pytestmark = pytest.mark.processes


def deserted(stage: Stage) -> tuple[Fleet, Job, Path]:
    """A job that trained on two hosts, its target, and no machine any more: first the cloud took the dispatcher's."""
    target = stage.home.parent / "target"
    target.mkdir()
    fleet = stage.fleet("orphans", least=2, target=2,
                        more=f"orphan_after: 20s\ncheckpoint: {{interval: 1h, target: {target}}}")
    job = stage.counting(fleet, 2000, (2, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    (target / "reached").write_text(str(job.status().version))
    (target / "ranks").write_text(" ".join(hosts_of(job)))
    stage.cloud.kill(next(h.host for h in fleet.hosts() if h.role == "dispatcher"))
    wait_for("the end of all machines", lambda: stage.cloud.truth() == [])  # no command of ours runs meanwhile
    return fleet, job, target


def test_hosts_that_lost_their_dispatcher_save_the_job_and_end_their_own_bill(stage: Stage):
    _, job, target = deserted(stage)
    bill, ranks = stage.cloud.invoice("orphans"), (target / "ranks").read_text().split()
    wait_for("a later invoice", lambda: stage.cloud.invoice("orphans").at > bill.at + 3)
    assert stage.cloud.invoice("orphans").hosts == bill.hosts
    assert set(ranks) <= bill.hosts.keys()

    left = target.glob(f"*/jobs/{job.id}/quarantine/*.parts/*")  # the next dispatcher makes them whole
    files = [path for path in left if path.suffix != ".json"]
    newest = max(int(path.parent.name.split("-")[0]) for path in files)
    assert newest > int((target / "reached").read_text())  # training had gone on without a dispatcher
    named = dict(path.name.rsplit("-", 1) for path in files if path.parent.name.startswith(f"{newest}-"))
    assert sorted(named) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name.rsplit("-", 1)[1] for path in files)
    left = [p.name for p in target.glob(f"*/jobs/{job.id}/left/*")]
    assert sorted(name.rsplit("-", 2)[0] for name in left) == sorted(ranks)


@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="`scripts/test --long` runs it")
def test_a_fleet_whose_machines_have_all_ended_goes_on_with_the_next_up_where_its_job_stood(stage: Stage):
    fleet, job, target = deserted(stage)
    fleet.up(timeout_s=90)
    job = fleet.job(job.id)
    wait_for("two other workers", lambda: trains(job, 2, step=int((target / "reached").read_text())))
    assert not set((target / "ranks").read_text().split()) & set(hosts_of(job))
    stage.hurry()
    job.wait(120)
    assert "counted -2000.0 of -2000" in output(job)
    fleet.down()
    assert stage.cloud.truth() == []
    assert stage.cloud.invoice("orphans").micros == fleet.cost().micros
