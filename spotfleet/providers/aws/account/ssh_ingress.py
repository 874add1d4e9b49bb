"""SSH access to the dispatcher of a fleet: from `aws.ssh_from`, or from the laptop's current address.

Each laptop has its own rule in the fleet's group `door` (see network.py), identified by its description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.providers.aws.account.network import (
    authorize,
    await_group,
    is_fleet_resource,
    named_groups,
    rule_tags,
    site,
)
from spotfleet.providers.aws.mapping import errors, names
from spotfleet.providers.aws.session import Account, AwsClient
from spotfleet.providers.kit import laptop

PORT = 22
SSH_FROM = "spotfleet ssh_from"  # a rule's description names its owner

Progress = Callable[[str], None]


def refresh(account: Account, fleet: str, progress: Progress, tags: Mapping[str, str] | None = None) -> None:
    """Allow SSH from the laptop's current address and remove its old one. Rules of other laptops stay.

    `tags`: given for a fleet that has just been prepared, whose group exists but may not be listed yet.
    """
    spec = account.settings.spec
    if all(site(account, region).groups for region in account.regions):
        return
    wanted = spec.ssh_from or (own_address(public=spec.public_addresses),)
    whose = SSH_FROM if spec.ssh_from else laptop.rule_name()
    for cidr in wanted:
        laptop.refuse_the_world("aws", cidr)
    for region in account.regions:
        here = site(account, region)
        if here.groups:
            continue
        ec2 = account.client("ec2", region)
        door = next((g for g in named_groups(ec2, here.vpc, [names.door(fleet)]) if is_fleet_resource(g, fleet)), None)
        if door is None and tags is None:
            progress(f"security group {names.door(fleet)} is not there; `spotfleet up FILE` makes it anew")
            continue
        door = door or await_group(ec2, fleet, names.door(fleet), here.vpc)
        _let_in(ec2, door, wanted, whose, rule_tags(fleet, tags or {}), progress)


def _let_in(ec2: AwsClient, door: Mapping[str, Any], wanted: Iterable[str], whose: str,
            tagged: list[dict[str, Any]], progress: Progress) -> None:
    """Allow TCP 22 from `wanted`; afterwards remove unwanted rules with this description or of this laptop."""
    there = {(cidr, text) for p in door["IpPermissions"] if p.get("FromPort") == PORT for cidr, text in _cidrs(p)}
    from_there = {cidr for cidr, _ in there}
    for cidr in wanted:
        if cidr not in from_there:
            authorize(ec2, "ingress", door["GroupId"], [_ssh_rule(cidr, whose)], tagged)
            progress(f"SSH to the dispatcher is let in from {cidr}")
    for cidr, text in sorted(there):
        if text in (whose, laptop.rule_name()) and cidr not in wanted:
            try:
                ec2.revoke_security_group_ingress(GroupId=door["GroupId"], IpPermissions=[_ssh_rule(cidr, text)])
            except SpotfleetError as error:
                if errors.code(error) != "InvalidPermission.NotFound":  # another command of ours removed it first
                    raise
            progress(f"SSH to the dispatcher is no longer let in from {cidr}")


def own_address(*, public: bool = True) -> str:
    return laptop.own_address("aws", public=public)


def _cidrs(permission: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(r["CidrIp"], r.get("Description", "")) for r in permission.get("IpRanges", ())] + [
        (r["CidrIpv6"], r.get("Description", "")) for r in permission.get("Ipv6Ranges", ())]


def _ssh_rule(cidr: str, text: str) -> dict[str, Any]:
    where = {"Ipv6Ranges": [{"CidrIpv6": cidr, "Description": text}]} if ":" in cidr else {
        "IpRanges": [{"CidrIp": cidr, "Description": text}]}
    return {"IpProtocol": "tcp", "FromPort": PORT, "ToPort": PORT, **where}
