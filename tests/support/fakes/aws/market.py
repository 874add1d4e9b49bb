"""Quotas as EC2 counts them, over the kit's room and prices, and capacity reservations.

The room of a reservation is that of a pool of its own, (zone, type, id). An instance that names no reservation runs in
an open one that matches, if that has room, as EC2 does by default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.catalog import TYPES
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.operations import Context, filtered, operation, page
from tests.support.fakes.aws.state import Order, RegionState, when
from tests.support.fakes.kit.market import Pools

EXCEEDED = "The requested reservation does not have sufficient compatible and available capacity for this request."


class Market(Pools):
    def __init__(self, begin: float) -> None:
        super().__init__(begin, _first_usd, catalog.ENDLESS_QUOTA)
        self.unapplied: set[tuple[str, str]] = set()  # (family, market) of quotas for which AWS lists the default only

    @staticmethod
    def usage(state: RegionState, family: str, market: str) -> int:
        """vCPUs: of spot also those that open requests would take."""

        def counts(kind: str) -> bool:
            return TYPES[kind].family == family

        used = sum(
            m.vcpus
            for m in state.machines.values()
            if m.market == market
            and not m.order.reservation
            and counts(m.order.type)
            and m.state in ("pending", "running", "stopping", "shutting-down")
        )
        if market == "spot":
            used += sum(
                TYPES[r.order.type].vcpus for r in state.requests.values() if r.state == "open" and counts(r.order.type)
            )
        return used

    def within_quota(self, state: RegionState, kind: str, market: str, count: int, without: Iterable[str] = ()) -> None:
        """AwsError if `count` more of `kind` are too many; requests `without` are not counted."""
        family = TYPES[kind].family
        left = self.quota(state.name, family, market) - self.usage(state, family, market)
        left += sum(
            TYPES[r.order.type].vcpus
            for r in state.requests.values()
            if r.id in without and r.state == "open" and TYPES[r.order.type].family == family
        )
        if TYPES[kind].vcpus * count <= left:
            return
        if market == "spot":
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise AwsError(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of "
            f"{self.quota(state.name, family, market)} allows for the instance bucket that the specified "
            "instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request "
            "an adjustment to this limit.",
        )


def _first_usd(zone: str, kind: str) -> float:
    return round(catalog.on_demand_usd(kind, catalog.region_of(zone)) * catalog.SPOT_SHARE[zone[-1]], 4)


# ---- reservations


@dataclass
class CapacityReservation:
    id: str
    zone: str
    type: str
    total: int
    open: bool = False  # else targeted
    block: bool = False
    state: str = "active"
    platform: str = "Linux/UNIX"
    ends_at: float | None = None
    placement_group: str = ""  # ARN

    @property
    def pool(self) -> tuple[str, str, str]:
        return self.zone, self.type, self.id


def targeted(ctx: Context, p: dict[str, Any], kind: str, zone: str, market: str) -> dict[str, Any]:
    """Fields of an `Order` for the reservation that a launch names. Raises what EC2 would."""
    block = (p.get("InstanceMarketOptions") or {}).get("MarketType") == "capacity-block"
    named = ((p.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}).get(
        "CapacityReservationId", "")  # fmt: skip
    if not named:
        if block:
            raise AwsError("InvalidParameterCombination", "A capacity block is launched by the id of its reservation")
        return {}
    found = ctx.cloud.reservations.get(named)
    if found is None or catalog.region_of(found.zone) != ctx.region.name:
        raise AwsError("InvalidCapacityReservationId.NotFound", f"The capacity reservation '{named}' does not exist")
    if market == "spot":
        raise AwsError("InvalidParameterCombination", "A spot instance runs in no capacity reservation")
    if block != found.block:
        raise AwsError("InvalidParameterCombination", f"MarketType does not fit the type of reservation {named}")
    if (found.type, found.zone) != (kind, zone):
        raise AwsError("InvalidParameterValue", f"The attributes of the instance do not match those of {named}")
    if found.placement_group or p.get("Placement", {}).get("GroupName"):
        raise AwsError("InvalidParameterCombination", f"{named} and the launch are not of one placement group")
    if found.state != "active":
        raise AwsError("ReservationCapacityExceeded", EXCEEDED)
    return {"reservation": named, "targeted": True, "block": found.block}


def opened(ctx: Context, order: Order, count: int) -> Order:
    """The order of an on-demand launch that names no reservation, in an open one that has room for all."""
    if order.market != "on-demand" or order.reservation:
        return order
    for one in ctx.cloud.reservations.values():
        fits = one.open and one.state == "active" and one.pool[:2] == (order.zone, order.type)
        if fits and (ctx.cloud.market.room(one.pool) or 0) >= count:
            return replace(order, reservation=one.id)
    return order


@operation("ec2:DescribeCapacityReservations")
def describe_capacity_reservations(ctx: Context, p: dict[str, Any]) -> dict[str, Any]:
    found = [r for r in ctx.cloud.reservations.values() if catalog.region_of(r.zone) == ctx.region.name]
    if wanted := p.get("CapacityReservationIds"):
        if missing := [r for r in wanted if r not in {one.id for one in found}]:
            raise AwsError(
                "InvalidCapacityReservationId.NotFound", f"The capacity reservation '{missing[0]}' does not exist"
            )
        found = [r for r in found if r.id in wanted]
    found = filtered(found, p.get("Filters"), {"state": lambda r: r.state, "instance-type": lambda r: r.type},
                     lambda r: {})  # fmt: skip
    some, token = page(found, p)
    return {"CapacityReservations": [_told(ctx, r) for r in some], "NextToken": token}


def _told(ctx: Context, one: CapacityReservation) -> dict[str, Any]:
    said = {
        "CapacityReservationId": one.id,
        "OwnerId": catalog.ACCOUNT,
        "CapacityReservationArn": f"arn:aws:ec2:{ctx.region.name}:{catalog.ACCOUNT}:capacity-reservation/{one.id}",
        "InstanceType": one.type,
        "InstancePlatform": one.platform,
        "AvailabilityZone": one.zone,
        "Tenancy": "default",
        "TotalInstanceCount": one.total,
        "AvailableInstanceCount": ctx.cloud.market.room(one.pool) or 0,
        "State": one.state,
        "EndDateType": "limited" if one.ends_at else "unlimited",
        "InstanceMatchCriteria": "open" if one.open else "targeted",
        "ReservationType": "capacity-block" if one.block else "default",
    }
    if one.ends_at:
        said["EndDate"] = when(one.ends_at)
    if one.placement_group:
        said["PlacementGroupArn"] = one.placement_group
    return said
