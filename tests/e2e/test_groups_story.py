"""A fleet of two groups with no host at first: a job on a GPU brings one up, trains, and the host is gone when idle.

What the cheaper tests cannot show: that `up` returns with the dispatcher alone, that the command line, a real agent and
real workers go through all of it, and that the bill has the hours of that host and no others.
"""

from __future__ import annotations

import json

import pytest

from spotfleet.api import Fleet
from tests.support.e2e.e2e_stage import LIMIT_S, Stage, hosts, output, trains, wait_for

pytestmark = pytest.mark.processes
FILE = """
name: two
provider: local
workdir: .
resources: {use_spot: true}
groups:
  cpu: {nodes: {min: 0, max: 2, idle_after: 1s}, instance_type: cpu.small}
  gpu: {nodes: {min: 0, max: 2, idle_after: 1s}, accelerators: EMU:1}
"""


def test_a_job_of_a_group_brings_a_host_that_is_gone_once_it_is_idle_and_the_bill_shows_it(stage: Stage):
    path = stage.work / "two.yaml"
    path.write_text(FILE)
    shown = stage.cli("up", str(path), "-y").stderr
    assert "group gpu: 0..2 hosts, target 2" in shown and "no host yet: a job makes hosts come" in shown
    fleet = Fleet(path)
    assert not hosts(fleet) and fleet.status().state == "up"
    refused = stage.cli("train", "counting.py", "--np", "1", ok=False).stderr
    assert "the job names none of them: cpu, gpu" in refused and "--group cpu" in refused
    path.write_text(FILE.replace("max: 2, idle_after: 1s}, acc", "max: 3, idle_after: 1s}, acc"))
    assert "nodes of group gpu are now 0..3, target 3" in stage.cli("up", str(path), "-y").stderr
    stage.cli("train", "counting.py", "--np", "1", "--group", "gpu", "-d", "--", "--epochs", "1", "--hurry",
              str(stage.work / "hurry"))
    (job,) = fleet.jobs()
    wait_for("training", lambda: trains(job, 1))
    (host,) = hosts(fleet)
    assert (host.group, host.pool.split("/")[2]) == ("gpu", "gpu.small")
    assert "group gpu: 0..3 hosts, target 3; 1 wanted now" in stage.cli("status", "two").stdout
    stage.hurry()
    job.wait(LIMIT_S)
    assert "counted -50.0 of -50" in output(job)
    wait_for("no host", lambda: not [m for m in stage.cloud.truth() if "-d-" not in m.request_id])
    assert "without work for " in stage.cli("events", "two").stdout
    wait_for("its end in the ledger", lambda: not hosts(fleet) and not hosts(fleet, "draining"))
    stage.cli("run", "--group", "cpu", "--", "echo hello")
    fleet.down()
    bill = json.loads(stage.cli("cost", "two", "--by", "group", "-o", "json").stdout)
    groups = {group["key"]: group["micros"] for group in bill["groups"]}
    assert sorted(groups) == ["(dispatcher)", "cpu", "gpu"] and min(groups.values()) > 0
    assert {line["group"] for line in bill["lines"] if line["host"] == host.host} == {"gpu"}
    assert stage.cloud.invoice(fleet.home.folder("two").record.cloud_name).micros == bill["micros"]
    assert stage.cloud.truth() == []
