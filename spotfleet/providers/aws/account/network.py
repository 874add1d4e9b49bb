"""Network of a fleet in a region: VPC, subnets, security groups, placement groups.

Named ones are used and never changed. Without names: the default VPC and its subnets, and two groups of ours:

    group   every machine of the fleet: all traffic among them, in and out, as EFA needs it; and out to anywhere
    door    the dispatcher only: lets SSH in (the name of the resource); see ssh_ingress.py

`prepare` runs on the laptop. Everything else only reads: the dispatcher may not create any of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError
from spotfleet.model import Role
from spotfleet.providers.aws.mapping import errors, names
from spotfleet.providers.aws.section.spec import AwsNetwork
from spotfleet.providers.aws.session import Account, AwsClient

SITE_S = 60.0  # subnets hardly change; a person may be creating a missing one
FULL_S = 900.0  # a full subnet, if there is another: EC2 updates the number of free addresses late
LISTED_S = 60.0  # for a new resource to be listed
POLL_S = 0.5
NO_GROUP = ("InvalidGroup.NotFound", "InvalidSecurityGroupID.NotFound")  # EC2 has both codes for a group it lacks
GROUP_TEXT = "machines of a spotfleet fleet reach each other"
DOOR_TEXT = "SSH to the dispatcher of a spotfleet fleet"

PUBLIC, OTHER = "internet gateway", "other"  # the first serves public addresses only; a NAT is of the second kind

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Subnet:
    id: str
    zone: str
    free: int  # addresses
    way: str = ""  # the kind of its default route: PUBLIC, OTHER, or "" for none


@dataclass(frozen=True)
class FleetNetwork:
    """A fleet's network in one region."""

    vpc: str
    subnets: tuple[Subnet, ...]
    groups: tuple[str, ...] = ()  # named ones; empty: ours
    dispatcher_groups: tuple[str, ...] = ()  # more named ones, for the dispatcher

    def of(self, zone: str) -> tuple[Subnet, ...]:
        """Return the subnets of `zone`, the one with most free addresses first."""
        return tuple(sorted((s for s in self.subnets if s.zone == zone), key=lambda s: (-s.free, s.id)))


# ---- reading


def zones(account: Account, region: str) -> frozenset[str]:
    """Return the zones for launches; none if the region has no network for them."""
    found = _site(account, region)
    return frozenset() if isinstance(found, SpotfleetError) else frozenset(s.zone for s in found.subnets)


def site(account: Account, region: str) -> FleetNetwork:
    """Return the network of the region. Raises NeedsPerson if a person must create or name a part of it."""
    found = _site(account, region)
    if isinstance(found, SpotfleetError):
        raise found
    return found


def subnets(account: Account, region: str, zone: str) -> tuple[str, ...]:
    """Return the subnets of `zone`, most free addresses first, recently full ones last. Raises NoCapacity for none."""
    here = site(account, region)
    if not (found := here.of(zone)):
        raise NoCapacity(f"aws {zone}: {here.vpc} has no subnet there", hint="name one under `aws.networks`")
    full = account.recent(("full", region)) or frozenset()
    return tuple(sorted((s.id for s in found), key=lambda id: id in full))


def deprioritize(account: Account, region: str, subnet: str) -> None:
    """Put the subnet last for a while: it had no free address."""
    full = (account.recent(("full", region)) or frozenset()) | {subnet}
    account.forget(("full", region))
    account.cached(("full", region), FULL_S, lambda: full)


def groups(account: Account, region: str, fleet: str, role: Role) -> tuple[str, ...]:
    """Return the security groups of a machine: the named ones, or ours. Raises NeedsPerson if ours do not exist."""
    here = site(account, region)
    if here.groups:
        return here.groups + (here.dispatcher_groups if role is Role.DISPATCHER else ())
    wanted = [names.group(fleet)] + ([names.door(fleet)] if role is Role.DISPATCHER else [])

    def ask() -> tuple[str, ...]:
        found = named_groups(account.client("ec2", region), here.vpc, wanted)
        ids = {g["GroupName"]: g["GroupId"] for g in found if is_fleet_resource(g, fleet)}
        if missing := [name for name in wanted if name not in ids]:
            raise NeedsPerson(f"aws {region}: security group {missing[0]} is not there",
                              hint="`spotfleet up FILE` makes it anew")
        return tuple(ids[name] for name in wanted)

    return account.cached(("groups", region, fleet, role), SITE_S, ask)


def placement_group(account: Account, fleet: str, zone: str) -> str:
    """Return the placement group for hosts of `zone`, made by `prepare`; "" for none."""
    return names.placement_group(fleet, zone) if account.settings.placement == "cluster" else ""


def _site(account: Account, region: str) -> FleetNetwork | SpotfleetError:
    """Return the cached network. A missing part is cached too, as every tick asks; an error of AWS is not."""
    def read() -> FleetNetwork | SpotfleetError:
        try:
            return _looked_up(account, region)
        except NeedsPerson as error:
            if error.__cause__ is not None:
                raise
            return error

    return account.cached(("site", region), SITE_S, read)


def _looked_up(account: Account, region: str) -> FleetNetwork:
    spec = account.settings.spec
    named = next((n for n in spec.networks if n.region == region), AwsNetwork(region))
    ec2 = account.client("ec2", region)
    if named.subnets:
        found = list(ec2.pages("describe_subnets", "Subnets", SubnetIds=list(named.subnets)))
    else:
        vpc = named.vpc or _default_vpc(ec2, region)
        filters = [_filter("vpc-id", vpc), _filter("state", "available")]
        found = list(ec2.pages("describe_subnets", "Subnets", Filters=filters))
    vpcs = sorted({s["VpcId"] for s in found})
    if len(vpcs) > 1 or (named.vpc and vpcs and vpcs != [named.vpc]):
        raise NeedsPerson(f"aws {region}: the subnets named under `aws.networks` are in {' and '.join(vpcs)}",
                          hint=f"name subnets of {named.vpc or 'one VPC'}")
    if not found:
        raise NeedsPerson(f"aws {region}: {named.vpc or 'the default VPC'} has no subnet",
                          hint=f"aws ec2 create-default-subnet --region {region} --availability-zone {region}a; "
                               "or name subnets under `aws.networks`")
    ways = _ways_out(ec2, vpcs[0])
    subnets = [Subnet(s["SubnetId"], s["AvailabilityZone"], s["AvailableIpAddressCount"],
                      ways.get(s["SubnetId"], ways[""])) for s in found]
    chosen = subnets if named.subnets else _fitting(subnets, public=spec.public_addresses)
    if not chosen:
        raise NeedsPerson(f"aws {region}: no subnet of {vpcs[0]} has a route to an internet gateway: nothing reaches a "
                          "dispatcher there from outside", hint="name another VPC or its public subnets under "
                          "`aws.networks`; or `public_addresses: false`, where you come by a VPN")
    return FleetNetwork(vpcs[0], tuple(sorted(chosen, key=lambda s: s.id)), named.security_groups,
                        named.dispatcher_groups)


def _default_vpc(ec2: AwsClient, region: str) -> str:
    found = list(ec2.pages("describe_vpcs", "Vpcs", Filters=[_filter("is-default", "true")]))
    if not found:
        raise NeedsPerson(f"aws {region}: the account has no default VPC there",
                          hint=f"aws ec2 create-default-vpc --region {region}; or name a VPC under `aws.networks`")
    return found[0]["VpcId"]


def _ways_out(ec2: AwsClient, vpc: str) -> dict[str, str]:
    """Return subnet -> the way of its traffic out; "" stands for subnets that name no route table.

    Whether a subnet gives public addresses by itself does not matter: launches ask for them, and many accounts and
    Terraform's module leave that attribute off in public subnets too.
    """
    ways = {"": ""}
    for table in ec2.pages("describe_route_tables", "RouteTables", Filters=[_filter("vpc-id", vpc)]):
        way = way_out(table.get("Routes", ()))
        for association in table.get("Associations", ()):
            if association.get("SubnetId") or association.get("Main"):
                ways[association.get("SubnetId") or ""] = way
    return ways


def way_out(routes: Sequence[Mapping[str, Any]]) -> str:
    """Return the kind of the default route; "" without one. A route is a black hole once its target is gone."""
    for route in routes:
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            return PUBLIC if str(route.get("GatewayId", "")).startswith("igw-") else OTHER
    return ""


def _fitting(subnets: Sequence[Subnet], *, public: bool) -> list[Subnet]:
    """Choose the subnets whose route serves machines with or without public addresses; [] if no public one is there.

    Machines without them may also do with endpoints alone. From a public subnet they reach nothing outside, so those
    are used only where there are no others.
    """
    for way in [PUBLIC] if public else [OTHER, ""]:
        if fitting := [s for s in subnets if s.way == way]:
            return fitting
    return [] if public else list(subnets)


# ---- creation


def prepare(account: Account, fleet: str, tags: Mapping[str, str], progress: Progress) -> None:
    """Create missing groups and placement groups in each region of the fleet. Idempotent, also for concurrent calls."""
    for region in account.regions:
        here = site(account, region)
        ec2 = account.client("ec2", region)
        if not here.groups:
            group = _make_group(ec2, fleet, names.group(fleet), here.vpc, GROUP_TEXT, tags, progress)
            _open_to_itself(ec2, group, fleet, tags)
            _make_group(ec2, fleet, names.door(fleet), here.vpc, DOOR_TEXT, tags, progress)
        if account.settings.placement == "cluster":
            for zone in sorted({s.zone for s in here.subnets}):
                _make_placement_group(ec2, fleet, names.placement_group(fleet, zone), tags, progress)
        for role in Role:
            account.forget(("groups", region, fleet, role))


def _make_group(ec2: AwsClient, fleet: str, name: str, vpc: str, text: str, tags: Mapping[str, str], progress: Progress,
                ) -> dict[str, Any]:
    """Return the group as listed; create it if missing. Raises NeedsPerson for one of that name that is not ours."""
    found = named_groups(ec2, vpc, [name])
    if not found:
        try:
            made = ec2.create_security_group(GroupName=name, Description=text, VpcId=vpc,
                                             TagSpecifications=[tag_specification("security-group", fleet, tags)])
            progress(f"security group {name} ({made['GroupId']}) in {vpc}")
            return {"GroupId": made["GroupId"], "GroupName": name, "IpPermissions": [], "IpPermissionsEgress": []}
        except SpotfleetError as error:
            if errors.code(error) != "InvalidGroup.Duplicate":
                raise
        return await_group(ec2, fleet, name, vpc)
    _refuse_foreign(found[0], fleet, "security group", name)
    return found[0]


def await_group(ec2: AwsClient, fleet: str, name: str, vpc: str) -> dict[str, Any]:
    """Wait until an existing group is listed, and return it."""
    deadline = time.monotonic() + LISTED_S
    while not (found := named_groups(ec2, vpc, [name])):
        if time.monotonic() >= deadline:
            raise SpotfleetError(f"{ec2.where}: security group {name} is not listed", hint="`spotfleet up` again")
        time.sleep(POLL_S)
    _refuse_foreign(found[0], fleet, "security group", name)
    return found[0]


def _open_to_itself(ec2: AwsClient, group: Mapping[str, Any], fleet: str, tags: Mapping[str, str]) -> None:
    """Allow all traffic among members. The rule for outbound IP traffic does not cover EFA."""
    itself = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group["GroupId"]}]}]
    for direction, key in (("ingress", "IpPermissions"), ("egress", "IpPermissionsEgress")):
        if not any(p["IpProtocol"] == "-1" and any(u.get("GroupId") == group["GroupId"]
                   for u in p.get("UserIdGroupPairs", ())) for p in group[key]):
            authorize(ec2, direction, group["GroupId"], itself, rule_tags(fleet, tags))


def authorize(ec2: AwsClient, direction: str, group: str, rules: list[dict[str, Any]],
              tagged: list[dict[str, Any]]) -> None:
    """Add rules to a group, which may be unknown for seconds if it is new."""
    call = ec2.authorize_security_group_ingress if direction == "ingress" else ec2.authorize_security_group_egress
    deadline = time.monotonic() + LISTED_S
    while True:
        try:
            call(GroupId=group, IpPermissions=rules, TagSpecifications=tagged)
            return
        except SpotfleetError as error:
            match errors.code(error):
                case "InvalidPermission.Duplicate":
                    return
                case code if code in NO_GROUP and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                case _:
                    raise


def _make_placement_group(ec2: AwsClient, fleet: str, name: str, tags: Mapping[str, str], progress: Progress) -> None:
    def find() -> dict[str, Any] | None:
        found = ec2.describe_placement_groups(Filters=[_filter("group-name", name)])["PlacementGroups"]
        return next((g for g in found if g.get("State") not in ("deleting", "deleted")), None)

    there = find()
    if there is None:
        try:
            ec2.create_placement_group(GroupName=name, Strategy="cluster",
                                       TagSpecifications=[tag_specification("placement-group", fleet, tags)])
            progress(f"placement group {name}")
            return
        except SpotfleetError as error:
            if errors.code(error) != "InvalidPlacementGroup.Duplicate":
                raise
        deadline = time.monotonic() + LISTED_S
        while (there := find()) is None:
            if time.monotonic() >= deadline:
                raise SpotfleetError(f"{ec2.where}: placement group {name} is neither listed nor can it be made",
                                     hint="`spotfleet up` again")
            time.sleep(POLL_S)
    _refuse_foreign(there, fleet, "placement group", name)


# ---- helpers


def tag_specification(kind: str, fleet: str, tags: Mapping[str, str]) -> dict[str, Any]:
    """Return the tags that every resource of a fleet that belongs to no host carries from its creation."""
    return {"ResourceType": kind, "Tags": pairs({**tags, names.FLEET: fleet, names.SINCE: str(int(time.time()))})}


def pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": k, "Value": v} for k, v in tags.items()]


def rule_tags(fleet: str, tags: Mapping[str, str]) -> list[dict[str, Any]]:
    return [tag_specification("security-group-rule", fleet, tags)]


def _filter(name: str, *values: str) -> dict[str, Any]:
    return {"Name": name, "Values": list(values)}


def named_groups(ec2: AwsClient, vpc: str, wanted: Sequence[str]) -> list[dict[str, Any]]:
    return list(ec2.pages("describe_security_groups", "SecurityGroups",
                          Filters=[_filter("vpc-id", vpc), _filter("group-name", *wanted)]))


def is_fleet_resource(thing: Mapping[str, Any], fleet: str) -> bool:
    return any(t["Key"] == names.FLEET and t["Value"] == fleet for t in thing.get("Tags", ()))


def _refuse_foreign(thing: Mapping[str, Any], fleet: str, kind: str, name: str) -> None:
    if not is_fleet_resource(thing, fleet):
        raise NeedsPerson(f"there is a {kind} {name} that does not have the tag {names.FLEET}={fleet}: it is not ours",
                          hint="give the fleet another name, or remove it if it is of no use")
