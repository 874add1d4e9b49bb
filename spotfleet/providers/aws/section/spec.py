"""Section `aws` as values, and the configuration of provider aws."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotfleet.codec import from_json, to_json
from spotfleet.errors import UsageError


@dataclass(frozen=True)
class AwsNetwork:
    """Network of a fleet's machines in one region.

    Empty fields are looked up (the default VPC, its subnets) or created (security groups).
    """

    region: str
    vpc: str = ""
    subnets: tuple[str, ...] = ()  # one or more per zone; private ones are allowed
    security_groups: tuple[str, ...] = ()  # replace ours: they must allow traffic inside the fleet, and SSH in
    dispatcher_groups: tuple[str, ...] = ()  # more of them for the dispatcher's machine, such as one that lets SSH in


@dataclass(frozen=True)
class AwsSpec:
    """Section `aws` of the fleet file, for provider aws."""

    regions: tuple[str, ...] = ()  # candidates; `up` chooses the cheapest unless `joined`; empty: those of the needs
    joined: bool = False  # the user's promise that the networks of all regions reach each other: use every region
    networks: tuple[AwsNetwork, ...] = ()  # at most one per region
    profile: str = ""  # name in the laptop's AWS configuration; never sent to a machine
    public_addresses: bool = True  # False: private ones only; the laptop needs a VPN, and subnets need a route out
    ssh_from: tuple[str, ...] = ()  # CIDRs that may reach the dispatcher; empty: the laptop's own address
    # for hosts: "spotfleet", "ami-..." or an SSM parameter "/aws/..."; empty: Deep Learning AMI, Ubuntu on CPUs
    image: str = ""
    dispatcher_image: str = ""  # empty: plain Ubuntu
    user: str = "ubuntu"  # login user of the images
    disk_gib: int = 100
    dispatcher_disk_gib: int = 30
    kms_key: str = ""  # encrypts the volumes; empty: the account's default key. Volumes are always encrypted
    key_pair: str = ""  # an EC2 key pair that also gets access
    dispatcher_profile: str = ""  # name of an existing instance profile; empty: created, and removed by `down`
    host_profile: str = ""  # the same; created only if checkpoints go to S3
    event_queue: bool = False  # EventBridge -> SQS, read by the dispatcher, besides the notices that hosts receive
    interruption_queue: str = ""  # name of an existing queue that is read instead
    permissions_boundary: str = ""  # ARN of the policy that bounds the roles that `up` makes
    dispatcher_credentials: str = ""  # a profile on the laptop whose key a dispatcher on another cloud gets
    capacity_reservations: tuple[str, ...] = ()  # ids: used first, before spot and on demand


def parsed(section: Mapping[str, Any]) -> AwsSpec:
    """Return the spec in a `FleetSpec.section`; AwsSpec() for an empty one."""
    return from_json(AwsSpec, dict(section))


def current(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration in today's form. Earlier releases had `section`, then named `aws`, and `environment` as
    JSON text: so they are in fleet.json and boot.json of fleets that those have made."""
    found = dict(config)
    if (older := found.pop("aws", "")) and "section" not in found:
        found["section"] = json.loads(older)
    if isinstance(found.get("environment"), str):
        found["environment"] = json.loads(found["environment"])
    return found


def spec_in(config: Mapping[str, Any]) -> AwsSpec:
    """Return the spec in a configuration. Raises UsageError for one that cannot be read."""
    try:
        return parsed(current(config).get("section") or {})
    except (ValueError, TypeError, KeyError) as error:
        raise unreadable(error) from error


def with_spec(config: Mapping[str, Any], spec: AwsSpec) -> dict[str, Any]:
    """Return the configuration with this spec."""
    return {**current(config), "section": to_json(spec)}


def unreadable(error: Exception) -> UsageError:
    return UsageError(f"provider aws: its configuration cannot be read: {error}",
                      hint="`spotfleet up` writes it anew from the fleet file")
