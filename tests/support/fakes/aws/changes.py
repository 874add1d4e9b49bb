"""EC2 operations that end, stop and start instances; spot requests and placement groups."""

from __future__ import annotations

from typing import Any

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.instances import by_ids
from tests.support.fakes.aws.life import USER, new_id
from tests.support.fakes.aws.operations import Context, filtered, operation, page, put_tags, tags
from tests.support.fakes.aws.ordering import tags_by_type
from tests.support.fakes.aws.state import CODES, PlacementGroup, SpotRequest, when

# ---- ending and stopping


def _change(ctx: Context, ids: list[str], act: Any, becomes: str, key: str) -> dict[str, Any]:
    if not ids:
        raise AwsError("MissingParameter", "The request must contain the parameter InstanceId")
    machines = by_ids(ctx, ids)
    said = []
    for machine in machines:
        before = machine.state
        act(machine)
        now = before if machine.state == before else becomes
        said.append(
            {
                "InstanceId": machine.id,
                "PreviousState": {"Code": CODES[before], "Name": before},
                "CurrentState": {"Code": CODES[now], "Name": now},
            }
        )
    return {key: said}


@operation("ec2:TerminateInstances")
def terminate_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    ids = p.get("InstanceIds", [])
    for machine in by_ids(ctx, ids):
        if machine.order.protected:
            raise AwsError(
                "OperationNotPermitted",
                f"The instance '{machine.id}' may not be terminated. Modify its "
                "'disableApiTermination' instance attribute and try again.",
            )
    return _change(
        ctx, ids, lambda m: ctx.cloud.life.terminate(m, USER, "User initiated"), "shutting-down", "TerminatingInstances"
    )


@operation("ec2:StopInstances")
def stop_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    for machine in by_ids(ctx, p.get("InstanceIds", [])):
        if machine.state in ("terminated", "shutting-down", "pending"):
            raise AwsError(
                "IncorrectInstanceState",
                f"This instance '{machine.id}' is not in a state from which it can be stopped.",
            )
    return _change(ctx, p.get("InstanceIds", []), ctx.cloud.life.stop_by_user, "stopping", "StoppingInstances")


@operation("ec2:StartInstances")
def start_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    return _change(ctx, p.get("InstanceIds", []), ctx.cloud.life.start_by_user, "pending", "StartingInstances")


@operation("ec2:RebootInstances")
def reboot_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    by_ids(ctx, p.get("InstanceIds", []))
    return {}


# ---- spot requests


def _spot_listed(ctx: Context) -> list[SpotRequest]:
    return [r for r in ctx.region.requests.values() if ctx.now - r.born >= ctx.cloud.new_lag_s]


def _spot_told(ctx: Context, request: SpotRequest) -> dict[str, Any]:
    seen, order_ = request.seen(ctx.now - ctx.cloud.lag_s), request.order
    said = {
        "SpotInstanceRequestId": request.id,
        "State": seen.state,
        "Type": "persistent" if request.persistent else "one-time",
        "Status": {"Code": seen.code, "Message": seen.message, "UpdateTime": when(seen.at)},
        "CreateTime": when(request.born),
        "SpotPrice": f"{request.price:.6f}",
        "ProductDescription": "Linux/UNIX",
        "InstanceInterruptionBehavior": order_.behavior,
        "LaunchedAvailabilityZone": order_.zone,
        "Tags": tags(ctx.backend, request.id),
        "LaunchSpecification": {
            "ImageId": order_.image,
            "InstanceType": order_.type,
            "SubnetId": order_.subnet.id,
            "Placement": {"AvailabilityZone": order_.zone},
            "SecurityGroups": [{"GroupId": g.id, "GroupName": g.name} for g in order_.groups],
        },
    }
    if seen.instance_id:
        said["InstanceId"] = seen.instance_id
    if request.valid_until:
        said["ValidUntil"] = when(request.valid_until)
    return said


def _spot_by_ids(ctx: Context, ids: list[str]) -> list[SpotRequest]:
    known = {r.id: r for r in _spot_listed(ctx)}
    missing = [i for i in ids if i not in known]
    if missing:
        raise AwsError(
            "InvalidSpotInstanceRequestID.NotFound", f"The spot instance request ID '{missing[0]}' does not exist"
        )
    return [known[i] for i in dict.fromkeys(ids)]


@operation("ec2:DescribeSpotInstanceRequests")
def describe_spot_instance_requests(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    ids = p.get("SpotInstanceRequestIds")
    found = _spot_by_ids(ctx, ids) if ids else _spot_listed(ctx)

    def seen(r: SpotRequest) -> Any:
        return r.seen(ctx.now - ctx.cloud.lag_s)

    known = {
        "spot-instance-request-id": lambda r: r.id,
        "state": lambda r: seen(r).state,
        "status-code": lambda r: seen(r).code,
        "instance-id": lambda r: seen(r).instance_id or None,
        "type": lambda r: "persistent" if r.persistent else "one-time",
        "launch.instance-type": lambda r: r.order.type,
        "launched-availability-zone": lambda r: r.order.zone,
        "network-interface.subnet-id": lambda r: r.order.subnet.id,
        "launch.group-id": lambda r: [g.id for g in r.order.groups],
    }
    found = filtered(found, p.get("Filters"), known, lambda r: ctx.backend.tags.get(r.id, {}))
    some, token = page(found, p)
    return {"SpotInstanceRequests": [_spot_told(ctx, r) for r in some], "NextToken": token}


@operation("ec2:CancelSpotInstanceRequests")
def cancel_spot_instance_requests(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    requests = _spot_by_ids(ctx, p.get("SpotInstanceRequestIds", []))
    for request in requests:
        ctx.cloud.life.cancel(request)
    return {"CancelledSpotInstanceRequests": [{"SpotInstanceRequestId": r.id, "State": r.state} for r in requests]}


@operation("ec2:CreatePlacementGroup")
def create_placement_group(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    name = p.get("GroupName", "")
    if any(g.name == name for g in ctx.region.placement_groups.values()):
        raise AwsError("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    given = tags_by_type(p.get("TagSpecifications", []), ("placement-group",)).get("placement-group", {})
    group = PlacementGroup(new_id("pg"), name, p.get("Strategy", "cluster"), ctx.now)
    ctx.region.placement_groups[group.id] = group
    put_tags(ctx.backend, group.id, given)
    return {"PlacementGroup": _group_told(ctx, group)}


def _group_told(ctx: Context, group: Any) -> dict[str, Any]:
    return {
        "GroupName": group.name,
        "GroupId": group.id,
        "State": "available",
        "Strategy": group.strategy,
        "Tags": tags(ctx.backend, group.id),
        "GroupArn": f"arn:aws:ec2:{ctx.region.name}:{catalog.ACCOUNT}:placement-group/{group.name}",
    }


@operation("ec2:DescribePlacementGroups")
def describe_placement_groups(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    groups = list(ctx.region.placement_groups.values())
    for name in p.get("GroupNames", []):
        if all(g.name != name for g in groups):
            raise AwsError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
    groups = [g for g in groups if not p.get("GroupNames") or g.name in p["GroupNames"]]
    groups = [g for g in groups if not p.get("GroupIds") or g.id in p["GroupIds"]]
    known = {
        "group-name": lambda g: g.name,
        "state": lambda g: "available",
        "strategy": lambda g: g.strategy,
        "group-id": lambda g: g.id,
    }
    groups = filtered(groups, p.get("Filters"), known, lambda g: ctx.backend.tags.get(g.id, {}))
    return {"PlacementGroups": [_group_told(ctx, g) for g in groups]}


@operation("ec2:DeletePlacementGroup")
def delete_placement_group(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    group = next((g for g in ctx.region.placement_groups.values() if p.get("GroupName") in (g.name, g.id)), None)
    if group is None:
        raise AwsError("InvalidPlacementGroup.Unknown", f"The Placement Group '{p.get('GroupName')}' is unknown.")
    if any(m.living and m.order.placement_group == group.name for m in ctx.region.machines.values()):
        raise AwsError(
            "InvalidPlacementGroup.InUse", f"The placement group '{group.name}' is in use and may not be deleted."
        )
    del ctx.region.placement_groups[group.id]
    ctx.backend.tags.pop(group.id, None)
    return {}
