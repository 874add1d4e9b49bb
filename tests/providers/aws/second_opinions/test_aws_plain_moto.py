"""The provider on moto as it is published: an implementation of AWS that does not share this project's reading.

`tests/support/aws/plain_moto.py` lists where moto differs, and why AWS does as the fake does.
"""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotfleet.codec import to_json
from spotfleet.model import Market
from spotfleet.providers.aws import AwsProvider, session
from spotfleet.providers.aws.mapping import names
from spotfleet.providers.aws.section.spec import AwsSpec
from tests.support.aws.aws_hosts import FLEET, USERS, A, B, dispatcher, pool, request
from tests.support.aws.plain_moto import plain_moto

pytestmark = pytest.mark.processes  # moto's state is one for a process, and the fake has that of this one
COUNT = itertools.count()
ON_DEMAND = pool(kind="m5.large", market=Market.ON_DEMAND, accelerator="")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with plain_moto() as url:
        yield url


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """client("ec2"): boto3's, in an empty account whose default VPC has its internet gateway."""
    import boto3

    session.reset()
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST"), timeout=60.0).close()
    settings = {"AWS_ENDPOINT_URL": server, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)

    def make(service: str) -> Any:
        return boto3.client(service, endpoint_url=server)

    ec2 = make("ec2")
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=ec2.describe_vpcs()["Vpcs"][0]["VpcId"])
    table = ec2.describe_route_tables()["RouteTables"][0]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", GatewayId=gateway)
    return make


@pytest.fixture
def provider(client: Callable[[str], Any], server: str) -> AwsProvider:
    ubuntu = client("ec2").describe_images(Owners=["amazon"], Filters=[{"Name": "name", "Values": ["ubuntu*"]}])
    image = ubuntu["Images"][0]["ImageId"]
    spec = AwsSpec(("us-east-1",), ssh_from=("192.0.2.1/32",), image=image, dispatcher_image=image, event_queue=True)
    return AwsProvider({"section": to_json(spec), "endpoint_url": server, "side": "laptop", "placement": "spread",
                        "secret": f"secret {next(COUNT)}", "target": "s3://bucket/x"})


def living(ec2: Any) -> list[dict[str, Any]]:
    found = [i for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]]
    return [i for i in found if i["State"]["Name"] != "terminated"]


def test_a_fleet_is_made_listed_ended_and_removed(provider, client):
    ec2, iam = client("ec2"), client("iam")
    provider.prepare(FLEET, USERS, lambda line: None)
    provider.launch(dispatcher())
    provider.launch(request(A, "f-1"))
    provider.launch(request(B, "f-2", interruption_behavior="stop"))
    provider.launch(request(A, "f-1"))  # asked for again: no second one
    assert sorted((h.request_id, h.offer.zone, h.offer.market.value) for h in provider.hosts(FLEET)) == [
        ("f-1", "us-east-1a", "spot"), ("f-2", "us-east-1b", "spot"), ("f-d-0", "us-east-1a", "on-demand")]
    machines = {next(t["Value"] for t in i["Tags"] if t["Key"] == names.HOST): i for i in living(ec2)}
    assert len(machines) == len(living(ec2)) == 3
    assert machines["f-1"]["InstanceType"] == "g5.xlarge"
    groups = {g["GroupName"] for n in machines["f-d-0"]["NetworkInterfaces"] for g in n["Groups"]}
    assert groups == {f"spotfleet-{FLEET}", f"spotfleet-{FLEET}-door"}
    profiles = iam.list_instance_profiles()["InstanceProfiles"]
    assert len([p for p in profiles if len(p["Roles"]) == 1]) == 2
    provider.tag("f-1", {"note": "seen"})
    assert {"Key": "note", "Value": "seen"} in next(i for i in living(ec2) if i["InstanceId"] == machines["f-1"][
        "InstanceId"])["Tags"]
    assert provider.boot_files("f-2") == {"boot.json": "f-2"}
    for host in ("f-1", "f-2", "f-d-0"):
        provider.terminate(host)
    assert living(ec2) == []
    assert all(not h.runs or h.runs[-1].ended_at for h in provider.hosts(FLEET))
    left = [r for r in provider.list_resources(FLEET) if r.kind != "fleet"]
    assert {r.kind for r in left} >= {"security-group", "role", "instance-profile", "sqs-queue", "eventbridge-rule"}
    for resource in left:
        provider.delete_resource(resource)
    assert {r.kind for r in provider.list_resources(FLEET)} <= {"fleet"}
    assert [g["GroupName"] for g in ec2.describe_security_groups()["SecurityGroups"]] == ["default"]
    assert ec2.describe_launch_templates()["LaunchTemplates"] == []
    assert iam.list_instance_profiles()["InstanceProfiles"] == []
    assert [r["RoleName"] for r in iam.list_roles()["Roles"] if "spotfleet" in r["RoleName"]] == []
    assert client("sqs").list_queues().get("QueueUrls", []) == []
    assert client("events").list_rules()["Rules"] == []


def test_hosts_launched_together_get_their_places(provider, client):
    provider.prepare(FLEET, USERS, lambda line: None)
    provider.launch_together([request(ON_DEMAND, f"f-{number}") for number in (1, 2, 3)])
    assert sorted(h.request_id for h in provider.hosts(FLEET)) == ["f-1", "f-2", "f-3"]
    assert sorted(provider.boot_files("f-3")) == ["boot.json"]
    provider.terminate("f-2")
    assert sorted(h.request_id for h in provider.hosts(FLEET) if h.runs[-1].ended_at is None) == ["f-1", "f-3"]


def test_check_finds_nothing_that_it_cannot_explain(provider):
    """What moto lacks, such as parameters of Ubuntu's images, becomes a finding."""
    found = list(provider.findings(None))
    assert found
    assert not [f for f in found if "Traceback" in json.dumps(to_json(f)) or "report it" in json.dumps(to_json(f))]
