"""Write the catalog that the package carries: `python scripts/build_catalog.py FOLDER [--libcloud pricing.json]`.

FOLDER holds two files that are not ours and are not kept here: `gpu_catalog.csv` (a row per type and zone, each naming
its source) and `spot-advisor-data.json` (AWS Spot Instance Advisor, as github.com/alexei-led/spotinfo keeps it). Of the
first, only rows whose source has a licence are used. `pricing.json` is in apache-libcloud's wheel (libcloud/data):
prices of small CPU machines. `catalog_facts.csv` beside this script: what was read off a source by hand.

libcloud confuses shared and dedicated tenancy of EC2, the latter 6 to 10 % dearer. Within a family, prices of a region
are those of us-east-1 times one factor: rows that are more than half a percent above the lowest factor of their family
are left out, and the only row of a family with them unless it costs what us-east-1 asks. By the same rule, what Spot
Instance Advisor knows a region to sell and libcloud does not gets the price in us-east-1 times its family's factor,
marked as an estimate.

The price calculator for GCP lacks the GPUs of a3-megagpu-8g in some regions: rows below a fifth of their type's median
on demand are left out.

`--extend` keeps the package's present rows and adds only what `catalog_facts.csv` has besides; no pricing.json is
needed.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import median

from spotfleet.catalog.pricing.table import parsed, written
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source
from spotfleet.model import Rates

PROVIDERS = ("aws", "azure", "gcp")
HERE = Path(__file__).parent
OUT = HERE.parent / "spotfleet" / "catalog" / "data"
APACHE = "Apache-2.0"
SOURCES = {
    "karpenter-provider-aws": Source("karpenter-provider-aws", "2026-07-20", APACHE,
                                     "https://github.com/aws/karpenter-provider-aws"),
    "karpenter-2026-01": Source("karpenter-provider-aws", "2026-01-19", APACHE,
                                "https://github.com/aws/karpenter-provider-aws"),
    "apache-libcloud 3.9.1": Source("apache-libcloud 3.9.1", "2025-03-02", APACHE,
                                    "https://github.com/apache/libcloud"),
    "gcloud-calculator pricing.yml": Source("Cyclenerd google-cloud-pricing-cost-calculator", "2026-07-30", APACHE,
                                            "https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator"),
    "karpenter-provider-azure": Source("karpenter-provider-azure", "2026-06-18", APACHE,
                                       "https://github.com/Azure/karpenter-provider-azure"),
}
ADVISOR = Source("AWS Spot Instance Advisor, by spotinfo", "2025-06-28", APACHE,
                 "https://github.com/alexei-led/spotinfo")
AVERAGE = replace(ADVISOR, name="on demand less the Spot Instance Advisor's average saving, by spotinfo", estimate=True)
BY_FACTOR = Source("us-east-1's price x the factor of family and region by apache-libcloud 3.9.1", "2025-03-02", APACHE,
                   "https://github.com/apache/libcloud", estimate=True)
LEFT_OUT = ("K80", "Trainium")  # no PyTorch of ours runs there
LACKING = 5
LIKE_FACTOR = Decimal("1.005")
SIZES = {"small": 1, "medium": 2, "large": 4, "xlarge": 8}
AWS_CPU = ("t3.small", "t3.medium", "t3a.small", "t3a.medium", "m5.large", "m5a.large", "m6a.large", "m7i.large",
           "c5.xlarge", "c6i.xlarge")
AZURE_CPU = {"standardb2s": MachineType("azure", "Standard_B2s", 2, 4), "standardd2sv3": MachineType(
    "azure", "Standard_D2s_v3", 2, 8), "standardd2asv4": MachineType("azure", "Standard_D2as_v4", 2, 8)}
CLOSED = ("usgov", "germanycentral", "germanynortheast")
GCP_CPU = {MachineType("gcp", "e2-small", 2, 2): (Decimal("0.5"), 2),
           MachineType("gcp", "e2-medium", 2, 4): (Decimal(1), 4),
           MachineType("gcp", "e2-standard-2", 2, 8): (Decimal(2), 8)}  # cores that are paid for, GiB
# GiB-month of the disk that fleets use, hour of a public IPv4 address, GiB between zones (both ends), between regions.
RATES = {
    ("aws", ""): Rates(80_000, 5_000, 20_000, 20_000, "AWS price pages, us-east-1: EBS gp3, VPC public IPv4, EC2 data "
                       "transfer (0.01 each direction between zones)", "2026-06-02"),
    ("gcp", ""): Rates(100_000, 5_000, 10_000, 20_000, "Google Cloud price pages, us-central1: balanced persistent "
                       "disk, external IP in use, VM-VM transfer within North America", "2024-02-01"),
    ("azure", ""): Rates(154_000, 5_000, 0, 20_000, "Azure price pages, East US: Premium SSD P10 (19.71 for 128 GiB), "
                         "standard public IPv4, bandwidth within a continent; between zones free", "2023-08-16"),
}


def micros(dollars: str | float | Decimal) -> int:
    return int((Decimal(str(dollars)) * 1_000_000).to_integral_value(ROUND_HALF_UP))


def licensed(folder: Path) -> Iterator[CatalogPrice]:
    """Rows of gpu_catalog.csv from licensed sources; zones of one region with one price are one row."""
    groups: dict[tuple[str, str, str], CatalogPrice] = {}
    with (folder / "gpu_catalog.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            source = SOURCES.get(row["price_src"])
            if source is None or not row["price_usd_h"] or row["accelerator"] in LEFT_OUT:
                continue
            machine = MachineType(row["provider"], row["instance_type"], int(row["vcpu"]), float(row["mem_gib"]),
                              row["accelerator"], int(row["count"]))
            by = SOURCES.get(row["spot_src"])
            price = CatalogPrice(machine, row["region"], micros(row["price_usd_h"]),
                          micros(row["spot_usd_h"]) if by and row["spot_usd_h"] else 0, source,
                          by if row["spot_usd_h"] else None, zones=(row["zone"],) if row["zone"] else ())
            before = groups.get(price.key)
            zones = tuple(sorted({*price.zones, *(before.zones if before else ())}))
            groups[price.key] = replace(price, zones=zones)
    yield from groups.values()


def by_hand() -> Iterator[CatalogPrice]:
    with (HERE / "catalog_facts.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield CatalogPrice(MachineType(row["provider"], row["type"], int(row["vcpus"]), float(row["memory_gib"]),
                                row["accelerator"], int(row["count"] or 0)),
                        row["region"], micros(row["on_demand_usd_h"]), 0, SOURCES[row["source"]])


def from_libcloud(path: Path) -> Iterator[CatalogPrice]:
    """Small CPU machines of all three."""
    compute, source = json.loads(path.read_text())["compute"], SOURCES["apache-libcloud 3.9.1"]
    machines = {p.machine.name: p.machine for p in by_hand()}
    families = {name.partition(".")[0] for name in AWS_CPU}
    for name, regions in compute["ec2_linux"].items():
        if name.partition(".")[0] in families and name.partition(".")[2] in SIZES:
            for region, dollars in regions.items():
                machine = machines.get(name, MachineType("aws", name))
                if dollars and region.count("-") == 2 and not region.startswith("us-gov"):
                    yield CatalogPrice(machine, region, micros(dollars), 0, source)
    for name, machine in AZURE_CPU.items():
        for region, dollars in compute["azure_linux"].get(name, {}).items():
            if dollars and not region.startswith(CLOSED):
                yield CatalogPrice(machine, region, micros(dollars), 0, source)
    cores, memory = (compute["gce_instances"]["e2"][part]["on_demand"] for part in ("cpu", "ram"))
    for machine, (count, gib) in GCP_CPU.items():
        for region in cores:
            each = count * Decimal(str(cores[region]["price"])) + gib * Decimal(str(memory[region]["price"]))
            yield CatalogPrice(machine, region, micros(each), 0, source)


def of_shared_tenancy(prices: list[CatalogPrice]) -> list[CatalogPrice]:
    """Without those of libcloud for EC2 that are dedicated tenancy's, or may be; see above."""
    base = {p.machine.name: p.on_demand_micros_h for p in prices
            if p.region == "us-east-1" and p.on_demand_source != SOURCES["apache-libcloud 3.9.1"]}
    factors: dict[tuple[str, str], dict[str, Decimal]] = defaultdict(dict)
    for p in suspects(prices):
        if reference := base.get(p.machine.name) or _by_size(p.machine.name, base):
            factors[family(p), p.region][p.machine.name] = Decimal(p.on_demand_micros_h) / Decimal(reference)
    dropped = set()
    for p in suspects(prices):
        mine = factors[family(p), p.region]
        factor = mine.get(p.machine.name)
        if factor is None or factor > LIKE_FACTOR * min([*mine.values(), *([] if len(mine) > 1 else [Decimal(1)])]):
            dropped.add(p.key)
    return [p for p in prices if p.key not in dropped or p.on_demand_source != SOURCES["apache-libcloud 3.9.1"]]


def by_factor(prices: list[CatalogPrice], folder: Path) -> Iterator[CatalogPrice]:
    """What the regions sell besides, as Spot Instance Advisor says, in families whose factor there is known."""
    advisor = json.loads((folder / "spot-advisor-data.json").read_text())["spot_advisor"]
    base = {p.machine.name: p for p in prices if p.machine.provider == "aws" and p.region == "us-east-1"}
    have = {p.key for p in prices}
    factors: dict[tuple[str, str], list[Decimal]] = defaultdict(list)
    for p in suspects(prices):
        if p.machine.name in base:
            factors[family(p), p.region].append(
                Decimal(p.on_demand_micros_h) / base[p.machine.name].on_demand_micros_h)
    for (name, region), some in factors.items():
        for p in base.values():
            sold = p.machine.name in advisor.get(region, {}).get("Linux", {})
            if family(p) == name and sold and ("aws", p.machine.name, region) not in have:
                yield CatalogPrice(p.machine, region, int(p.on_demand_micros_h * min(some) + Decimal("0.5")), 0,
                                   BY_FACTOR)


def whole(prices: list[CatalogPrice]) -> list[CatalogPrice]:
    """Without machines that lack parts; see above."""
    by_type: dict[tuple[str, str], list[int]] = defaultdict(list)
    for p in prices:
        by_type[p.key[:2]].append(p.on_demand_micros_h)
    return [p for p in prices if p.on_demand_micros_h > median(by_type[p.key[:2]]) / LACKING]


def suspects(prices: list[CatalogPrice]) -> list[CatalogPrice]:
    return [p for p in prices
            if p.machine.provider == "aws" and p.on_demand_source == SOURCES["apache-libcloud 3.9.1"]]


def family(price: CatalogPrice) -> str:
    return price.machine.name.partition(".")[0]


def _by_size(name: str, base: Mapping[str, int]) -> Decimal | None:
    """Of CPU families, whose prices are proportional to their size."""
    of, _, size = name.partition(".")
    for known, price in base.items():
        if known.partition(".")[0] == of and known.partition(".")[2] in SIZES and size in SIZES:
            return Decimal(price * SIZES[size]) / SIZES[known.partition(".")[2]]
    return None


def advised(prices: list[CatalogPrice], folder: Path) -> Iterator[CatalogPrice]:
    """With band and estimated spot price from the Spot Instance Advisor, where AWS sells the type as spot."""
    advisor = json.loads((folder / "spot-advisor-data.json").read_text())["spot_advisor"]
    for p in prices:
        said = advisor.get(p.region, {}).get("Linux", {}).get(p.machine.name) if p.machine.provider == "aws" else None
        if said is None:
            yield p
        else:
            spot = micros(Decimal(p.on_demand_micros_h) * (100 - said["s"]) / 100 / 1_000_000)
            yield replace(p, spot_micros_h=spot, spot_source=AVERAGE, band=said["r"], band_source=ADVISOR)


def extend(folder: Path, out: Path) -> None:
    """Add the types of `catalog_facts.csv` that the package lacks, in us-east-1 and by factor in other regions."""
    for provider in PROVIDERS:
        present = parsed((OUT / f"{provider}.csv").read_text())
        added = [p for p in by_hand() if p.key not in present.by_key and p.machine.provider == provider]
        names = {p.machine.name for p in added}
        added += [p for p in by_factor([*present.prices, *added], folder) if p.machine.name in names]
        catalog = Catalog((*present.prices, *advised(added, folder)), present.region_rates)
        (out / f"{provider}.csv").write_text(written(provider, catalog))
        print(f"{provider}: {len(added)} prices of {len(names)} types added")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--libcloud", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--extend", action="store_true")
    given = parser.parse_args()
    if given.extend:
        return extend(given.folder, given.out)
    everything = [*by_hand(), *licensed(given.folder), *(from_libcloud(given.libcloud) if given.libcloud else ())]
    newest: dict[tuple[str, str, str], CatalogPrice] = {}
    for p in of_shared_tenancy(everything):
        if p.key not in newest or newest[p.key].on_demand_source.as_of < p.on_demand_source.as_of:
            newest[p.key] = p
    wanted = whole([p for p in newest.values() if p.machine.vcpus])  # other sizes only tell their family's factor
    wanted += by_factor(wanted, given.folder)
    catalog = Catalog(tuple(advised(wanted, given.folder)), RATES)
    given.out.mkdir(parents=True, exist_ok=True)
    for provider in PROVIDERS:
        text = written(provider, catalog)
        parsed(text)
        (given.out / f"{provider}.csv").write_text(text)
        print(f"{provider}: {text.count(chr(10) + 'price,')} prices, {len(text)} bytes")


if __name__ == "__main__":
    main()
