"""Facts about instance types, as EC2 describes them: requested when a need comes up, and cached for long.

A need names a type, or accelerators, or neither. Accelerators are searched among the types called g* and p*, EC2's
machines with GPUs: a search of all types would take ten pages. An empty need means a small CPU machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spotfleet.model import Market, Need
from spotfleet.providers.aws.session import Account
from spotfleet.providers.kit.mapping import types as kit
from spotfleet.providers.kit.mapping.types import OfferedType, same_accelerator
from spotfleet.words import did_you_mean

FACTS_S = 12 * 3600.0
ZONES_S = 3600.0  # a type may become available in a zone
FAILED_S = 60.0
FILTER_VALUES = 100  # at most 200 values per filter; answers of 100 types fit one page
WITH_GPUS = ("g*", "p*")
# For an empty need. About 2 vCPUs; all of them build the same software.
FOR_DISPATCHER = ("t3.small", "t3a.small", "t3.medium", "t3a.medium", "m6i.large", "m5.large")
# No T types for hosts: training there costs CPU credits on top of the price, or waits for them.
FOR_HOSTS = ("m5.large", "m5a.large", "m6i.large", "m6a.large", "m7i.large", "c5.xlarge", "c6i.xlarge")
# For a need with a size and without accelerators: families whose sizes differ by vCPUs and memory alone.
SIZED = ("c5.*", "c6i.*", "m5.*", "m6i.*", "m7i.*", "r5.*", "r6i.*",
         "c7a.medium", "m7a.medium", "r7a.medium")
# Families with GPUs that the default image drives: "supported_ec2_instances" in the release notes of AWS's "Deep
# Learning Base OSS Nvidia Driver GPU AMI". NVIDIA's open kernel modules need Turing or newer (no p2, p3, g3), shares of
# a GPU (g6f, gr6f) another driver, and g4ad is AMD's.
DRIVEN = frozenset({"g4dn", "g5", "g6", "g6e", "gr6", "g7", "g7e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200",
                    "p6-b300"})
MEMORY_GB = {"A100": 40, "V100": 16}  # for the accelerator with the bare name; others carry it in theirs: A100-80GB


@dataclass(frozen=True)
class TypeFacts(OfferedType):
    """Facts about one instance type. `clusters`: it may join a cluster placement group."""

    efa_cards: tuple[int, ...] = ()  # indexes of the network cards that take one EFA interface each
    burstable: bool = False  # its CPU credits may cost extra

    @property
    def driven(self) -> bool:
        """Return whether the default image has a driver for its GPUs."""
        return not self.gpus or self.name.partition(".")[0] in DRIVEN


def undriven(instance_type: str) -> str:
    """Explain that the default image has no driver for the GPUs of this type; "" if it has one, or if there are none.
    """
    family = instance_type.partition(".")[0]
    if family in DRIVEN or not re.fullmatch(r"(g|p|gr)\d.*", family):
        return ""
    return (f"the default image has no driver for the GPUs of {instance_type}, which are too old for it: name an image "
            "that has one under `resources.image_id`")


def parsed(item: Mapping[str, Any]) -> TypeFacts:
    """Parse one item of DescribeInstanceTypes."""
    devices = item.get("GpuInfo", {}).get("Gpus") or []
    network = item.get("NetworkInfo", {})
    first = devices[0] if devices else {}
    usage = item.get("SupportedUsageClasses", [])
    return TypeFacts(
        name=item["InstanceType"],
        vcpus=item.get("VCpuInfo", {}).get("DefaultVCpus", 0),
        memory_mib=item.get("MemoryInfo", {}).get("SizeInMiB", 0),
        gpus=sum(d.get("LogicalGpuCount") or d.get("Count") or 0 for d in devices),
        accelerator=accelerator_name(first) if first else "",
        architectures=tuple(item.get("ProcessorInfo", {}).get("SupportedArchitectures", [])),
        markets=tuple(m for m in Market if m.value in usage),
        clusters="cluster" in item.get("PlacementGroupInfo", {}).get("SupportedStrategies", []),
        efa_cards=_efa_cards(network),
        burstable=item.get("BurstablePerformanceSupported", False),
    )


def _efa_cards(network: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the cards for EFA, as EC2 describes each: card 0 of a p6-b300 takes none, and an i7ie has two cards for
    one interface. Without descriptions of cards it is the first ones."""
    if not network.get("EfaSupported"):
        return ()
    most = max(1, network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1))
    cards = [c for c in network.get("NetworkCards") or () if "InterfaceTypes" in c]
    able = sorted(c["NetworkCardIndex"] for c in cards if {"efa", "efa-only"} & set(c["InterfaceTypes"]))
    return tuple(able[:most]) if cards else tuple(range(min(most, network.get("MaximumNetworkCards", 1))))


def accelerator_name(device: Mapping[str, Any]) -> str:
    """Return the users' name for an item of GpuInfo.Gpus: "A10G", "A100-80GB", "L4-3GB" for an eighth of an L4."""
    name = re.sub(r"^((NVIDIA|AMD|Tesla)\s+)+", "", str(device.get("Name", "")).strip(), flags=re.I)
    name = re.sub(r"[\s_]+", "-", re.sub(r"\bServer\s+", "", name))
    mib = device.get("MemoryInfo", {}).get("SizeInMiB", 0)
    gigabytes = round(mib / 1024)
    usual = MEMORY_GB.get(name, gigabytes)
    if gigabytes and (gigabytes != usual or 0 < device.get("GpuPartitionSize", 1) < 1):
        name += f"-{gigabytes}GB"
    return name


def facts(account: Account, region: str, types: Iterable[str]) -> dict[str, TypeFacts]:
    """Return the facts of those `types` that the region knows."""
    found: dict[str, TypeFacts] = {}
    for some in _chunks(sorted(set(types))):
        found.update(_described(account, region, some))
    return found


def with_gpus(account: Account, region: str) -> dict[str, TypeFacts]:
    """Return every type of the region with an accelerator."""
    return {n: f for n, f in _described(account, region, WITH_GPUS).items() if f.gpus}


def fitting(account: Account, region: str, need: Need) -> dict[str, TypeFacts]:
    """Return the region's types that satisfy `need`, at any price and in any zone."""
    if need.instance_type:
        found = facts(account, region, [need.instance_type])
    elif need.accelerator or need.accelerator_count:
        found = with_gpus(account, region)
    elif need.sized:
        found = smallest(kit.fitting(need, _described(account, region, SIZED).values()))
    else:
        found = facts(account, region, FOR_HOSTS if need.use_spot else FOR_DISPATCHER)
    return {n: f for n, f in kit.fitting(need, found.values()).items() if f.driven or account.settings.spec.image}


def smallest(types: Mapping[str, TypeFacts]) -> dict[str, TypeFacts]:
    """Return the smallest type of each family: larger ones cost more, and each needs requests for its prices."""
    found: dict[str, TypeFacts] = {}
    for one in sorted(types.values(), key=lambda t: (t.vcpus, t.memory_mib, t.name)):
        found.setdefault(one.name.partition(".")[0], one)
    return {one.name: one for one in found.values()}


def zones(account: Account, region: str, types: Sequence[str]) -> dict[str, frozenset[str]]:
    """Return type -> the zones of the region that sell it."""
    found: dict[str, set[str]] = {}
    for some in _chunks(sorted(set(types))):
        for kind, zone in account.cached(("offerings", region, some), ZONES_S, lambda s=some: _offerings(
                account, region, s), failed_s=FAILED_S, stale_s=FACTS_S):
            found.setdefault(kind, set()).add(zone)
    return {kind: frozenset(where) for kind, where in found.items()}


def _offerings(account: Account, region: str, types: tuple[str, ...]) -> list[tuple[str, str]]:
    pages = account.client("ec2", region).pages(
        "describe_instance_type_offerings", "InstanceTypeOfferings", LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": list(types)}])
    return [(item["InstanceType"], item["Location"]) for item in pages]


def _described(account: Account, region: str, patterns: tuple[str, ...]) -> dict[str, TypeFacts]:
    def ask() -> dict[str, TypeFacts]:
        pages = account.client("ec2", region).pages(
            "describe_instance_types", "InstanceTypes", Filters=[{"Name": "instance-type", "Values": list(patterns)}])
        return {item["InstanceType"]: parsed(item) for item in pages}

    return account.cached(("types", region, patterns), FACTS_S, ask, failed_s=FAILED_S)


def _chunks(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(names[i:i + FILTER_VALUES]) for i in range(0, len(names), FILTER_VALUES)]


def unknown(account: Account, needs: Sequence[Need]) -> str:
    """Name the words in `needs` that match nothing on sale in the configured regions, with the nearest valid ones.

    Returns "" if all are known.
    """
    problems = [line for need in needs for line in _unknown(account, need)]
    return "; ".join(dict.fromkeys(problems))


def _unknown(account: Account, need: Need) -> list[str]:
    regions = _regions(account, need)
    if not regions:
        known = list(account.all_regions())
        word = need.region or need.zone
        return [f"region '{word}' is none of those that are enabled for the account{did_you_mean(word, known)}"]
    if not any(region in account.regions for region in regions):
        return [f"region '{need.region or need.zone}' is none of `aws.regions`: {', '.join(account.regions)}"]
    where = " and ".join(regions)
    if need.instance_type:
        sold = sorted({kind for region in regions for kind in _all_names(account, region)})
        if words := kit.unknown_type(need, sold, where):
            return [words]
        types = [f for region in regions for f in facts(account, region, [need.instance_type]).values()]
    elif need.sized and not need.accelerator and not need.accelerator_count:
        types = [f for region in regions for f in _described(account, region, SIZED).values()]
    else:
        types = [f for region in regions for f in with_gpus(account, region).values()]
    if not account.settings.spec.image:
        if undriven := _undriven(need, types):
            return [undriven]
        types = [f for f in types if f.driven]
    return kit.problems(need, types, where)


def _undriven(need: Need, types: Sequence[TypeFacts]) -> str:
    """Explain that the default image drives none of the GPUs that are meant; "" if it does, or if nothing is meant."""
    meant = [f for f in types if need.instance_type or (
        need.accelerator and f.x86_64 and same_accelerator(need.accelerator, f.accelerator))]
    if not meant or any(f.driven for f in meant):
        return ""
    what = f"instance_type '{need.instance_type}'" if need.instance_type else f"accelerators '{need.accelerator}'"
    return (f"{what} has no driver on the default image, which is for {', '.join(sorted(DRIVEN))}: name an image that "
            "has one under `aws.image`")


def _regions(account: Account, need: Need) -> tuple[str, ...]:
    everywhere = account.all_regions()
    if need.region or need.zone:
        return tuple(r for r in everywhere if (r == need.region if need.region else need.zone.startswith(r)))
    return tuple(r for r in account.regions if r in everywhere)


def _all_names(account: Account, region: str) -> list[str]:
    """List the names of all types that the region sells."""
    def ask() -> list[str]:
        pages = account.client("ec2", region).pages(
            "describe_instance_type_offerings", "InstanceTypeOfferings", LocationType="region")
        return [item["InstanceType"] for item in pages]

    return account.cached(("names", region), FACTS_S, ask)
