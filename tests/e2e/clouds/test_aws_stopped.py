"""A host of a `stop` fleet on AWS that EC2 stops and starts again: the same machine, with its disk, is a host again.

Cheaper tests show what planner and listing make of it; that a machine which was switched off really comes back, by its
user data of long ago and with the agent's home on its disk, only one that boots can show.
"""

from __future__ import annotations

import os

import pytest

from tests.support.aws.aws_stage import AwsStage, pools, why_not

pytest.importorskip("torch")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not()),
              pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="`scripts/test --long` runs it")]


def test_a_stopped_host_that_ec2_starts_again_trains_on_where_no_other_could_be_had():
    with AwsStage.made() as stage:
        stage.fleet_file(nodes={"min": 2, "target": 2}, interruption_behavior="stop")
        stage.restrict()
        stage.cli("up", "fleet.yaml", "-y")
        stopped, other = both = stage.instances("worker")
        job = stage.train((1, 2))
        stage.wait("two that train", lambda: stage.training(both))
        stage.machine(stopped).path("/root/mine").touch()
        for zone, kind in pools():
            stage.cloud.set_room(zone, kind, 0)
        stage.cloud.interrupt(stopped.id, notice_s=5.0)
        stage.wait("its stop", lambda: stage.cloud.instance(stopped.id).state == "stopped")
        stage.wait("the other, alone", lambda: stage.job(job).world_size == 1)
        stage.cloud.settle()
        assert stage.machine(stopped).processes() == []
        stage.cloud.set_room(stopped.zone, stopped.type, 1)
        stage.wait("both again", lambda: stage.job(job).world_size == 2, 40.0)
        again = stage.cloud.instance(stopped.id)
        assert (again.run, again.private_ip) == (2, stopped.private_ip)
        assert stage.machine(stopped).path("/root/mine").exists()
        assert {view.id for view in stage.instances("worker")} == {stopped.id, other.id}
        stage.enough()
        stage.wait("the job's end", lambda: stage.job(job).state == "succeeded")
        stage.cli("down", "-y")
        assert stage.cloud.everything() == []
        assert stage.wrongly_counted() == []
        assert stage.denials() == []
