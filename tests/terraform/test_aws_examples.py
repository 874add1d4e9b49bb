"""The larger examples for AWS, applied to the fake by the real provider. The story has the smallest one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfleet.config import base
from spotfleet.plugins import BASE_TAG
from tests.support.aws.terraform_base import UserTerraform, here, why_not

LONG = pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form: SPOTFLEET_LONG=1")
pytestmark = [pytest.mark.processes, LONG, pytest.mark.timeout(1800),
              pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]
MODULE = Path(__file__).parents[2] / "terraform" / "aws"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"


@pytest.fixture
def cloud() -> Iterator[Any]:
    from tests.support.fakes.aws import AwsCloud

    with AwsCloud() as cloud:
        yield cloud
        assert not cloud.bugs, cloud.bugs[0]


def applied(cloud: Any, folder: Path, example: str, **variables: str) -> tuple[UserTerraform, list[str], base.Base]:
    """Apply it, and see that another plan changes nothing; return its variables' words, too."""
    shutil.copytree(MODULE, folder / "aws", ignore=shutil.ignore_patterns(".terraform*"))
    terraform = here(folder, cloud.environ())
    words = [word for name, value in variables.items() for word in ("-var", f"{name}={value}")]
    where = f"aws/examples/{example}"
    terraform.run(f"-chdir={where}", "init")
    terraform.run(f"-chdir={where}", "apply", "-auto-approve", *words)
    assert terraform.plan(where, *words) == ""
    return terraform, words, base.parse(terraform.run(f"-chdir={where}", "output", "-json").stdout, example)


def test_an_existing_network_bucket_and_boundary_are_used_and_left_as_they_were(cloud: Any, tmp_path: Path):
    ec2, before = cloud.client("ec2"), cloud.everything()
    subnets = ec2.describe_subnets()["Subnets"][:2]
    cloud.client("s3").create_bucket(Bucket="acme")
    boundary = cloud.client("iam").create_policy(PolicyName="company", PolicyDocument=json.dumps(
        {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "ec2:*", "Resource": "*"}]}))["Policy"]
    terraform, words, made = applied(
        cloud, tmp_path, "existing-network", region="us-east-1", vpc_id=subnets[0]["VpcId"],
        subnet_ids=json.dumps([s["SubnetId"] for s in subnets]), office="10.0.0.0/8", bucket="acme",
        permissions_boundary=boundary["Arn"])
    assert (made.network, made.subnets) == (subnets[0]["VpcId"], tuple(s["SubnetId"] for s in subnets))
    assert made.checkpoints == "s3://acme/spotfleet"
    roles = cloud.client("iam").list_roles(PathPrefix="/spotfleet/")["Roles"]
    bounds = {cloud.client("iam").get_role(RoleName=r["RoleName"])["Role"]["PermissionsBoundary"][
        "PermissionsBoundaryArn"] for r in roles}
    assert len(roles) == 2 and bounds == {boundary["Arn"]}
    terraform.run("-chdir=aws/examples/existing-network", "destroy", "-auto-approve", *words)
    assert {t.kind for t in cloud.everything() if t not in before} == {"bucket"}


def test_the_complete_example_makes_machines_too_and_removes_all_that_it_made(cloud: Any, tmp_path: Path):
    terraform, words, made = applied(cloud, tmp_path, "complete", office="10.0.0.0/8", image=cloud.UBUNTU, key=KEY)
    assert (made.name, made.disk_key, made.public_addresses) == ("lab", KEY, False)
    (dispatcher,) = cloud.instances()
    assert dispatcher.public_ip == "" and dispatcher.tags[BASE_TAG] == "lab"
    (group,) = cloud.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    shares = group["MixedInstancesPolicy"]["InstancesDistribution"]
    assert group["DesiredCapacity"] == 2 and shares["OnDemandPercentageAboveBaseCapacity"] == 0
    disks = cloud.client("ec2").describe_volumes(Filters=[{"Name": f"tag:{BASE_TAG}", "Values": ["lab"]}])["Volumes"]
    assert disks and all(disk["Encrypted"] for disk in disks)
    terraform.run("-chdir=aws/examples/complete", "destroy", "-auto-approve", *words)
    assert terraform.run("-chdir=aws/examples/complete", "state", "list").stdout.strip() == ""
    left = [(t.kind, t.tags["Name"]) for t in cloud.everything() if t.tags.get(BASE_TAG)]
    assert left == [("snapshot", "spotfleet-lab-dispatcher")]
