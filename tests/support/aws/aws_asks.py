"""What the self-tests of the AWS fake ask of it, through the real boto3."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from botocore.exceptions import ClientError

from tests.support.fakes.aws import UBUNTU

ZONE = "us-east-1a"
STOPPED = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
PERSISTENT = {"MarketType": "spot", "SpotOptions": STOPPED}
ONE_TIME = {"MarketType": "spot"}


@contextmanager
def refused(code: str, status: int = 0):
    """The call fails with that code."""
    try:
        yield
    except ClientError as error:
        assert error.response["Error"]["Code"] == code, error
        assert not status or error.response["ResponseMetadata"]["HTTPStatusCode"] == status
        return
    raise AssertionError(f"no {code}")


def tagged(*kinds: str, **tags: str) -> list[dict[str, Any]]:
    return [{"ResourceType": k, "Tags": [{"Key": n, "Value": v} for n, v in tags.items()]} for k in kinds]


def run(ec2: Any, market: dict[str, Any] | None = None, count: int = 1, least: int = 0, **more: Any) -> list[str]:
    """Ids of new instances."""
    asked = {"ImageId": UBUNTU, "InstanceType": "g5.xlarge", "Placement": {"AvailabilityZone": ZONE}, **more}
    if market:
        asked["InstanceMarketOptions"] = market
    asked = {k: v for k, v in asked.items() if v is not None}
    said = ec2.run_instances(MinCount=least or count, MaxCount=count, **asked)
    return [i["InstanceId"] for i in said["Instances"]]


def one(ec2: Any, id: str) -> dict[str, Any]:
    return ec2.describe_instances(InstanceIds=[id])["Reservations"][0]["Instances"][0]


def state(ec2: Any, id: str) -> str:
    return one(ec2, id)["State"]["Name"]


def requests(ec2: Any, **filters: str) -> list[tuple[str, str, str]]:
    """(state, code, instance) of each spot request."""
    wanted = [{"Name": k.replace("_", "-"), "Values": [v]} for k, v in filters.items()]
    said = ec2.describe_spot_instance_requests(Filters=wanted)["SpotInstanceRequests"]
    return [(r["State"], r["Status"]["Code"], r.get("InstanceId", "")) for r in said]


def request_of(ec2: Any, id: str) -> str:
    return one(ec2, id)["SpotInstanceRequestId"]


def listed(ec2: Any, **filters: str) -> list[str]:
    names = {k: k.replace("_", "-").replace("tag-", "tag:", 1) for k in filters}
    wanted = [{"Name": names[k], "Values": v.split(",")} for k, v in filters.items()]
    return [i["InstanceId"] for r in ec2.describe_instances(Filters=wanted)["Reservations"] for i in r["Instances"]]


def template(ec2: Any, name: str = "spotfleet-x", **data: Any) -> str:
    return ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData={"ImageId": UBUNTU, **data})[
        "LaunchTemplate"
    ]["LaunchTemplateId"]


def fleet(
    ec2: Any, count: int = 1, overrides: list[dict[str, Any]] | None = None, market: str = "spot", **options: Any
) -> dict[str, Any]:
    """`options` are those of the market, and name, tags, token."""
    name, tags, token = (options.pop(k, None) for k in ("name", "tags", "token"))
    options.setdefault("AllocationStrategy", "price-capacity-optimized" if market == "spot" else "lowest-price")
    more: dict[str, Any] = {"ClientToken": token} if token else {}
    more["SpotOptions" if market == "spot" else "OnDemandOptions"] = options
    return ec2.create_fleet(
        Type="instant",
        TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": market},
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": name or "spotfleet-x", "Version": "$Latest"},
                "Overrides": overrides or [pool("a"), pool("b")],
            }
        ],
        TagSpecifications=tags or [],
        **more,
    )


def pool(zone: str, kind: str = "g5.xlarge", **more: Any) -> dict[str, Any]:
    return {"InstanceType": kind, "AvailabilityZone": f"us-east-1{zone}", **more}


def got(said: dict[str, Any]) -> dict[str, int]:
    """zone/type -> how many."""
    found: dict[str, int] = {}
    for line in said["Instances"]:
        over = line["LaunchTemplateAndOverrides"]["Overrides"]
        key = f"{over['AvailabilityZone']}/{over['InstanceType']}"
        found[key] = found.get(key, 0) + len(line["InstanceIds"])
    return found


def errors(said: dict[str, Any]) -> list[tuple[str, str]]:
    return sorted(
        (line["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"], line["ErrorCode"])
        for line in said["Errors"]
    )
