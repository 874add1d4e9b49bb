"""Do the vCPU quotas of a region hold a fleet? What each allows, what is used of it, and how it is raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spotfleet.model import Market, Nodes, Offer
from spotfleet.providers import Finding
from spotfleet.providers.aws import quotas
from spotfleet.providers.aws.quotas import Quota
from spotfleet.providers.aws.session import Account

SMALL = 2  # vCPUs of a dispatcher's machine
ACCELERATED = ("p", "p2", "p3", "p4", "p5", "p6", "g", "vt")
SHOWN = ("standard", *ACCELERATED)


@dataclass(frozen=True)
class Share:
    """What one quota has for a fleet."""

    quota: Quota
    used: int  # by others
    each: int  # vCPUs of the smallest machine that would do
    kinds: tuple[str, ...]

    @property
    def hosts(self) -> int:
        return max(0, self.quota.vcpus - self.used) // self.each


def findings(account: Account, region: str, hosts: Sequence[Offer], dispatcher: Sequence[Offer], nodes: Nodes | None,
             fleet: str) -> Iterator[Finding]:
    """`nodes` None: of any fleet. `fleet`'s own machines are not counted as used."""
    found = quotas.quotas(account, region)
    used = quotas.used(account, region, found, fleet)
    if nodes is None:
        yield from _any(region, found, used)
        return
    cores = quotas.vcpus(account, region, {o.instance_type for o in (*hosts, *dispatcher)})
    if dispatcher:
        best = min(dispatcher, key=lambda o: o.price_micros_h)
        quota = quotas.of_type(found, best.instance_type, Market.ON_DEMAND)
        needed = cores.get(best.instance_type, SMALL)
        yield _one(region, quota, used, needed, f"the dispatcher ({best.instance_type})")
        if quota is not None:
            used = {**used, quota.name: used[quota.name] + needed}
    yield from hosts_fit(region, _shares(found, used, cores, hosts), nodes)
    for kind in sorted({o.instance_type for o in hosts if quotas.of_type(found, o.instance_type, o.market) is None}):
        yield Finding(f"{region}: no vCPU quota is known that counts {kind}", "warning", console(region))


def _shares(found: Sequence[Quota], used: Mapping[str, int], cores: Mapping[str, int],
            hosts: Sequence[Offer]) -> list[Share]:
    kinds: dict[Quota, set[str]] = {}
    for offer in hosts:
        if quota := quotas.of_type(found, offer.instance_type, offer.market):
            kinds.setdefault(quota, set()).add(offer.instance_type)
    return [Share(quota, used[quota.name], min(cores.get(k, 1) for k in names), tuple(sorted(names)))
            for quota, names in kinds.items()]


def hosts_fit(region: str, shares: Sequence[Share], nodes: Nodes) -> Iterator[Finding]:
    """The quotas add up: a fleet may have hosts of several families and markets."""
    together = sum(s.hosts for s in shares)
    for share in shares:
        needed = nodes.target * share.each
        kinds = ", ".join(share.kinds[:3]) + (" ..." if len(share.kinds) > 3 else "")
        much = "enough for" if share.hosts >= nodes.target else f"room for {share.hosts} of"
        room = f"{much} {nodes.target} hosts of {kinds} ({share.each} vCPUs each)"
        what = f"{region}: {_state(share.quota, share.used)}: {room}"
        if share.hosts >= nodes.target or together >= nodes.target:
            yield Finding(what)
        else:
            level = "warning" if together >= nodes.min else "blocker"
            yield Finding(what, level, raise_it(region, share.quota, share.used + needed))


def _one(region: str, quota: Quota | None, used: Mapping[str, int], needed: int, whom: str) -> Finding:
    if quota is None:
        return Finding(f"{region}: no vCPU quota is known that counts {whom}", "warning", console(region))
    what = f"{region}: {_state(quota, used[quota.name])}; {whom} needs {needed}"
    if quota.vcpus - used[quota.name] >= needed:
        return Finding(what)
    return Finding(what, "blocker", raise_it(region, quota, used[quota.name] + needed))


def _any(region: str, found: Sequence[Quota], used: Mapping[str, int]) -> Iterator[Finding]:
    """Without a fleet file: may a dispatcher come up, and what may spot hosts be?"""
    standard = next((q for q in found if q.market is Market.ON_DEMAND and "standard" in q.name.lower()), None)
    yield _one(region, standard, used, SMALL, "a dispatcher")
    for quota in found:
        gpus = quota.market is Market.SPOT and quota.families & set(ACCELERATED)
        if quota.market is not Market.SPOT or not (gpus or "standard" in quota.name.lower()):
            continue
        if quota.vcpus > used[quota.name]:
            yield Finding(f"{region}: {_state(quota, used[quota.name])}")
        else:
            yield Finding(f"{region}: {_state(quota, used[quota.name])}: no spot host of this family can be launched",
                          "warning", raise_it(region, quota, max(16, 2 * used[quota.name])))


def _state(quota: Quota, used: int) -> str:
    return f"'{quota.name}' allows {quota.vcpus} vCPUs, {used} are used"


def raise_it(region: str, quota: Quota, vcpus: int) -> str:
    """Two ways; a person at AWS may look at it, which takes from minutes to days."""
    return (f"{console(region)}/{quota.code}   (`Request increase`; AWS answers in minutes to days)\n"
            f"or: aws service-quotas request-service-quota-increase --region {region} --service-code ec2 "
            f"--quota-code {quota.code} --desired-value {vcpus}")


def console(region: str) -> str:
    return f"https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"
