"""The ends that nobody watches: a laptop that is closed, and `down` while a job runs."""

from __future__ import annotations

import json

import pytest

from spotfleet.protocol.checkpoint_files import METADATA
from tests.support.e2e.e2e_stage import Stage, trains, wait_for

pytestmark = pytest.mark.processes


def test_train_down_ends_the_fleet_with_the_laptop_closed(stage: Stage):
    stage.hurry()
    stage.fleet("closed", least=2, target=2)
    stage.cli("train", "counting.py", "-d", "--down", "--np", "2:2", "--", "--hurry", str(stage.work / "hurry"))
    wait_for("the end of all machines", lambda: stage.cloud.truth() == [])  # no command of ours runs meanwhile
    cost = json.loads(stage.cli("cost", "-o", "json").stdout)
    assert cost["micros"] == stage.cloud.invoice("closed").micros
    logs = stage.home / "fleets" / "closed" / "archive" / "jobs"
    assert any("counted -200.0 of -200" in p.read_text() for p in logs.glob("*/logs/rank-0.log"))


def test_down_keeps_what_a_running_job_has_reached(stage: Stage):
    fleet = stage.fleet("kept", least=2, target=2)  # checkpoints come once a minute, so none by itself
    job = stage.counting(fleet, 400, (2, 2))
    wait_for("some steps", lambda: trains(job, 2, step=5))
    reached = job.status().version
    fleet.down()
    kept = (stage.home / "fleets" / "kept" / "archive" / "jobs" / job.id / "checkpoints").rglob("*")
    names = [p.parent.name for p in kept if p.name == METADATA]  # VERSION-GENERATION
    versions = [int(name.partition("-")[0]) for name in names]
    assert max(versions, default=0) >= reached, names
