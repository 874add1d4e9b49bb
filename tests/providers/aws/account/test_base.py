"""A base that Terraform made, in an account of the fake: found by its tag, used unchanged, and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from spotfleet.errors import NeedsPerson
from spotfleet.model import FleetSpec, Need, Role
from spotfleet.providers.aws.account import network, queue
from spotfleet.providers.aws.base import found
from spotfleet.providers.aws.mapping import names, policies
from spotfleet.providers.aws.section.spec import AwsNetwork
from tests.providers.aws.account.test_queue import event

ROLE = "spotfleet-lab-us-east-1-dispatcher"
G5 = FleetSpec("g5", provider="aws", any_of=(Need(instance_type="g5.xlarge"),), tags={names.BASE: "lab"})


def group(cloud: Any, name: str) -> str:
    ec2 = cloud.client("ec2")
    vpc = ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
    return ec2.create_security_group(GroupName=name, Description="x", VpcId=vpc)["GroupId"]


def role(cloud: Any, document: dict[str, Any]) -> None:
    iam = cloud.client("iam")
    iam.create_role(RoleName=ROLE, Path=names.IAM_PATH, AssumeRolePolicyDocument=json.dumps(policies.trust()))
    iam.put_role_policy(RoleName=ROLE, PolicyName=ROLE, PolicyDocument=json.dumps(document))
    iam.create_instance_profile(InstanceProfileName=ROLE, Path=names.IAM_PATH)
    iam.add_role_to_instance_profile(InstanceProfileName=ROLE, RoleName=ROLE)


def test_the_dispatcher_alone_is_in_the_group_that_lets_ssh_in(cloud, aws):
    hosts, door = group(cloud, "hosts"), group(cloud, "door")
    account = aws(networks=(AwsNetwork("us-east-1", "", (), (hosts,), (door,)),)).account
    assert network.groups(account, "us-east-1", "f", Role.WORKER) == (hosts,)
    assert network.groups(account, "us-east-1", "f", Role.DISPATCHER) == (hosts, door)


def test_a_named_queue_is_read_and_neither_made_nor_removed(cloud, aws):
    sqs = cloud.client("sqs")
    url = sqs.create_queue(QueueName="spotfleet-lab", tags={names.BASE: "lab", names.MANAGER: "terraform"})["QueueUrl"]
    provider = aws(interruption_queue="spotfleet-lab", event_queue=True, ssh_from=("192.0.2.1/32",))
    provider.prepare("f", {}, lambda _line: None)
    assert [t.name for t in cloud.everything() if t.kind in ("queue", "rule")] == ["spotfleet-lab"]
    sqs.send_message(QueueUrl=url, MessageBody=event("EC2 Instance Rebalance Recommendation", **{"instance-id": "i-1"}))
    assert provider.has_events()
    assert [e.provider_id for e in provider.poll_events("f", 0.0)] == ["i-1"]
    assert not [r for r in provider.list_resources("") if r.kind == queue.QUEUE]


def test_a_base_is_found_by_its_tag_and_by_no_other(cloud, aws):
    ssm = cloud.client("ssm")
    for name in ("lab", "research"):
        ssm.put_parameter(Name=names.parameter(name), Value=json.dumps({"name": name}), Type="String",
                          Tags=[{"Key": names.BASE, "Value": name}])
    assert json.loads(found(aws().account, "lab")) == {"name": "lab"}
    with pytest.raises(NeedsPerson, match="no base la is in us-east-1") as caught:
        found(aws().account, "la")
    assert "aws.regions" in caught.value.hint


@pytest.mark.parametrize(("left_out", "level", "words"), [
    ("", "ok", f"role {ROLE} of base lab has the rights of a dispatcher"),
    ("StopHosts", "blocker", f"role {ROLE} of base lab lacks ec2:StopInstances"),
])
def test_check_names_the_rights_that_a_base_s_role_lacks(cloud, aws, left_out: str, level: str, words: str):
    """As that of an older module may."""
    document = policies.dispatcher(policies.Scope("lab", ("us-east-1",), cloud.ACCOUNT, base=True))
    role(cloud, document | {"Statement": [s for s in document["Statement"] if s["Sid"] != left_out]})
    provider = aws(dispatcher_profile=ROLE, ssh_from=("192.0.2.1/32",))
    (finding,) = [f for f in provider.findings(G5) if f.about == "base"]
    assert (finding.level, finding.what) == (level, words)
    assert level == "ok" or "terraform apply" in finding.fix
    assert not [f for f in provider.findings(replace(G5, tags={})) if f.about == "base"]


def test_check_names_parts_of_a_base_that_are_not_there(cloud, aws):
    hosts = group(cloud, "hosts")
    provider = aws(networks=(AwsNetwork("us-east-1", "", (), (hosts,), ("sg-89abcdef",)),),
                   interruption_queue="spotfleet-lab")
    wrong = {f.what for f in provider.findings(None) if f.level == "blocker" and f.about == "named things"}
    assert wrong == {"aws.interruption_queue names spotfleet-lab in us-east-1, which is not there",
                     f"aws.networks names {hosts}, sg-89abcdef in us-east-1, which is not there"}
