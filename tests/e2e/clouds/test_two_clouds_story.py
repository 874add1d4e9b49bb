"""One fleet on AWS and on Google Cloud, against fakes whose machines really run, on networks that are connected.

The order of clouds, failovers without machines, missing credentials: `tests/providers/aws/several`. Here the
command line, the dispatcher with both SDKs and the workers of both clouds are real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support.aws import aws_stage
from tests.support.e2e import cloud_story
from tests.support.e2e.two_clouds import FLEET_ACCOUNT, TwoClouds
from tests.support.gcp import gcp_stage

pytest.importorskip("torch")
WHY_NOT = aws_stage.why_not() or gcp_stage.why_not()
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def stage() -> Iterator[TwoClouds]:
    with TwoClouds.made() as stage:
        stage.fleet_file()
        stage.permit()
        yield stage


def test_hosts_of_both_clouds_train_together_and_go_where_there_is_capacity_through_a_notice_on_each(stage: TwoClouds):
    said = stage.cli("check", "fleet.yaml", ok=False).stdout
    assert " aws: " in said and " gcp: " in said
    stage.rooms(aws=1, gcp=1)
    stage.aws.machines.broken = 1  # the first host there reports its broken GPU, and is replaced
    stage.cli("up", "fleet.yaml", "-y", timeout_s=400.0)
    (failed,) = [e for e in json.loads(stage.cli("events", "-o", "json").stdout) if e["kind"] == "HostFailed"]
    assert "slot 0: GPU 00000000:00:10.0 has 3 uncorrected ECC errors" in failed["why"] and failed["broken"]
    assert failed["request_id"] not in {h.host for h in stage.call(lambda client: client.status()).hosts}
    assert stage.clouds() == ["aws", "gcp"] and len(stage.aws.instances("dispatcher")) == 1
    job = stage.train((2, 2))
    first = stage.instances("worker")
    stage.wait("both that train", lambda: stage.training(first))

    on_aws = next(view for view in first if stage.cloud_of(view) is stage.aws)
    stage.rooms(aws=0, gcp=1)
    stage.aws.cloud.interrupt(on_aws.id, notice_s=60.0, room=0)
    stage.wait("its replacement in the other cloud", lambda: len(stage.gcp.instances("worker")) == 2)
    stage.wait("both that go on", lambda: stage.training(stage.gcp.instances("worker")))

    stage.rooms(aws=1, gcp=0)
    on_gcp = next(view for view in first if stage.cloud_of(view) is stage.gcp)
    left = next(view for view in stage.gcp.instances("worker") if view.id != on_gcp.id)
    stage.gcp.cloud.preempt(on_gcp.name, room=0)
    stage.wait("its replacement in the first cloud", lambda: any(
        view.id != on_aws.id for view in stage.aws.instances("worker") if view.state == "running"))
    new = next(view for view in stage.aws.instances("worker") if view.id != on_aws.id)
    stage.wait("both that go on", lambda: stage.training([new, left]))
    stage.enough()
    stage.wait("the job's end", lambda: stage.job(job).state == "succeeded")
    assert {c.principal for c in stage.gcp.cloud.calls} == {gcp_stage.USER, FLEET_ACCOUNT}
    assert stage.gcp.denials() == []


def test_one_bill_has_both_clouds_and_down_leaves_nothing_in_either(stage: TwoClouds):
    stage.cli("down", "-y")
    assert (stage.aws.cloud.everything(), stage.gcp.cloud.everything()) == ([], []), stage.story()
    assert re.search(r"nothing of fleet both-m[0-9a-f]{3} is listed", stage.said[-1]), stage.said[-1]
    assert json.loads(stage.cli("leaks", "--all-regions", "-o", "json").stdout) == []
    assert stage.wrongly_counted() == []
    assert cloud_story.bill_agrees(stage, unlaunched=True) == {"aws", "gcp"}
