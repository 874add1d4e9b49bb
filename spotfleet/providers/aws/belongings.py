"""Everything of fleets in the account that is no living host, by tag; and its removal.

Ours is what bears our tag and, where things have names, a name as we give it: what a person or another program made
is never listed, so never removed. What belongs to one host bears that host's tag, too.

    in a region   open spot requests, fleets, templates, detached volumes and interfaces, free addresses, security
                  groups, key pairs, placement groups, queues and rules
    in none       instance profiles and roles (IAM)

The order of the listing is the one in which they can be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.providers import Belonging
from spotfleet.providers.aws import ending, errors, identity, listing, look, names, queue
from spotfleet.providers.aws.session import Account, Client

NAMED = "spotfleet-"  # with what all our names begin
ASKED_AT_ONCE = 8  # regions
LIVING = ("pending", "running", "stopping", "stopped", "shutting-down")
RUNNING = ("pending", "running", "stopping", "stopped")

REQUEST, FLEET, TEMPLATE, VOLUME = "spot-instances-request", "fleet", "launch-template", "volume"
INTERFACE, ADDRESS, GROUP, KEY = "network-interface", "elastic-ip", "security-group", "key-pair"
PLACEMENT, PROFILE, ROLE = "placement-group", "instance-profile", "role"


def listed(account: Account, fleet: str, everywhere: bool = False) -> list[Belonging]:
    """Of `fleet`, "" for every one. Raises what a region raises that does not answer."""
    regions = account.everywhere() if everywhere else account.regions
    with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE, thread_name_prefix="spotfleet-aws") as pool:
        asked = [pool.submit(_of_region, account, region, fleet) for region in regions]
        roles = pool.submit(_of_iam_if_any, account, fleet, frozenset(regions))
        found = [b for future in asked for b in future.result()]
        return [*found, *roles.result()]


def discard(account: Account, belonging: Belonging) -> None:
    """Raises SpotfleetError while something else uses it; no error if it is gone."""
    if queue.discard(account, belonging):
        return
    remove = _REMOVE.get(belonging.kind)
    if remove is None:
        raise UsageError(f"provider aws makes no {belonging.kind}")
    try:
        remove(account.client("ec2" if belonging.region else "iam", belonging.region), belonging.id)
    except SpotfleetError as error:
        if not _is_gone(error):
            raise


# ---- what there is


def _of_region(account: Account, region: str, fleet: str) -> list[Belonging]:
    return [*_Region(account.client("ec2", region), region, fleet).all(), *queue.listed(account, region, fleet)]


class _Region:
    """What bears our tag in one region."""

    def __init__(self, ec2: Client, region: str, fleet: str) -> None:
        self._ec2, self._region, self._fleet = ec2, region, fleet
        self._filter = {"Name": f"tag:{names.FLEET}", "Values": [fleet]} if fleet else {
            "Name": "tag-key", "Values": [names.FLEET]}

    def all(self) -> Iterator[Belonging]:
        living = self._living()
        requests = [r for r in self._pages("describe_spot_instance_requests", "SpotInstanceRequests") if _of_a_host(r)]
        unseen = listing.unseen(living.values(), [r for r in requests if r["State"] not in listing.WAITING])
        untagged = {i["InstanceId"] for i in look.by_id(self._ec2, unseen) if i["State"]["Name"] in RUNNING}
        for r in requests:
            if (r["State"] in listing.WAITING and r.get("InstanceId") not in living) or r.get("InstanceId") in untagged:
                yield self._one(REQUEST, r, r["SpotInstanceRequestId"], r.get("CreateTime"), r["State"])
        yield from self._fleets({_tags(i).get("aws:ec2:fleet-id", "") for i in living.values()})
        for t in self._pages("describe_launch_templates", "LaunchTemplates"):
            if _is_named(t["LaunchTemplateName"]):
                yield self._one(TEMPLATE, t, t["LaunchTemplateId"], t.get("CreateTime"))
        for v in self._pages("describe_volumes", "Volumes"):
            if v["State"] in ("available", "error") and _of_a_host(v):
                yield self._one(VOLUME, v, v["VolumeId"], v.get("CreateTime"), v["State"])
        for i in self._pages("describe_network_interfaces", "NetworkInterfaces"):
            tagged = {"Tags": i.get("TagSet", ())}
            if i["Status"] == "available" and _of_a_host(tagged):
                yield self._one(INTERFACE, tagged, i["NetworkInterfaceId"], state=i["Status"])
        for a in self._ec2.describe_addresses(Filters=[self._filter])["Addresses"]:
            if not a.get("AssociationId") and a.get("AllocationId") and _of_a_host(a):
                yield self._one(ADDRESS, a, a["AllocationId"])
        for g in self._pages("describe_security_groups", "SecurityGroups"):
            if _is_named(g["GroupName"]):
                yield self._one(GROUP, g, g["GroupId"])
        for k in self._ec2.describe_key_pairs(Filters=[self._filter])["KeyPairs"]:
            if _is_named(k["KeyName"]):
                yield self._one(KEY, k, k["KeyName"], k.get("CreateTime"))
        for p in self._ec2.describe_placement_groups(Filters=[self._filter])["PlacementGroups"]:
            if _is_named(p["GroupName"]) and p.get("State") not in ("deleting", "deleted"):
                yield self._one(PLACEMENT, p, p["GroupName"])

    def _living(self) -> dict[str, Mapping[str, Any]]:
        states = {"Name": "instance-state-name", "Values": list(LIVING)}
        reservations = self._ec2.pages("describe_instances", "Reservations", Filters=[self._filter, states])
        return {i["InstanceId"]: i for r in reservations for i in r["Instances"]}

    def _fleets(self, in_use: set[str]) -> Iterator[Belonging]:
        """An instant fleet is shown to who asks for it by its id only; its tags are shown to everybody."""
        tags: dict[str, dict[str, str]] = {}
        kind = {"Name": "resource-type", "Values": [FLEET]}
        for tag in self._ec2.pages("describe_tags", "Tags", Filters=[kind]):
            tags.setdefault(tag["ResourceId"], {})[tag["Key"]] = tag["Value"]
        wanted = [i for i, t in sorted(tags.items()) if names.FLEET in t and self._fleet in ("", t[names.FLEET])
                  and names.HOST in t and i not in in_use]
        for some in _in_parts(wanted, 100):
            for f in self._pages_of_ids("describe_fleets", "Fleets", "FleetIds", some):
                if not f["FleetState"].startswith(("deleted", "failed")):
                    tagged = {"Tags": [{"Key": k, "Value": v} for k, v in tags[f["FleetId"]].items()]}
                    yield self._one(FLEET, tagged, f["FleetId"], f.get("CreateTime"), f["FleetState"])

    def _pages(self, operation: str, key: str) -> Iterator[Mapping[str, Any]]:
        return self._ec2.pages(operation, key, Filters=[self._filter])

    def _pages_of_ids(self, operation: str, key: str, parameter: str, ids: Sequence[str]) -> list[Mapping[str, Any]]:
        """What of `ids` is there: one that has just gone makes EC2 refuse the others' description, too."""
        try:
            return list(self._ec2.pages(operation, key, **{parameter: list(ids)}))
        except SpotfleetError as error:
            if not _is_gone(error):
                raise
            if len(ids) == 1:
                return []
        return [f for i in ids for f in self._pages_of_ids(operation, key, parameter, [i])]

    def _one(self, kind: str, thing: Mapping[str, Any], name: str, since: Any = None, state: str = "") -> Belonging:
        tags = _tags(thing)
        return Belonging(kind, name, self._region, tags[names.FLEET], _since(tags, since), state)


def _of_iam_if_any(account: Account, fleet: str, regions: frozenset[str]) -> list[Belonging]:
    """Who names the profiles needs no rights in IAM: nothing of ours is there."""
    try:
        return list(_of_iam(account, fleet, regions))
    except SpotfleetError as error:
        if identity.makes_roles(account) or errors.TABLE.get(errors.code(error)) is not errors.DENIED:
            raise
        return []


def _of_iam(account: Account, fleet: str, regions: frozenset[str]) -> Iterator[Belonging]:
    """Of fleets in `regions`. IAM lists by path and tells tags one by one."""
    iam = account.client("iam")
    for kind, list_them, key, get, name_key in (
            (PROFILE, "list_instance_profiles", "InstanceProfiles", iam.get_instance_profile, "InstanceProfileName"),
            (ROLE, "list_roles", "Roles", iam.get_role, "RoleName")):
        for thing in list(iam.pages(list_them, key, PathPrefix=names.IAM_PATH)):
            if thing["Path"] != names.IAM_PATH or not _is_named(thing[name_key]):
                continue
            try:
                tags = _tags(get(**{name_key: thing[name_key]})[key.removesuffix("s")])
            except SpotfleetError as error:
                if _is_gone(error):
                    continue
                raise
            if names.FLEET in tags and fleet in ("", tags[names.FLEET]) and tags.get(names.REGION) in regions:
                yield Belonging(kind, thing[name_key], "", tags[names.FLEET], _since(tags, thing.get("CreateDate")))


# ---- its removal


def _cancel(ec2: Client, request: str) -> None:
    """And end what it has launched by itself, in place of a machine that was ended without it: that bears no tag.
    What it has is asked afterwards, for it may launch until then."""
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[request])
    found = ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[request])["SpotInstanceRequests"]
    if instances := [r["InstanceId"] for r in found if r.get("InstanceId")]:
        ending.end_untagged(ec2, instances)


def _delete_profile(iam: Client, name: str) -> None:
    found = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    for role in found["Roles"]:
        _unless_gone(lambda role=role: iam.remove_role_from_instance_profile(
            InstanceProfileName=name, RoleName=role["RoleName"]))
    iam.delete_instance_profile(InstanceProfileName=name)


def _delete_role(iam: Client, name: str) -> None:
    for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
        _unless_gone(lambda policy=policy: iam.delete_role_policy(RoleName=name, PolicyName=policy))
    iam.delete_role(RoleName=name)


_REMOVE: dict[str, Callable[[Client, str], object]] = {
    REQUEST: _cancel,
    FLEET: lambda ec2, i: ending.drop_fleets(ec2, [i]),
    TEMPLATE: lambda ec2, i: ec2.delete_launch_template(LaunchTemplateId=i),
    VOLUME: lambda ec2, i: ec2.delete_volume(VolumeId=i),
    INTERFACE: lambda ec2, i: ec2.delete_network_interface(NetworkInterfaceId=i),
    ADDRESS: lambda ec2, i: ec2.release_address(AllocationId=i),
    GROUP: lambda ec2, i: ec2.delete_security_group(GroupId=i),
    KEY: lambda ec2, i: ec2.delete_key_pair(KeyName=i),
    PLACEMENT: lambda ec2, i: ec2.delete_placement_group(GroupName=i),
    PROFILE: _delete_profile,
    ROLE: _delete_role,
}
KINDS = (*(kind for kind in _REMOVE if kind not in (PROFILE, ROLE)), queue.RULE, queue.QUEUE, PROFILE, ROLE)


def _unless_gone(call: Callable[[], object]) -> None:
    try:
        call()
    except SpotfleetError as error:
        if not _is_gone(error):
            raise


def _is_gone(error: SpotfleetError) -> bool:
    """By EC2's and IAM's codes: InvalidVolume.NotFound, NoSuchEntity, InvalidPlacementGroup.Unknown ..."""
    code = errors.code(error)
    return code.endswith(("NotFound", "NotFoundException", ".Unknown")) or code == "NoSuchEntity"


# ---- small things


def _tags(thing: Mapping[str, Any]) -> dict[str, str]:
    return {t["Key"]: t["Value"] for t in thing.get("Tags", ())}


def _of_a_host(thing: Mapping[str, Any]) -> bool:
    return names.HOST in _tags(thing)


def _is_named(name: str) -> bool:
    return name.startswith(NAMED)


def _since(tags: Mapping[str, str], told: Any) -> float:
    """When it was made: by the cloud's clock, or by the tag where the cloud does not say."""
    return names.since(tags) if told is None else told.timestamp()


def _in_parts(things: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (things[i:i + size] for i in range(0, len(things), size))
