"""Resources of fleets in the account besides living hosts, found by tag; and their removal.

A resource is ours if it carries our tag and, where it has a name, a name in our format. Resources made by a person or
another program are never listed, so never removed. A resource of one host carries that host's tag too.

    per region   open spot requests, fleets, templates, detached volumes and interfaces, free addresses, security
                 groups, key pairs, placement groups, queues and rules
    global       instance profiles and roles (IAM)

The listing is in a valid order of removal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.providers import Resource
from spotfleet.providers.aws import describe, terminate
from spotfleet.providers.aws.account import identity, queue
from spotfleet.providers.aws.mapping import errors, listing, names
from spotfleet.providers.aws.session import Account, AwsClient

NAMED = "spotfleet-"  # prefix of all our names
ASKED_AT_ONCE = 8  # regions queried in parallel
LIVING = ("pending", "running", "stopping", "stopped", "shutting-down")
RUNNING = ("pending", "running", "stopping", "stopped")

REQUEST, FLEET, TEMPLATE, VOLUME = "spot-instances-request", "fleet", "launch-template", "volume"
INTERFACE, ADDRESS, GROUP, KEY = "network-interface", "elastic-ip", "security-group", "key-pair"
PLACEMENT, PROFILE, ROLE = "placement-group", "instance-profile", "role"


def listed(account: Account, fleet: str, everywhere: bool = False) -> list[Resource]:
    """List the resources of `fleet`, "" for every fleet. Raises the error of a region that fails."""
    regions = account.all_regions() if everywhere else account.regions
    with ThreadPoolExecutor(max_workers=ASKED_AT_ONCE, thread_name_prefix="spotfleet-aws") as pool:
        asked = [pool.submit(_of_region, account, region, fleet) for region in regions]
        roles = pool.submit(_of_iam_if_any, account, fleet, frozenset(regions))
        found = [b for future in asked for b in future.result()]
        return [*found, *roles.result()]


def delete(account: Account, resource: Resource) -> None:
    """Remove one resource, no error if it is gone; raises SpotfleetError while something else uses it."""
    if queue.delete(account, resource):
        return
    remove = _REMOVE.get(resource.kind)
    if remove is None:
        raise UsageError(f"provider aws makes no {resource.kind}")
    try:
        remove(account.client("ec2" if resource.region else "iam", resource.region), resource.id)
    except SpotfleetError as error:
        if not _is_gone(error):
            raise


# ---- listing


def _of_region(account: Account, region: str, fleet: str) -> list[Resource]:
    return [*_Region(account.client("ec2", region), region, fleet).all(), *queue.listed(account, region, fleet)]


class _Region:
    """Resources with our tag in one region."""

    def __init__(self, ec2: AwsClient, region: str, fleet: str) -> None:
        self._ec2, self._region, self._fleet = ec2, region, fleet
        self._filter = {"Name": f"tag:{names.FLEET}", "Values": [fleet]} if fleet else {
            "Name": "tag-key", "Values": [names.FLEET]}

    def all(self) -> Iterator[Resource]:
        living = self._living()
        requests = [r for r in self._pages("describe_spot_instance_requests", "SpotInstanceRequests") if _of_a_host(r)]
        unseen = listing.unseen(living.values(), [r for r in requests if r["State"] not in listing.WAITING])
        untagged = {i["InstanceId"] for i in describe.by_id(self._ec2, unseen) if i["State"]["Name"] in RUNNING}
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

    def _fleets(self, in_use: set[str]) -> Iterator[Resource]:
        """Yield fleets by their tags: EC2 describes an instant fleet only by id, but lists its tags to all callers."""
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
        """Describe those of `ids` that exist. One id that is gone makes EC2 refuse the whole call."""
        try:
            return list(self._ec2.pages(operation, key, **{parameter: list(ids)}))
        except SpotfleetError as error:
            if not _is_gone(error):
                raise
            if len(ids) == 1:
                return []
        return [f for i in ids for f in self._pages_of_ids(operation, key, parameter, [i])]

    def _one(self, kind: str, thing: Mapping[str, Any], name: str, since: Any = None, state: str = "") -> Resource:
        tags = _tags(thing)
        return Resource(kind, name, self._region, tags[names.FLEET], _since(tags, since), state)


def _of_iam_if_any(account: Account, fleet: str, regions: frozenset[str]) -> list[Resource]:
    """List IAM resources; [] if IAM denies it to a user who names the profiles, since those are the user's."""
    try:
        return list(_of_iam(account, fleet, regions))
    except SpotfleetError as error:
        if identity.makes_roles(account) or errors.TABLE.get(errors.code(error)) is not errors.DENIED:
            raise
        return []


def _of_iam(account: Account, fleet: str, regions: frozenset[str]) -> Iterator[Resource]:
    """List IAM resources of fleets in `regions`. IAM lists by path and returns tags one by one."""
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
                yield Resource(kind, thing[name_key], "", tags[names.FLEET], _since(tags, thing.get("CreateDate")))


# ---- removal


def _cancel(ec2: AwsClient, request: str) -> None:
    """Cancel a spot request and end the untagged instance that it launched after its machine was ended alone.

    The instance is read after the cancellation, since the request may launch until then.
    """
    ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[request])
    found = ec2.describe_spot_instance_requests(SpotInstanceRequestIds=[request])["SpotInstanceRequests"]
    if instances := [r["InstanceId"] for r in found if r.get("InstanceId")]:
        terminate.end_untagged(ec2, instances)


def _delete_profile(iam: AwsClient, name: str) -> None:
    found = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    for role in found["Roles"]:
        _unless_gone(lambda role=role: iam.remove_role_from_instance_profile(
            InstanceProfileName=name, RoleName=role["RoleName"]))
    iam.delete_instance_profile(InstanceProfileName=name)


def _delete_role(iam: AwsClient, name: str) -> None:
    for policy in iam.list_role_policies(RoleName=name)["PolicyNames"]:
        _unless_gone(lambda policy=policy: iam.delete_role_policy(RoleName=name, PolicyName=policy))
    iam.delete_role(RoleName=name)


_REMOVE: dict[str, Callable[[AwsClient, str], object]] = {
    REQUEST: _cancel,
    FLEET: lambda ec2, i: terminate.drop_fleets(ec2, [i]),
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
    """Return whether EC2's or IAM's code means it: InvalidVolume.NotFound, InvalidPlacementGroup.Unknown ..."""
    code = errors.code(error)
    return code.endswith(("NotFound", "NotFoundException", ".Unknown")) or code == "NoSuchEntity"


# ---- helpers


def _tags(thing: Mapping[str, Any]) -> dict[str, str]:
    return {t["Key"]: t["Value"] for t in thing.get("Tags", ())}


def _of_a_host(thing: Mapping[str, Any]) -> bool:
    return names.HOST in _tags(thing)


def _is_named(name: str) -> bool:
    return name.startswith(NAMED)


def _since(tags: Mapping[str, str], created: Any) -> float:
    """Return the creation time: from the cloud, or from the tag if the cloud does not give it."""
    return names.since(tags) if created is None else created.timestamp()


def _in_parts(things: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (things[i:i + size] for i in range(0, len(things), size))
