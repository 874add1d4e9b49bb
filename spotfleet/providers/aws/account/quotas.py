"""vCPU quotas: the quota that counts a type, found by its name, and its current use. Codes are looked up, not stored.

EC2 counts the vCPUs of running machines and, for spot, of open requests, per family and region:

    "Running On-Demand G and VT instances"    "All P4, P3 and P2 Spot Instance Requests"
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfleet.model import Market, Nodes, Offer
from spotfleet.providers import Finding
from spotfleet.providers.aws import types as instance_types
from spotfleet.providers.aws.mapping import names
from spotfleet.providers.aws.session import Account
from spotfleet.providers.kit.mapping.quotas import QuotaShare, QuotaUse, hosts_fit, one_fits

TITLES = {Market.SPOT: r"All (.+) Spot Instance Requests", Market.ON_DEMAND: r"Running On-Demand (.+) instances"}
CACHED_S = 60.0
OF_FAMILY = {"gr": "g"}  # families that the name of another's quota means as well: gr6 counts as G
COUNTED = ("pending", "running", "shutting-down", "stopping")
SMALL = 2  # vCPUs of a dispatcher's machine
ACCELERATED = ("p", "p2", "p3", "p4", "p5", "p6", "g", "vt")


@dataclass(frozen=True)
class Quota:
    """A vCPU quota of one market and region."""

    name: str
    code: str
    vcpus: int
    market: Market

    @property
    def families(self) -> frozenset[str]:
        """Return the families in its name, in small letters: {"g", "vt"}, {"p4", "p3", "p2"}."""
        (words,) = re.fullmatch(TITLES[self.market], self.name).groups()  # type: ignore[union-attr]
        listed = re.search(r"\((.+)\)", words)
        return frozenset(w.lower() for w in re.findall(r"[A-Za-z]+\d*", listed.group(1) if listed else words)) - {"and"}


def quotas(account: Account, region: str) -> tuple[Quota, ...]:
    """Return the vCPU quotas of both markets. AWS leaves out of the first list a quota that has its default value."""
    def ask() -> tuple[Quota, ...]:
        asked = account.client("service-quotas", region)
        applied = {r["QuotaName"]: r for r in asked.pages("list_service_quotas", "Quotas", ServiceCode="ec2")}
        rows = {r["QuotaName"]: r for r in asked.pages("list_aws_default_service_quotas", "Quotas", ServiceCode="ec2")}
        return tuple(Quota(r["QuotaName"], r["QuotaCode"], int(r["Value"]), market) for r in (rows | applied).values()
                     for market, title in TITLES.items() if re.fullmatch(title, r["QuotaName"]))

    return account.cached(("quotas", region), CACHED_S, ask)


def of_type(found: Iterable[Quota], instance_type: str, market: Market) -> Quota | None:
    """Return the quota that counts `instance_type`: one that names its generation ("P5") before one of the family."""
    named = re.match(r"([a-z]+)(\d*)", instance_type)
    family, generation = named.groups() if named else ("", "")
    family = OF_FAMILY.get(family, family)
    for word in (family + generation, family):
        for quota in found:
            if quota.market is market and word in quota.families:
                return quota
    return None


def used(account: Account, region: str, found: Sequence[Quota], but: str = "") -> dict[str, int]:
    """Return the used vCPUs by quota name: instances that are not stopped, and open spot requests.

    Fleet `but` is left out: it already has its share.
    """
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
    """Return the vCPUs of each type that the region knows."""
    return {name: facts.vcpus for name, facts in instance_types.facts(account, region, types).items()}


def _count(counted: dict[str, int], quota: Quota | None, vcpus_more: int) -> None:
    if quota is not None:
        counted[quota.name] += vcpus_more


def _wanted(request: Mapping[str, Any]) -> str:
    return request.get("LaunchSpecification", {}).get("InstanceType", "")


def _of(thing: Mapping[str, Any], fleet: str) -> bool:
    return bool(fleet) and any(t["Key"] == names.FLEET and names.is_life(fleet, t["Value"])
                               for t in thing.get("Tags", ()))


# ---- does it hold a fleet?


def findings(account: Account, region: str, hosts: Sequence[Offer], dispatcher: Sequence[Offer], nodes: Nodes | None,
             fleet: str) -> Iterator[Finding]:
    """`nodes` None: of any fleet. `fleet`'s own machines are not counted as used."""
    found = quotas(account, region)
    taken = used(account, region, found, fleet)
    if nodes is None:
        yield from _any(region, found, taken)
        return
    cores = vcpus(account, region, {o.instance_type for o in (*hosts, *dispatcher)})
    if dispatcher:
        best = min(dispatcher, key=lambda o: o.price_micros_h)
        quota = of_type(found, best.instance_type, Market.ON_DEMAND)
        needed = cores.get(best.instance_type, SMALL)
        yield _one(region, quota, taken, needed, f"the dispatcher ({best.instance_type})")
        if quota is not None:
            taken = {**taken, quota.name: taken[quota.name] + needed}
    yield from hosts_fit(region, _shares(region, found, taken, cores, hosts), nodes)
    for kind in sorted({o.instance_type for o in hosts if of_type(found, o.instance_type, o.market) is None}):
        yield Finding(f"{region}: no vCPU quota is known that counts {kind}", "warning", console(region))


def _shares(region: str, found: Sequence[Quota], taken: Mapping[str, int], cores: Mapping[str, int],
            hosts: Sequence[Offer]) -> list[QuotaShare]:
    kinds: dict[Quota, set[str]] = {}
    for offer in hosts:
        if quota := of_type(found, offer.instance_type, offer.market):
            kinds.setdefault(quota, set()).add(offer.instance_type)
    return [QuotaShare(_use(region, quota, taken), min(cores.get(k, 1) for k in types), tuple(sorted(types)))
            for quota, types in kinds.items()]


def _use(region: str, quota: Quota, taken: Mapping[str, int]) -> QuotaUse:
    return QuotaUse(quota.name, quota.vcpus, taken[quota.name], lambda vcpus: how_to_raise(region, quota, vcpus))


def _one(region: str, quota: Quota | None, taken: Mapping[str, int], needed: int, whom: str) -> Finding:
    if quota is None:
        return Finding(f"{region}: no vCPU quota is known that counts {whom}", "warning", console(region))
    return one_fits(region, _use(region, quota, taken), needed, whom)


def _any(region: str, found: Sequence[Quota], taken: Mapping[str, int]) -> Iterator[Finding]:
    """Without a fleet file: may a dispatcher come up, and what may spot hosts be?"""
    standard = next((q for q in found if q.market is Market.ON_DEMAND and "standard" in q.name.lower()), None)
    yield _one(region, standard, taken, SMALL, "a dispatcher")
    for quota in found:
        gpus = quota.market is Market.SPOT and quota.families & set(ACCELERATED)
        if quota.market is not Market.SPOT or not (gpus or "standard" in quota.name.lower()):
            continue
        state = f"{region}: {_use(region, quota, taken).state}"
        if quota.vcpus > taken[quota.name]:
            yield Finding(state)
        else:
            yield Finding(f"{state}: no spot host of this family can be launched", "warning",
                          how_to_raise(region, quota, max(16, 2 * taken[quota.name])))


def how_to_raise(region: str, quota: Quota, vcpus: int) -> str:
    """Explain two ways to raise the quota; a person at AWS may look at it, which takes from minutes to days."""
    return (f"{console(region)}/{quota.code}   (`Request increase`; AWS answers in minutes to days)\n"
            f"or: aws service-quotas request-service-quota-increase --region {region} --service-code ec2 "
            f"--quota-code {quota.code} --desired-value {vcpus}")


def console(region: str) -> str:
    return f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
