"""SSH access to the dispatcher of a fleet: from `aws.ssh_from`, or from the laptop's current address.

Each laptop has its own rule in the fleet's group `door` (see network.py), identified by its description.
"""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
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

CHECKIP_URL = "https://checkip.amazonaws.com"  # answers with the caller's address
CHECKIP_S = 10.0
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
    whose = SSH_FROM if spec.ssh_from else _whose()
    for cidr in wanted:
        _refuse_the_world(cidr)
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
    there = {(cidr, text) for p in door["IpPermissions"] if p.get("FromPort") == 22 for cidr, text in _cidrs(p)}
    from_there = {cidr for cidr, _ in there}
    for cidr in wanted:
        if cidr not in from_there:
            authorize(ec2, "ingress", door["GroupId"], [_ssh_rule(cidr, whose)], tagged)
            progress(f"SSH to the dispatcher is let in from {cidr}")
    for cidr, text in sorted(there):
        if text in (whose, _whose()) and cidr not in wanted:
            try:
                ec2.revoke_security_group_ingress(GroupId=door["GroupId"], IpPermissions=[_ssh_rule(cidr, text)])
            except SpotfleetError as error:
                if errors.code(error) != "InvalidPermission.NotFound":  # another command of ours removed it first
                    raise
            progress(f"SSH to the dispatcher is no longer let in from {cidr}")


def own_address(*, public: bool = True) -> str:
    """Return this machine's address on the internet, as a CIDR of one address. Raises NeedsPerson if it is unknown."""
    name_it = "name the networks that you come from under `aws.ssh_from`"
    if not public:
        raise NeedsPerson("`aws.public_addresses: false`, so your address at the dispatcher is unknown",
                          hint=name_it)
    try:
        with urllib.request.urlopen(CHECKIP_URL, timeout=CHECKIP_S) as answer:
            address = ipaddress.ip_address(answer.read(100).decode(errors="replace").strip())
    except (OSError, ValueError) as error:
        raise NeedsPerson(f"{CHECKIP_URL} does not return your address: {error}", hint=name_it) from None
    return f"{address}/{address.max_prefixlen}"


def _whose() -> str:
    """Return the name of this machine, which marks its own rules."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return re.sub(r"[^\w .:/()#,@\[\]+=&;{}!$*-]", "_", f"spotfleet {user}@{socket.gethostname()}", flags=re.A)[:255]


def _refuse_the_world(cidr: str) -> None:
    try:
        prefix = ipaddress.ip_network(cidr).prefixlen
    except ValueError as error:
        raise UsageError(f"aws.ssh_from: {error}", hint="write ADDRESS/BITS, as 198.51.100.0/24") from None
    if prefix == 0:
        raise UsageError(f"aws.ssh_from: {cidr} is the whole world", hint="name the networks that you come from")


def _cidrs(permission: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(r["CidrIp"], r.get("Description", "")) for r in permission.get("IpRanges", ())] + [
        (r["CidrIpv6"], r.get("Description", "")) for r in permission.get("Ipv6Ranges", ())]


def _ssh_rule(cidr: str, text: str) -> dict[str, Any]:
    where = {"Ipv6Ranges": [{"CidrIpv6": cidr, "Description": text}]} if ":" in cidr else {
        "IpRanges": [{"CidrIp": cidr, "Description": text}]}
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, **where}
