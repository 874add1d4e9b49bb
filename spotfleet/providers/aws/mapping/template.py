"""Launch templates and the calls that use them. Pure.

The template holds the machine (image, disk, network, rights, user data, tags); the call holds its place and
market. Every resource that EC2 creates for it carries our tags and the user's from its creation.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.model import Market, Offer, Role
from spotfleet.providers.aws.mapping import names

VERSION = "$Latest"  # our templates have one version
MADE = ("instance", "volume", "network-interface")  # by every launch
# The host alone reaches the metadata server, and containers that share its network, as those of training do. Others get
# no credentials of its role.
HOP_LIMIT = 1
METADATA = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": HOP_LIMIT,
            "InstanceMetadataTags": "enabled"}
VOLUME = {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
TAG_LENGTH = 256  # maximum of a value


@dataclass(frozen=True)
class LaunchOrder:
    """Machines of one launch call."""

    host: str  # the HOST tag: `names.together`
    fleet: str
    role: Role
    pools: tuple[Offer, ...]  # the first choice, then equal ones
    behavior: str = "terminate"  # or "stop"
    tags: Mapping[str, str] = field(default_factory=dict)  # the user's
    count: int = 1  # all or none
    until: float = 0.0  # time at which EC2 drops a persistent request without a call from us; 0: never

    @property
    def offer(self) -> Offer:
        return self.pools[0]

    @property
    def spot(self) -> bool:
        return self.offer.sold == Market.SPOT.value

    @property
    def lasting(self) -> bool:
        """Return whether EC2 stops it when it takes it, and starts it again."""
        return self.spot and self.behavior == "stop"

    @property
    def by_fleet(self) -> bool:
        """Return whether CreateFleet makes it, which chooses among pools but makes no persistent requests or gangs."""
        return self.spot and not self.lasting and self.count == 1

    @property
    def dated(self) -> bool:
        """Return whether its persistent request ends at a time of ours.

        The time stands in the template, so that a retry sends the same request. Without a time, a template's request
        would end after 7 days; a request in the call does not.
        """
        return self.lasting and bool(self.until)

    @property
    def where(self) -> str:
        """Return place, type and market, for messages."""
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{self.offer.region}/{self.offer.zone} {many}{self.offer.instance_type} {self.offer.sold}"


@dataclass(frozen=True)
class Facts:
    """The account's resources for an order."""

    image: str
    root_device: str
    disk_gib: int
    subnets: Mapping[str, tuple[str, ...]]  # zone -> ids, the best first
    groups: tuple[str, ...]
    public_address: bool = True
    profile: str = ""  # name or ARN
    key_pair: str = ""
    kms_key: str = ""
    placement_group: str = ""
    efa_cards: tuple[int, ...] = ()  # network cards that get an EFA interface; () if it is not used


def order_tags(order: LaunchOrder, pools: str) -> dict[str, str]:
    """Return all tags of an order, the user's among them; `pools` is `listing.pools_tag` of the request."""
    tags = {"Name": order.host, **order.tags, names.FLEET: order.fleet, names.HOST: order.host,
            names.ROLE: order.role.value, names.POOL: pools}
    if len(order.host) > TAG_LENGTH:
        raise UsageError(f"{order.count} hosts at once: their names have {len(order.host)} characters together, a tag "
                         f"takes {TAG_LENGTH}", hint="fewer nodes, or all_or_nothing: false")
    return {key: value[:TAG_LENGTH] if key == "Name" else value for key, value in tags.items()}


def name(host: str) -> str:
    """Return the name of the template for a HOST tag: a gang's holds its first host and the number of the others."""
    ids = names.members(host)
    return names.template(host if len(ids) == 1 else f"{ids[0]}.and.{len(ids) - 1}")


def template(order: LaunchOrder, facts: Facts, tags: Mapping[str, str], user_data: bytes) -> dict[str, Any]:
    """Return the parameters of CreateLaunchTemplate."""
    return {"LaunchTemplateName": name(order.host),
            "LaunchTemplateData": _data(order, facts, tags, user_data),
            "TagSpecifications": [_tagged("launch-template", tags)]}


def fleet(order: LaunchOrder, facts: Facts, tags: Mapping[str, str], token: str) -> dict[str, Any]:
    """Return the parameters of CreateFleet: one host in the pool that EC2 prefers.

    Each zone is represented by one subnet, since EC2 accepts a pool only once.
    """
    overrides = [{"InstanceType": o.instance_type, "SubnetId": facts.subnets[o.zone][0]} for o in order.pools]
    return {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": _uses(order), "Overrides": overrides}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        "TagSpecifications": [_tagged(kind, tags) for kind in ("fleet", *MADE)],  # its rights depend on the call's
    }


def instances(order: LaunchOrder, facts: Facts, subnet: str, token: str) -> dict[str, Any]:
    """Return the parameters of RunInstances: `order.count` hosts in one pool, or none."""
    return {
        "ClientToken": token,
        "LaunchTemplate": _uses(order),
        "InstanceType": order.offer.instance_type,
        "MinCount": order.count,
        "MaxCount": order.count,
        "NetworkInterfaces": _interfaces(facts, subnet),
        **({"InstanceMarketOptions": _market(order)} if order.spot and not order.dated else {}),
        **_reserved(order),
    }


def inline(order: LaunchOrder, facts: Facts, tags: Mapping[str, str], subnet: str) -> dict[str, Any]:
    """Return the parameters of RunInstances for an on-demand order without template and user data, for DryRun."""
    data = _data(order, facts, tags, b"")
    del data["UserData"]
    return {**data, "InstanceType": order.offer.instance_type, "MinCount": order.count, "MaxCount": order.count,
            "NetworkInterfaces": _interfaces(facts, subnet)}


def burstable(offer: Offer) -> bool:
    """Return whether it is a T type, with CPU credits at an extra price: t3.small, not trn1.2xlarge."""
    return re.match(r"t\d", offer.instance_type) is not None


def _uses(order: LaunchOrder) -> dict[str, str]:
    return {"LaunchTemplateName": name(order.host), "Version": VERSION}


def _data(order: LaunchOrder, facts: Facts, tags: Mapping[str, str], user_data: bytes) -> dict[str, Any]:
    volume: dict[str, Any] = {"VolumeSize": facts.disk_gib, **VOLUME}
    if facts.kms_key:
        volume["KmsKeyId"] = facts.kms_key
    kinds = [*MADE]
    if order.spot:  # EC2 refuses the tag in a launch without one
        kinds.append("spot-instances-request")
    data: dict[str, Any] = {
        "ImageId": facts.image,
        "BlockDeviceMappings": [{"DeviceName": facts.root_device, "Ebs": volume}],
        "MetadataOptions": METADATA,
        # A host that powers itself off is gone. With a persistent request, EC2 would relaunch a terminated one.
        "InstanceInitiatedShutdownBehavior": "stop" if order.lasting else "terminate",
        "UserData": base64.b64encode(user_data).decode(),
        "TagSpecifications": [_tagged(kind, tags) for kind in kinds],
    }
    if order.by_fleet:
        data["NetworkInterfaces"] = _interfaces(facts, "")  # its subnet is chosen with the pool
    elif order.dated:
        data["InstanceMarketOptions"] = _market(order)
    if all(burstable(o) for o in order.pools):  # refused for other types
        # Training would use up credits all the time, at a cost beyond our listed price. A dispatcher installs
        # itself once and is idle afterwards: without credits that takes minutes.
        data["CreditSpecification"] = {"CpuCredits": "standard" if order.role is Role.WORKER else "unlimited"}
    if facts.profile:
        data["IamInstanceProfile"] = {"Arn" if facts.profile.startswith("arn:") else "Name": facts.profile}
    if facts.key_pair:
        data["KeyName"] = facts.key_pair
    if facts.placement_group:
        data["Placement"] = {"GroupName": facts.placement_group}
    return data


def _interfaces(facts: Facts, subnet: str) -> list[dict[str, Any]]:
    """Return the primary interface and one for each other network card with EFA.

    The primary one is on card 0, and carries EFA where that card does. EC2 gives a public address only to a single
    interface.
    """
    first: dict[str, Any] = {"DeviceIndex": 0, "Groups": list(facts.groups), "DeleteOnTermination": True}
    if facts.efa_cards:
        first["NetworkCardIndex"] = 0
    if 0 in facts.efa_cards:
        first["InterfaceType"] = "efa"
    more = [{"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa-only", "Groups": list(facts.groups),
             "DeleteOnTermination": True} for card in facts.efa_cards if card]
    if not more:
        first["AssociatePublicIpAddress"] = facts.public_address
    return [interface | ({"SubnetId": subnet} if subnet else {}) for interface in (first, *more)]


def _market(order: LaunchOrder) -> dict[str, Any]:
    """Return the market options, without MaxPrice: we compare prices; a limit would make EC2 take hosts on changes."""
    kind: dict[str, Any] = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if order.lasting:
        kind = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
        if order.dated:
            kind["ValidUntil"] = int(order.until)
    return {"MarketType": "spot", "SpotOptions": kind}


def _reserved(order: LaunchOrder) -> dict[str, Any]:
    """Return the reservation that the launch targets. EC2 then makes no ordinary on-demand instance in its place."""
    reserved = order.offer.reserved
    if not reserved:
        return {}
    target = {"CapacityReservationTarget": {"CapacityReservationId": reserved.removeprefix(names.BLOCK)}}
    block = {"InstanceMarketOptions": {"MarketType": "capacity-block"}} if reserved.startswith(names.BLOCK) else {}
    return {"CapacityReservationSpecification": target, **block}


def _tagged(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in sorted(tags.items())]}
