"""EC2 Fleet of type instant: many pools in one call."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.instances import told
from tests.support.fakes.aws.life import USER
from tests.support.fakes.aws.operations import Context, filtered, once, operation, page, put_tags, remember, tags
from tests.support.fakes.aws.ordering import merged, order, tags_by_type, template
from tests.support.fakes.aws.state import Fleet, Machine, Order, when

STRATEGIES = (
    "lowest-price",
    "diversified",
    "capacity-optimized",
    "capacity-optimized-prioritized",
    "price-capacity-optimized",
    "lowestPrice",
    "capacityOptimized",
    "priceCapacityOptimized",
    "prioritized",
)
CREATED = ("instance", "volume", "network-interface")  # what an instant fleet's call may tag beside the fleet
SHORT = "InsufficientInstanceCapacity"


@dataclass
class Choice:
    """One override of one configuration: a pool that may be used."""

    said: dict[str, Any]  # LaunchTemplateAndOverrides
    market: str
    order: Order | None = None
    error: AwsError | None = None
    priority: float = float("inf")
    ids: tuple[str, ...] = ()

    @property
    def pool(self) -> tuple[str, str, str]:
        assert self.order is not None
        return self.order.zone, self.order.type, self.order.market


@operation("ec2:CreateFleet")
def create_fleet(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    before = once(ctx, "CreateFleet", p)
    if before is not None:
        fleet = ctx.region.fleets[before]
        return {"FleetId": fleet.id, "Instances": fleet.instances, "Errors": fleet.errors}
    capacity, spot = p["TargetCapacitySpecification"], p.get("SpotOptions", {})
    wanted = _wanted(capacity)
    _check(p, spot, p.get("OnDemandOptions", {}), wanted)
    given = tags_by_type(p.get("TagSpecifications", []), ("fleet", *CREATED))
    if given and not ctx.may("ec2:CreateTags", {"coarse": True}):
        raise AwsError(
            "UnauthorizedOperation",
            f"You are not authorized to perform this operation. User: {ctx.arn} is not "
            "authorized to perform: ec2:CreateTags",
        )
    if any(n and m == "spot" for m, n in wanted.items()):
        ctx.cloud.need_spot_role(ctx)
    fleet = Fleet(f"fleet-{_uuid()}", ctx.now, p, [], [])
    choices: list[Choice] = []
    for market, count in wanted.items():
        if count:
            mine = _choices(ctx, p, market, {kind: given[kind] for kind in CREATED if kind in given})
            options = spot if market == "spot" else p.get("OnDemandOptions", {})
            _fill(ctx, fleet, mine, count, options, market)
            choices += mine
    fleet.instances = [
        {
            "LaunchTemplateAndOverrides": c.said,
            "Lifecycle": c.market,
            "InstanceIds": list(c.ids),
            "InstanceType": c.order.type,
        }
        for c in choices
        if c.ids and c.order
    ]
    fleet.errors = [
        {
            "LaunchTemplateAndOverrides": c.said,
            "Lifecycle": c.market,
            "ErrorCode": c.error.code,
            "ErrorMessage": c.error.message,
        }
        for c in choices
        if c.error
    ]
    fleet.ids = [i for c in choices for i in c.ids]
    ctx.region.fleets[fleet.id] = fleet
    put_tags(ctx.backend, fleet.id, given.get("fleet", {}))
    remember(ctx, "CreateFleet", p, fleet.id)
    return {"FleetId": fleet.id, "Instances": fleet.instances, "Errors": fleet.errors}


def _uuid() -> str:
    text = secrets.token_hex(16)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _wanted(capacity: dict[str, Any]) -> dict[str, int]:
    total, usual = int(capacity["TotalTargetCapacity"]), capacity.get("DefaultTargetCapacityType", "on-demand")
    wanted = {
        "spot": int(capacity.get("SpotTargetCapacity", 0)),
        "on-demand": int(capacity.get("OnDemandTargetCapacity", 0)),
    }
    wanted[usual if usual in wanted else "on-demand"] += total - sum(wanted.values())
    return wanted


def _check(p: dict[str, Any], spot: dict[str, Any], on_demand: dict[str, Any], wanted: dict[str, int]) -> None:
    if p.get("Type", "maintain") != "instant":
        raise AwsError("UnsupportedOperation", "this fake has fleets of type instant only")
    if spot.get("AllocationStrategy", "lowest-price") not in STRATEGIES:
        raise AwsError("InvalidParameterValue", f"unknown allocation strategy {spot['AllocationStrategy']}")
    if spot.get("InstanceInterruptionBehavior", "terminate") != "terminate":
        raise AwsError(
            "InvalidParameterCombination", "The interruption behavior of an instant fleet can only be terminate"
        )
    for options in (spot, on_demand):
        if options.get("MinTargetCapacity") and not (
            options.get("SingleAvailabilityZone") or options.get("SingleInstanceType")
        ):
            raise AwsError(
                "InvalidParameterCombination", "MinTargetCapacity needs SingleAvailabilityZone or SingleInstanceType"
            )
    if sum(wanted.values()) < 1:
        raise AwsError("InvalidParameterValue", "TotalTargetCapacity must be positive")
    if not p.get("LaunchTemplateConfigs"):
        raise AwsError("MissingParameter", "The request must contain the parameter LaunchTemplateConfigs")
    configs = p["LaunchTemplateConfigs"]
    if sum(max(1, len(c.get("Overrides", []))) for c in configs) > 300:
        raise AwsError("InvalidParameterValue", "The number of overrides exceeds 300")
    seen = set()
    for config in configs:
        for over in config.get("Overrides", []):
            key = (over.get("InstanceType"), over.get("SubnetId"), over.get("AvailabilityZone"))
            if key in seen:
                raise AwsError(
                    "InvalidFleetConfig", f"The fleet configuration contains duplicate instance pools: {key}"
                )
            seen.add(key)


def _choices(ctx: Context, p: dict[str, Any], market: str, given: dict[str, dict[str, str]]) -> list[Choice]:
    found = []
    for config in p["LaunchTemplateConfigs"]:
        spec = config["LaunchTemplateSpecification"]
        known, version = template(ctx, spec)
        base, used = merged(ctx, {"LaunchTemplate": spec})
        if "InstanceMarketOptions" in base:
            raise AwsError("InvalidParameterCombination", "The launch template of a fleet may not have market options")
        for over in config.get("Overrides") or [{}]:
            said = {
                "LaunchTemplateSpecification": {"LaunchTemplateId": known.id, "Version": str(version.number)},
                "Overrides": dict(over),
            }
            choice = Choice(said, market, priority=float(over.get("Priority", "inf")))
            try:
                if ctx.cloud.fleet_throttles:
                    ctx.cloud.fleet_throttles -= 1
                    raise AwsError("RequestLimitExceeded", "Request limit exceeded.")
                choice.order = order(ctx, _override(ctx, base, over, market, given), used, in_fleet=given)
            except AwsError as error:
                choice.error = error
            found.append(choice)
    return found


def _override(
    ctx: Context, base: dict[str, Any], over: dict[str, Any], market: str, given: dict[str, dict[str, str]]
) -> dict[str, Any]:
    p = dict(base)
    if "InstanceType" in over:
        p["InstanceType"] = over["InstanceType"]
    if "ImageId" in over:
        p["ImageId"] = over["ImageId"]
    if "SubnetId" in over:
        if p.get("NetworkInterfaces"):
            p["NetworkInterfaces"] = [{**n, "SubnetId": over["SubnetId"]} for n in p["NetworkInterfaces"]]
        else:
            p["SubnetId"] = over["SubnetId"]
    place = dict(p.get("Placement") or {}) | {k: v for k, v in (over.get("Placement") or {}).items() if v}
    if over.get("AvailabilityZone"):
        place["AvailabilityZone"] = over["AvailabilityZone"]
    p["Placement"] = place
    if market == "spot":
        p["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {"MaxPrice": over["MaxPrice"]} if over.get("MaxPrice") else {},
        }
    more = [
        {"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in own.items()]} for kind, own in given.items()
    ]
    p["TagSpecifications"] = [*p.get("TagSpecifications", []), *more]
    return p


def _fill(ctx: Context, fleet: Fleet, choices: list[Choice], count: int, options: dict[str, Any], market: str) -> None:
    usable = _ranked(ctx, [c for c in choices if c.order], count, options, market)
    if options.get("SingleInstanceType") or options.get("SingleAvailabilityZone"):
        usable = _single(ctx, usable, count, options)
    least = int(options.get("MinTargetCapacity", 0))
    if least and sum(_places(ctx, c, count) for c in usable) < least:
        for choice in choices:
            zone = choice.order.zone if choice.order else ""
            choice.error = choice.error or AwsError(
                SHORT, f"Not enough capacity for MinTargetCapacity {least} in {zone}"
            )
        return
    missing = count
    launched: list[Machine] = []
    for choice in usable:
        if not missing:
            break
        assert choice.order is not None
        try:
            machines = ctx.cloud.life.launch(choice.order, 1, missing, fleet.id)
        except AwsError as error:
            choice.error = error
            continue
        choice.ids = tuple(m.id for m in machines)
        launched += machines
        if len(machines) < missing:
            choice.error = AwsError(
                SHORT,
                f"We currently do not have sufficient {choice.order.type} capacity in the "
                f"Availability Zone you requested ({choice.order.zone}).",
            )
        missing -= len(machines)
    if least and len(launched) < least:  # a quota or addresses were in the way
        for machine in launched:
            ctx.cloud.life.terminate(machine, USER, "User initiated")
        for choice in choices:
            choice.ids = ()


def _places(ctx: Context, choice: Choice, count: int) -> int:
    room = ctx.cloud.market.room(choice.pool)
    return count if room is None else min(room, count)


def _ranked(ctx: Context, choices: list[Choice], count: int, options: dict[str, Any], market: str) -> list[Choice]:
    """The best first. Of as deep a pool as there is, the cheapest: price and room both count."""
    usual = "lowest-price"
    strategy = options.get("AllocationStrategy", usual)

    def price(c: Choice) -> float:
        assert c.order is not None
        if market == "spot":
            return ctx.cloud.market.price(c.order.zone, c.order.type, ctx.now)
        return ctx.cloud.on_demand_usd(c.order.type, ctx.region.name)

    def depth(c: Choice) -> float:
        room = ctx.cloud.market.room(c.pool)
        return -3.0 if room is None else -float(min(3, room // count) if room >= count else room / (count + 1))

    keys = {
        "price-capacity-optimized": lambda c: (depth(c), price(c), c.pool),
        "capacity-optimized": lambda c: (depth(c), c.pool),
        "capacity-optimized-prioritized": lambda c: (depth(c), c.priority, c.pool),
        "prioritized": lambda c: (c.priority, price(c), c.pool),
    }
    named = {"priceCapacityOptimized": "price-capacity-optimized", "capacityOptimized": "capacity-optimized"}
    return sorted(choices, key=keys.get(named.get(strategy, strategy), lambda c: (price(c), c.pool)))


def _single(ctx: Context, ranked: list[Choice], count: int, options: dict[str, Any]) -> list[Choice]:
    """Those of one type and/or zone: of the best that has room for all, or the most room."""
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in ranked:
        zone, kind, _ = choice.pool
        key = (kind if options.get("SingleInstanceType") else "", zone if options.get("SingleAvailabilityZone") else "")
        groups.setdefault(key, []).append(choice)
    order_ = list(groups.values())
    return max(order_, key=lambda g: (min(count, sum(_places(ctx, c, count) for c in g)), -order_.index(g)), default=[])


# ---- describing and deleting


def _fleet_told(ctx: Context, fleet: Fleet) -> dict[str, Any]:
    return {
        "FleetId": fleet.id,
        "FleetState": fleet.state,
        "Type": "instant",
        "CreateTime": when(fleet.born),
        "ActivityStatus": "fulfilled" if fleet.ids else "error",
        "Tags": tags(ctx.backend, fleet.id),
        "FulfilledCapacity": float(len(fleet.ids)),
        "Instances": fleet.instances,
        "Errors": fleet.errors,
        "TargetCapacitySpecification": fleet.parameters["TargetCapacitySpecification"],
        "LaunchTemplateConfigs": fleet.parameters["LaunchTemplateConfigs"],
        "SpotOptions": fleet.parameters.get("SpotOptions", {}),
    }


@operation("ec2:DescribeFleets")
def describe_fleets(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    """Instant fleets appear only if their ids are given."""
    ids = p.get("FleetIds", [])
    missing = [i for i in ids if i not in ctx.region.fleets]
    if missing:
        raise AwsError("InvalidFleetId.NotFound", f"The fleet ID '{missing[0]}' does not exist")
    known = {"fleet-state": lambda f: f.state, "type": lambda f: "instant"}
    found = filtered(
        [ctx.region.fleets[i] for i in ids], p.get("Filters"), known, lambda f: ctx.backend.tags.get(f.id, {})
    )
    some, token = page(found, p)
    return {"Fleets": [_fleet_told(ctx, f) for f in some], "NextToken": token}


@operation("ec2:DescribeFleetInstances")
def describe_fleet_instances(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    fleet = ctx.region.fleets.get(p["FleetId"])
    if fleet is None:
        raise AwsError("InvalidFleetId.NotFound", f"The fleet ID '{p['FleetId']}' does not exist")
    living = [
        told(ctx, ctx.region.machines[i])
        for i in fleet.ids
        if i in ctx.region.machines and ctx.region.machines[i].living
    ]
    return {
        "FleetId": fleet.id,
        "ActiveInstances": [
            {
                "InstanceId": i["InstanceId"],
                "InstanceType": i["InstanceType"],
                "SpotInstanceRequestId": i.get("SpotInstanceRequestId"),
            }
            for i in living
        ],
    }


@operation("ec2:DeleteFleets")
def delete_fleets(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    done, bad = [], []
    for id in p.get("FleetIds", []):
        fleet = ctx.region.fleets.get(id)
        if fleet is None:
            bad.append({"FleetId": id, "Error": {"Code": "fleetIdDoesNotExist", "Message": "The fleet does not exist"}})
            continue
        if not p.get("TerminateInstances"):
            bad.append(
                {
                    "FleetId": id,
                    "Error": {
                        "Code": "unexpectedError",
                        "Message": "NoTerminateInstances is not supported for instant fleets",
                    },
                }
            )
            continue
        for machine in [ctx.region.machines[i] for i in fleet.ids if i in ctx.region.machines]:
            ctx.cloud.life.terminate(machine, USER, "User initiated")
        done.append({"FleetId": id, "PreviousFleetState": fleet.state, "CurrentFleetState": "deleted_terminating"})
        fleet.state = (
            "deleted_terminating"
            if any(m.living for m in (ctx.region.machines.get(i) for i in fleet.ids) if m)
            else "deleted"
        )
    return {"SuccessfulFleetDeletions": done, "UnsuccessfulFleetDeletions": bad}
