"""DescribeTags: of everything that bears tags, also of what moto does not know, such as fleets."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.aws.operations import Context, filtered, operation

KINDS = {
    "fleet": "fleet", "i": "instance", "vol": "volume", "eni": "network-interface", "sir": "spot-instances-request",
    "lt": "launch-template", "sg": "security-group", "sgr": "security-group-rule", "pg": "placement-group",
    "key": "key-pair", "eipalloc": "elastic-ip", "vpc": "vpc", "subnet": "subnet", "igw": "internet-gateway",
    "rtb": "route-table", "ami": "image", "snap": "snapshot",
}  # fmt: skip


@operation("ec2:DescribeTags")
def describe_tags(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    lines = [
        {"ResourceId": id, "ResourceType": KINDS.get(id.partition("-")[0], ""), "Key": key, "Value": value}
        for id, tags in ctx.backend.tags.items()
        for key, value in tags.items()
    ]
    known = {"resource-id": lambda t: t["ResourceId"], "resource-type": lambda t: t["ResourceType"],
             "key": lambda t: t["Key"], "value": lambda t: t["Value"]}  # fmt: skip
    filters = [f for f in p.get("Filters", []) if not f["Name"].startswith("tag:")]
    for f in p.get("Filters", []):
        if f["Name"].startswith("tag:"):  # values of this tag alone, as EC2 does
            filters += [{"Name": "key", "Values": [f["Name"].removeprefix("tag:")]},
                        {"Name": "value", "Values": f["Values"]}]  # fmt: skip
    return {"Tags": filtered(lines, filters, known, lambda _t: {})}
