"""What EC2 is told of machines that are to be: launch template, and the call that uses it. Pure.

The template holds what a machine is (image, disk, network, rights, user data, tags); the call holds where and how it is
sold. Every thing that EC2 makes on the way bears our tags and the user's from its creation.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spotfleet.errors import UsageError
from spotfleet.model import Market, Offer, Role
from spotfleet.providers.aws import names

VERSION = "$Latest"  # a template of ours has one version
MADE = ("instance", "volume", "network-interface")  # by every launch
HOP_LIMIT = 2  # a container on the host reaches the metadata server too
TAG_LENGTH = 256  # of a value


@dataclass(frozen=True)
class Order:
    """Machines that are asked for by one call."""

    host: str  # the HOST tag: `names.together`
    fleet: str
    role: Role
    pools: tuple[Offer, ...]  # the one that was asked for first, then those as good
    behavior: str = "terminate"  # or "stop"
    tags: Mapping[str, str] = field(default_factory=dict)  # the user's
    count: int = 1  # all or none
    until: float = 0.0  # when EC2 forgets a persistent request, whoever has forgotten it before; 0: never

    @property
    def offer(self) -> Offer:
        return self.pools[0]

    @property
    def spot(self) -> bool:
        return self.offer.market is Market.SPOT

    @property
    def lasting(self) -> bool:
        """Does EC2 stop it when it takes it, and start it again?"""
        return self.spot and self.behavior == "stop"

    @property
    def by_fleet(self) -> bool:
        """By CreateFleet, which chooses among pools. It makes neither persistent requests nor all or none."""
        return self.spot and not self.lasting and self.count == 1

    @property
    def dated(self) -> bool:
        """Does EC2 forget its persistent request at a time that we name? The template names it, for whoever asks
        again must ask the same. Without a time a template's request would end after 7 days; that of a call does not."""
        return self.lasting and bool(self.until)

    @property
    def where(self) -> str:
        """For messages."""
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{self.offer.region}/{self.offer.zone} {many}{self.offer.instance_type} {self.offer.market.value}"


@dataclass(frozen=True)
class Facts:
    """What the account has for an order."""

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
    efa_cards: int = 0  # network cards that speak EFA; 0 where it is not wanted


def ours(order: Order, pools: str) -> dict[str, str]:
    """All tags of an order, the user's among them; `pools` says what was asked for (`listing.pools_tag`)."""
    tags = {"Name": order.host, **order.tags, names.FLEET: order.fleet, names.HOST: order.host,
            names.ROLE: order.role.value, names.POOL: pools}
    if len(order.host) > TAG_LENGTH:
        raise UsageError(f"{order.count} hosts at once: their names have {len(order.host)} characters together, a tag "
                         f"takes {TAG_LENGTH}", hint="fewer nodes, or all_or_nothing: false")
    return {key: value[:TAG_LENGTH] if key == "Name" else value for key, value in tags.items()}


def name(host: str) -> str:
    """Of the template behind a HOST tag: a gang's is named by its first host and the number of the others."""
    ids = names.members(host)
    return names.template(host if len(ids) == 1 else f"{ids[0]}.and.{len(ids) - 1}")


def template(order: Order, facts: Facts, tags: Mapping[str, str], user_data: bytes) -> dict[str, Any]:
    """CreateLaunchTemplate."""
    return {"LaunchTemplateName": name(order.host),
            "LaunchTemplateData": _data(order, facts, tags, user_data),
            "TagSpecifications": [_tagged("launch-template", tags)]}


def fleet(order: Order, facts: Facts, tags: Mapping[str, str], token: str) -> dict[str, Any]:
    """CreateFleet: one host in the pool that EC2 likes best. A zone is named by one subnet: EC2 takes no pool twice."""
    overrides = [{"InstanceType": o.instance_type, "SubnetId": facts.subnets[o.zone][0]} for o in order.pools]
    return {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": _uses(order), "Overrides": overrides}],
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        "TagSpecifications": [_tagged(kind, tags) for kind in ("fleet", *MADE)],  # its rights depend on the call's
    }


def instances(order: Order, facts: Facts, subnet: str, token: str) -> dict[str, Any]:
    """RunInstances: `order.count` hosts in one pool, or none."""
    return {
        "ClientToken": token,
        "LaunchTemplate": _uses(order),
        "InstanceType": order.offer.instance_type,
        "MinCount": order.count,
        "MaxCount": order.count,
        "NetworkInterfaces": _interfaces(facts, subnet),
        **({"InstanceMarketOptions": _market(order)} if order.spot and not order.dated else {}),
    }


def burstable(offer: Offer) -> bool:
    """A T type, whose CPU may be used above its share, for a price of its own: t3.small, not trn1.2xlarge."""
    return re.match(r"t\d", offer.instance_type) is not None


def _uses(order: Order) -> dict[str, str]:
    return {"LaunchTemplateName": name(order.host), "Version": VERSION}


def _data(order: Order, facts: Facts, tags: Mapping[str, str], user_data: bytes) -> dict[str, Any]:
    volume: dict[str, Any] = {"VolumeSize": facts.disk_gib, "VolumeType": "gp3", "Encrypted": True,
                              "DeleteOnTermination": True}
    if facts.kms_key:
        volume["KmsKeyId"] = facts.kms_key
    kinds = [*MADE]
    if order.spot:  # EC2 refuses the launch where there is none to be tagged
        kinds.append("spot-instances-request")
    data: dict[str, Any] = {
        "ImageId": facts.image,
        "BlockDeviceMappings": [{"DeviceName": facts.root_device, "Ebs": volume}],
        "MetadataOptions": {"HttpEndpoint": "enabled", "HttpTokens": "required",
                            "HttpPutResponseHopLimit": HOP_LIMIT, "InstanceMetadataTags": "enabled"},
        # A host that powers itself off is gone. A terminated one of a persistent request would be launched anew.
        "InstanceInitiatedShutdownBehavior": "stop" if order.lasting else "terminate",
        "UserData": base64.b64encode(user_data).decode(),
        "TagSpecifications": [_tagged(kind, tags) for kind in kinds],
    }
    if order.by_fleet:
        data["NetworkInterfaces"] = _interfaces(facts, "")  # its subnet is chosen with the pool
    elif order.dated:
        data["InstanceMarketOptions"] = _market(order)
    if all(burstable(o) for o in order.pools):  # it is refused for others
        # Training would use up credits all the time, and they cost beside the price that we say. A dispatcher installs
        # itself once and then is idle: without credits that takes minutes.
        data["CreditSpecification"] = {"CpuCredits": "standard" if order.role is Role.WORKER else "unlimited"}
    if facts.profile:
        data["IamInstanceProfile"] = {"Arn" if facts.profile.startswith("arn:") else "Name": facts.profile}
    if facts.key_pair:
        data["KeyName"] = facts.key_pair
    if facts.placement_group:
        data["Placement"] = {"GroupName": facts.placement_group}
    return data


def _interfaces(facts: Facts, subnet: str) -> list[dict[str, Any]]:
    """One, or one per network card for EFA. EC2 gives a public address only where there is one."""
    first: dict[str, Any] = {"DeviceIndex": 0, "Groups": list(facts.groups), "DeleteOnTermination": True}
    if facts.efa_cards:
        first |= {"InterfaceType": "efa", "NetworkCardIndex": 0}
    if facts.efa_cards <= 1:
        first["AssociatePublicIpAddress"] = facts.public_address
    more = [{"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa-only", "Groups": list(facts.groups),
             "DeleteOnTermination": True} for card in range(1, facts.efa_cards)]
    return [interface | ({"SubnetId": subnet} if subnet else {}) for interface in (first, *more)]


def _market(order: Order) -> dict[str, Any]:
    """No MaxPrice: we compare prices ourselves, and a limit makes EC2 take hosts when the price moves."""
    kind: dict[str, Any] = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    if order.lasting:
        kind = {"SpotInstanceType": "persistent", "InstanceInterruptionBehavior": "stop"}
        if order.dated:
            kind["ValidUntil"] = int(order.until)
    return {"MarketType": "spot", "SpotOptions": kind}


def _tagged(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": k, "Value": v} for k, v in sorted(tags.items())]}
