"""Who may enter the dispatcher of a fleet over SSH: `aws.ssh_from`, or the laptop from where it is now.

Each laptop has a rule of its own in the fleet's group `door`, known by its description.
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
from spotfleet.providers.aws import errors, names
from spotfleet.providers.aws.network import authorize, await_group, named_groups, ours, rule_tags, site
from spotfleet.providers.aws.session import Account, Client

CHECKIP_URL = "https://checkip.amazonaws.com"  # answers with the address it was asked from
CHECKIP_S = 10.0
SSH_FROM = "spotfleet ssh_from"  # rules' descriptions say whose they are

Tell = Callable[[str], None]


def refresh(account: Account, fleet: str, tell: Tell, tags: Mapping[str, str] | None = None) -> None:
    """Let the laptop in from where it is now, and no longer from where it was. Other laptops' rules stay.

    `tags`: of a fleet that has just been prepared, so that its group is there though it may not be listed yet.
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
        door = next((g for g in named_groups(ec2, here.vpc, [names.door(fleet)]) if ours(g, fleet)), None)
        if door is None and tags is None:
            tell(f"security group {names.door(fleet)} is not there; `spotfleet up FILE` makes it anew")
            continue
        door = door or await_group(ec2, fleet, names.door(fleet), here.vpc)
        _let_in(ec2, door, wanted, whose, rule_tags(fleet, tags or {}), tell)


def _let_in(ec2: Client, door: Mapping[str, Any], wanted: Iterable[str], whose: str,
            tagged: list[dict[str, Any]], tell: Tell) -> None:
    """TCP 22 from `wanted`; rules with the same description, or this laptop's, that are not wanted go, after the new
    ones are there."""
    there = {(cidr, text) for p in door["IpPermissions"] if p.get("FromPort") == 22 for cidr, text in _cidrs(p)}
    from_there = {cidr for cidr, _ in there}
    for cidr in wanted:
        if cidr not in from_there:
            authorize(ec2, "ingress", door["GroupId"], [_ssh_rule(cidr, whose)], tagged)
            tell(f"SSH to the dispatcher is let in from {cidr}")
    for cidr, text in sorted(there):
        if text in (whose, _whose()) and cidr not in wanted:
            try:
                ec2.revoke_security_group_ingress(GroupId=door["GroupId"], IpPermissions=[_ssh_rule(cidr, text)])
            except SpotfleetError as error:
                if errors.code(error) != "InvalidPermission.NotFound":  # another command of ours was first
                    raise
            tell(f"SSH to the dispatcher is no longer let in from {cidr}")


def own_address(*, public: bool = True) -> str:
    """From where the internet sees this machine, as a CIDR of one address. Raises NeedsPerson where that is unknown."""
    name_it = "name the networks that you come from under `aws.ssh_from`"
    if not public:
        raise NeedsPerson("`aws.public_addresses: false`, so nobody knows from where you come to the dispatcher",
                          hint=name_it)
    try:
        with urllib.request.urlopen(CHECKIP_URL, timeout=CHECKIP_S) as answer:
            address = ipaddress.ip_address(answer.read(100).decode(errors="replace").strip())
    except (OSError, ValueError) as error:
        raise NeedsPerson(f"{CHECKIP_URL} does not say from which address you come: {error}", hint=name_it) from None
    return f"{address}/{address.max_prefixlen}"


def _whose() -> str:
    """This machine, so that another laptop's rule is not taken for ours."""
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
