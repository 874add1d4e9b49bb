"""Capacity reservations that the fleet file names, as offers that are used first.

    default          On-Demand Capacity Reservation: EC2 bills its instances and its unused rest, at the on-demand rate
    capacity-block   Capacity Block for ML: paid in advance; EC2 ends its instances from 30 minutes before its end

A launch targets one reservation. It fails when that has no room, and never becomes an ordinary on-demand launch.
Sources: EC2 User Guide, "Capacity Reservation pricing and billing", "Launch instances into an existing Capacity
Reservation", "Work with Capacity Blocks"; EC2 API Reference, CapacityReservation, CapacityReservationSpecification.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.matching import matches
from spotfleet.model import Market, Need, Offer
from spotfleet.providers import Finding
from spotfleet.providers.aws import prices
from spotfleet.providers.aws import types as instance_types
from spotfleet.providers.aws.account import network
from spotfleet.providers.aws.mapping.names import BLOCK
from spotfleet.providers.aws.session import Account
from spotfleet.words import instant

log = logging.getLogger(__name__)
LISTED_S = 5.0  # the number of free places changes with each launch
BLOCK_ENDS_S = 1800.0  # EC2 ends the instances of a block so long before the end of the block
LEAST_S = 900.0  # a host that is launched later in a block would hardly train
PLATFORMS = ("Linux/UNIX",)


@dataclass(frozen=True)
class Reservation:
    """A capacity reservation as EC2 describes it."""

    id: str
    zone: str
    instance_type: str
    total: int
    free: int
    state: str
    block: bool
    ends_at: float | None  # None: until it is cancelled
    unusable: str = ""  # why our hosts cannot run there

    @property
    def reserved(self) -> str:
        return f"{BLOCK if self.block else ''}{self.id}"

    def takes(self, now: float) -> bool:
        """Return whether a host may be launched there now."""
        closes_at = None if self.ends_at is None else self.ends_at - (BLOCK_ENDS_S if self.block else 0.0)
        return (self.state == "active" and self.free > 0 and not self.unusable
                and (closes_at is None or closes_at - now >= LEAST_S))


def named(account: Account, region: str) -> tuple[Reservation, ...]:
    """Return the named reservations that are in this region, in the order of the fleet file. Raises SpotfleetError.

    All of the account are listed: a request for the ids fails as a whole if one is in another region.
    """
    wanted = account.settings.spec.capacity_reservations
    if not wanted:
        return ()
    found = account.cached(("reservations", region), LISTED_S, lambda: {
        r["CapacityReservationId"]: _reservation(r) for r in account.client("ec2", region).pages(
            "describe_capacity_reservations", "CapacityReservations")})
    return tuple(found[name] for name in wanted if name in found)


def _reservation(described: Mapping[str, Any]) -> Reservation:
    ends, reasons = described.get("EndDate"), []
    if described.get("InstancePlatform") not in PLATFORMS:
        reasons.append(f"it is for {described.get('InstancePlatform')}, and hosts run Linux")
    if described.get("Tenancy", "default") != "default":
        reasons.append(f"its tenancy is {described['Tenancy']}")
    if described.get("PlacementGroupArn"):
        reasons.append(f"it belongs to the placement group {described['PlacementGroupArn']}")
    return Reservation(
        described["CapacityReservationId"], described.get("AvailabilityZone", ""), described.get("InstanceType", ""),
        int(described.get("TotalInstanceCount") or 0), int(described.get("AvailableInstanceCount") or 0),
        described.get("State", ""), described.get("ReservationType") == "capacity-block",
        float(ends.timestamp()) if ends else None,
        "; ".join(reasons))


def offers(account: Account, region: str, need: Need) -> list[Offer]:
    """Return an offer for each named reservation that fits `need` and has room. A need that names neither type nor GPUs
    takes none: it may be the dispatcher's."""
    if not (need.instance_type or need.accelerator or need.accelerator_count):
        return []
    try:
        usable = [r for r in named(account, region) if r.takes(time.time())]
        places = network.zones(account, region) if usable else frozenset()
        facts = instance_types.facts(account, region, sorted({r.instance_type for r in usable})) if usable else {}
        regular = prices.on_demand(account, sorted(facts), [region]).micros_h if facts else {}
    except SpotfleetError as error:
        log.warning("aws %s: the capacity reservations cannot be listed, others are used: %s", region, error)
        return []
    found = []
    for one in usable:
        known = facts.get(one.instance_type)
        if known is None or one.zone not in places or not known.x86_64 or not (
                known.driven or account.settings.spec.image):
            continue
        price = 0 if one.block else regular.get((region, one.instance_type), 0)
        offer = Offer("aws", region, one.zone, one.instance_type, Market.SPOT if need.use_spot else Market.ON_DEMAND,
                      known.slots, price, price, known.accelerator, room=one.free, reserved=one.reserved)
        if (price or one.block) and matches(need, offer):
            found.append(offer)
    return found


def findings(account: Account, needs: Sequence[Need]) -> Iterator[Finding]:
    """Yield what there is of each named reservation, and what it costs."""
    found = {one.id: (region, one) for region in account.regions for one in named(account, region)}
    for name in account.settings.spec.capacity_reservations:
        if name not in found:
            yield Finding(f"{name} is in none of {', '.join(account.regions)}, or is not yours", "blocker",
                          "correct `aws.capacity_reservation`, or name its region under `aws.regions`")
            continue
        region, one = found[name]
        text = f"{one.id}: {one.free} of {one.total} {one.instance_type} in {one.zone} are free"
        if one.unusable or one.state != "active":
            yield Finding(f"{text}; no host is launched there: {one.unusable or f'it is {one.state}'}", "warning",
                          "leave it out, or name another; hosts are of the market meanwhile")
        elif one.free and needs and not any(o.reserved == one.reserved for n in needs
                                            for o in offers(account, region, n)):
            yield Finding(f"{text}; no entry of `resources` takes it", "warning",
                          f"name instance_type: {one.instance_type} under `resources`")
        else:
            yield Finding(f"{text}, and used first; {_cost(account, region, one)}")


def _cost(account: Account, region: str, one: Reservation) -> str:
    if one.block:
        ends = f"; EC2 ends its hosts from {instant(one.ends_at - BLOCK_ENDS_S)} UTC on" if one.ends_at else ""
        return f"it was paid in advance, which `cost` does not count{ends}"
    price = prices.on_demand(account, [one.instance_type], [region]).micros_h.get((region, one.instance_type), 0)
    each = f"${price / 1e6:.4f}/h" if price else "the on-demand price"
    unused = f": the {one.free} unused cost ${one.free * price / 1e6:.4f}/h, which `cost` does not count"
    return f"each costs {each} whether it is used or not{unused if price else ''}"
