"""vCPU quotas: which one counts a type, found by its name, and what is used of it. Codes are looked up, never known.

EC2 counts the vCPUs of what runs and, for spot, of what is asked for and still open, per family and region:

    "Running On-Demand G and VT instances"    "All P4, P3 and P2 Spot Instance Requests"
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfleet.model import Market
from spotfleet.providers.aws import catalog, names
from spotfleet.providers.aws.session import Account

TITLES = {Market.SPOT: r"All (.+) Spot Instance Requests", Market.ON_DEMAND: r"Running On-Demand (.+) instances"}
CACHED_S = 60.0
COUNTED = ("pending", "running", "shutting-down", "stopping")


@dataclass(frozen=True)
class Quota:
    name: str
    code: str
    vcpus: int
    market: Market

    @property
    def families(self) -> frozenset[str]:
        """What its name says, in small letters: {"g", "vt"}, {"p4", "p3", "p2"}."""
        (words,) = re.fullmatch(TITLES[self.market], self.name).groups()  # type: ignore[union-attr]
        listed = re.search(r"\((.+)\)", words)
        return frozenset(w.lower() for w in re.findall(r"[A-Za-z]+\d*", listed.group(1) if listed else words)) - {"and"}


def quotas(account: Account, region: str) -> tuple[Quota, ...]:
    """Those of vCPUs, of both markets."""
    def ask() -> tuple[Quota, ...]:
        asked = account.client("service-quotas", region)
        rows = asked.pages("list_service_quotas", "Quotas", ServiceCode="ec2")
        return tuple(Quota(r["QuotaName"], r["QuotaCode"], int(r["Value"]), market) for r in rows
                     for market, title in TITLES.items() if re.fullmatch(title, r["QuotaName"]))

    return account.cached(("quotas", region), CACHED_S, ask)


def of_type(found: Iterable[Quota], instance_type: str, market: Market) -> Quota | None:
    """The quota that counts `instance_type`: one that names its generation ("P5") before one of the whole family."""
    named = re.match(r"([a-z]+)(\d*)", instance_type)
    family, generation = named.groups() if named else ("", "")
    for word in (family + generation, family):
        for quota in found:
            if quota.market is market and word in quota.families:
                return quota
    return None


def used(account: Account, region: str, found: Sequence[Quota], but: str = "") -> dict[str, int]:
    """vCPUs by quota name: of instances that are not stopped, and of open spot requests. Without those of fleet `but`,
    which has what it wants of them already."""
    ec2 = account.client("ec2", region)
    counted: dict[str, int] = {q.name: 0 for q in found}
    reservations = ec2.pages("describe_instances", "Reservations",
                             Filters=[{"Name": "instance-state-name", "Values": list(COUNTED)}])
    running = [i for r in reservations for i in r["Instances"] if not _of(i, but)]
    waiting = [r for r in ec2.pages("describe_spot_instance_requests", "SpotInstanceRequests",
                                    Filters=[{"Name": "state", "Values": ["open"]}]) if not _of(r, but)]
    types = {i["InstanceType"] for i in running} | {_wanted(r) for r in waiting}
    cores = vcpus(account, region, types - {""})
    for instance in running:
        market = Market.SPOT if instance.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND
        _count(counted, of_type(found, instance["InstanceType"], market), cores.get(instance["InstanceType"], 0))
    for request in waiting:
        _count(counted, of_type(found, _wanted(request), Market.SPOT), cores.get(_wanted(request), 0))
    return counted


def vcpus(account: Account, region: str, types: Iterable[str]) -> dict[str, int]:
    """Of each type that the region knows."""
    return {name: facts.vcpus for name, facts in catalog.facts(account, region, types).items()}


def _count(counted: dict[str, int], quota: Quota | None, vcpus_more: int) -> None:
    if quota is not None:
        counted[quota.name] += vcpus_more


def _wanted(request: Mapping[str, Any]) -> str:
    return request.get("LaunchSpecification", {}).get("InstanceType", "")


def _of(thing: Mapping[str, Any], fleet: str) -> bool:
    return bool(fleet) and any(t["Key"] == names.FLEET and names.is_life(fleet, t["Value"])
                               for t in thing.get("Tags", ()))
