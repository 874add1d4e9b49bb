"""EC2's listing of hosts, their boot files and tags: one query for instances and one for spot requests per region."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.model import SECOND, CloudHost, Market, Offer, Role
from spotfleet.providers.aws import prices, types
from spotfleet.providers.aws.mapping import listing, names
from spotfleet.providers.aws.session import Account
from spotfleet.providers.kit import userdata
from spotfleet.providers.kit.mapping.listing import ListingContext

GANGS = "* *"  # matches the HOST tag of hosts launched together
FILTER_VALUES = 200  # EC2's maximum per filter


@dataclass(frozen=True)
class Described:
    """EC2's records of one host in one region."""

    region: str
    instances: tuple[Mapping[str, Any], ...]
    requests: tuple[Mapping[str, Any], ...]

    @property
    def living(self) -> list[Mapping[str, Any]]:
        """Return the instances that have not ended, the newest last."""
        found = [i for i in self.instances if i["State"]["Name"] not in ("terminated", "shutting-down")]
        return sorted(found, key=lambda i: i["LaunchTime"])


def hosts(account: Account, fleet: str,
          seen: Callable[[Account, str, Sequence[Mapping[str, Any]]], None] | None = None) -> list[CloudHost]:
    """List the hosts of `fleet`, or of every fleet for "". `seen` is called with each region and its instances."""
    return [line for lines in account.each(lambda region: _in_region(account, region, fleet, seen), account.regions)
            for line in lines]


def find(account: Account, request_id: str) -> list[Described]:
    """Find the records of a host that exists or is still listed; regions without any are left out."""
    found = account.each(lambda region: in_region(account, region, request_id), account.regions)
    return [f for f in found if f.instances or f.requests]


def in_region(account: Account, region: str, request_id: str) -> Described:
    """Find the records of a host in one region. `request_id` may be an intruder's: HOST~INSTANCE or HOST~REQUEST."""
    ec2 = account.client("ec2", region)
    host, _, alone = request_id.partition(SECOND)
    asked = [r for r in ec2.pages("describe_spot_instance_requests", "SpotInstanceRequests", Filters=_host(host))
             if names.FLEET in listing.tags(r)]
    instances = _instances(ec2, _host(host), asked)
    hosts = listing.request_ids(instances, asked)
    found = [i for i in instances if hosts.get(i["InstanceId"]) == host]
    own_requests = {i.get("SpotInstanceRequestId") for i in found}
    asked = [r for r in asked if r["SpotInstanceRequestId"] in own_requests or listing.tags(r).get(names.HOST) == host
             or r["SpotInstanceRequestId"] == alone]
    if alone:
        found = [i for i in found if alone == i["InstanceId"]]
        asked = [r for r in asked if alone == r["SpotInstanceRequestId"]
                 or r["SpotInstanceRequestId"] in {i.get("SpotInstanceRequestId") for i in found}]
    return Described(region, tuple(found), tuple(asked))


def launched_together(account: Account, region: str, host: str) -> list[Mapping[str, Any]]:
    """List the living instances with this HOST tag."""
    ec2 = account.client("ec2", region)
    filters = [{"Name": f"tag:{names.HOST}", "Values": [host]}]
    return [i for r in ec2.pages("describe_instances", "Reservations", Filters=filters) for i in r["Instances"]
            if i["State"]["Name"] in ("pending", "running")]


def tag(account: Account, request_id: str, tags: Mapping[str, str]) -> None:
    for found in find(account, request_id):
        if found.living:
            account.client("ec2", found.region).create_tags(
                Resources=[found.living[-1]["InstanceId"]], Tags=[{"Key": k, "Value": v} for k, v in tags.items()])
            return
    raise unknown(request_id)


def boot_files(account: Account, request_id: str) -> dict[str, str]:
    for found in find(account, request_id):
        for instance in (*reversed(found.living), *found.instances):
            answer = account.client("ec2", found.region).describe_instance_attribute(
                InstanceId=instance["InstanceId"], Attribute="userData")
            if data := answer.get("UserData", {}).get("Value", ""):
                return userdata.files(base64.b64decode(data), request_id)
    raise unknown(request_id)


def unknown(request_id: str) -> UsageError:
    return UsageError(f"aws: there is no host {request_id}", hint="`spotfleet status` lists them")


def _in_region(account: Account, region: str, fleet: str,
               seen: Callable[[Account, str, Sequence[Mapping[str, Any]]], None] | None) -> list[CloudHost]:
    ec2 = account.client("ec2", region)
    filters = [{"Name": f"tag:{names.FLEET}", "Values": [fleet]} if fleet else
               {"Name": "tag-key", "Values": [names.FLEET]}]
    asked = list(ec2.pages("describe_spot_instance_requests", "SpotInstanceRequests", Filters=filters))
    instances = _instances(ec2, filters, asked)
    if seen is not None:
        seen(account, region, instances)
    return listing.lines(instances, asked, _sight(account, region))


def _instances(ec2: Any, filters: list[dict[str, Any]], requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """List the instances that match the filters or belong to the requests: a relaunch may carry no tags."""
    found = [i for r in ec2.pages("describe_instances", "Reservations", Filters=filters) for i in r["Instances"]]
    return [*found, *by_id(ec2, listing.unseen(found, requests))]


def by_id(ec2: Any, ids: Sequence[str]) -> list[dict[str, Any]]:
    """List the instances with these ids. With `InstanceIds`, one missing id would make EC2 refuse the whole call."""
    parts = [list(ids[at:at + FILTER_VALUES]) for at in range(0, len(ids), FILTER_VALUES)]
    return [i for some in parts for r in ec2.pages("describe_instances", "Reservations",
                                                   Filters=[{"Name": "instance-id", "Values": some}])
            for i in r["Instances"]]


def _host(host: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{names.HOST}", "Values": [host, GANGS]}]


def _sight(account: Account, region: str) -> ListingContext:
    settings = account.settings

    def priced(bare: Offer) -> Offer:
        return _priced(account, region, bare)

    def disk_gib(role: Role) -> int:
        spec = settings.spec
        return spec.dispatcher_disk_gib if role is Role.DISPATCHER else spec.disk_gib

    return ListingContext(region, settings.spec.user, lambda host: userdata.host_keys(settings.secret, host),
                          lru_cache(priced), disk_gib)


def _priced(account: Account, region: str, bare: Offer) -> Offer:
    """Add current facts and prices; on an error return the offer unchanged, so that the listing does not fail."""
    kind = bare.instance_type
    try:
        facts = types.facts(account, region, [kind]).get(kind) if kind else None
        regular = prices.on_demand(account, [kind], [region]).micros_h.get((region, kind), 0) if facts else 0
        spot = prices.spot(account, region, [kind]).get((bare.zone, kind), 0) if facts else 0
    except SpotfleetError:
        return bare
    if facts is None:
        return bare
    if bare.reserved.startswith(names.BLOCK):
        return replace(bare, slots=facts.slots, accelerator=facts.accelerator)
    now = spot if bare.sold == Market.SPOT.value else regular
    return replace(bare, slots=facts.slots, accelerator=facts.accelerator, price_micros_h=now,
                   on_demand_micros_h=regular)
