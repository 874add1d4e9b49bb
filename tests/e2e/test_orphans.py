"""Nobody is left who could end the hosts: no dispatcher, no laptop. What only real processes on a cloud can show."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from e2e_stage import Stage, hosts_of, trains, wait_for

from spotfleet.messages import Checkpoint, load

pytestmark = pytest.mark.slow


def test_hosts_that_lost_their_dispatcher_save_the_job_and_end_their_own_bill(stage: Stage):
    target = stage.home.parent / "target"
    target.mkdir()
    fleet = stage.fleet("orphans", least=2, target=2,
                        more=f"orphan_after: 5s\ncheckpoint: {{interval: 1h, target: {target}}}")
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("two workers that train", lambda: trains(job, 2, step=5))
    reached, ranks = job.status().version, hosts_of(job)
    stage.cloud.kill(next(h.host for h in fleet.hosts() if h.role == "dispatcher"))

    wait_for("the end of all machines", lambda: stage.cloud.truth() == [])  # no command of ours runs meanwhile
    bill = stage.cloud.invoice("orphans")
    wait_for("a later invoice", lambda: stage.cloud.invoice("orphans").at > bill.at + 3)
    assert stage.cloud.invoice("orphans").hosts == bill.hosts
    assert set(ranks) <= bill.hosts.keys()

    named = [(path, load(Checkpoint, path.read_bytes())) for path in target.glob(f"*/jobs/{job.id}/checkpoints/*.json")]
    path, newest = max(named, key=lambda n: n[1].version)
    assert newest.version > reached  # training had gone on without a dispatcher
    assert hashlib.sha256(Path(path).with_suffix(".ckpt").read_bytes()).hexdigest() == newest.digest
    left = [p.name for p in target.glob(f"*/jobs/{job.id}/left/*")]
    assert sorted(name.rsplit("-", 2)[0] for name in left) == sorted(ranks)
