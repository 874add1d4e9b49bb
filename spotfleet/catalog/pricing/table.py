"""Text format of a catalog: one file per provider, the same in the package and in the user's folder. Pure.

    spotfleet-catalog,1,aws
    source,ID,NAME,AS_OF,LICENCE,URL,estimate or nothing
    machine,NAME,VCPUS,MEMORY_GIB,ACCELERATOR,COUNT
    price,NAME,REGION,ON_DEMAND,SOURCE,SPOT,SOURCE,BAND,SOURCE,ZONES
    rates,REGION or nothing,DISK,ADDRESS,ZONE,REGION,SOURCE

The format is comma-separated. Prices are in millionths of a dollar per hour, empty if unknown. ZONES are separated by
blanks, without the region's name in front. Lines of a kind may have any order, but a line stands after the lines that
it refers to.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from spotfleet.catalog.pricing.useful import BANDS
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source, sources
from spotfleet.model import Rates

MAGIC, VERSION = "spotfleet-catalog", "1"


class CatalogError(ValueError):
    """Error for a text that is no catalog; it names the line."""


def parsed(text: str) -> Catalog:
    """Parse a catalog. Raises CatalogError, also for a half-written text: the last line counts the others."""
    lines = list(csv.reader(io.StringIO(text)))
    if not lines or lines[0][:2] != [MAGIC, VERSION] or len(lines[0]) != 3:
        raise CatalogError(f"line 1: expected {MAGIC},{VERSION},PROVIDER")
    if lines[-1] != ["end", str(len(lines) - 2)]:
        raise CatalogError(f"line {len(lines)}: it is cut off")
    provider = lines[0][2]
    known: dict[str, Source] = {}
    machines: dict[str, MachineType] = {}
    prices: list[CatalogPrice] = []
    rates: dict[tuple[str, str], Rates] = {}
    for number, line in enumerate(lines[1:-1], 2):
        try:
            match line:
                case ["source", name, *rest]:
                    known[name] = Source(rest[0], rest[1], rest[2], rest[3], rest[4] == "estimate")
                case ["machine", name, vcpus, memory, accelerator, count]:
                    machines[name] = MachineType(provider, name, int(vcpus), float(memory), accelerator,
                                                 int(count or 0))
                case ["price", name, region, *rest]:
                    prices.append(_price(machines[name], region, rest, known))
                case ["rates", region, disk, address, zone, other, source]:
                    rates[provider, region] = Rates(int(disk), int(address), int(zone), int(other),
                                                    known[source].name, known[source].as_of)
                case _:
                    raise ValueError("unknown line")
        except (ValueError, KeyError, IndexError) as error:
            raise CatalogError(f"line {number}: {error!s:.80}: {','.join(line)[:80]}") from error
    return Catalog(tuple(prices), rates)


def _price(machine: MachineType, region: str, rest: list[str], known: dict[str, Source]) -> CatalogPrice:
    on_demand, on_demand_by, spot, spot_by, band, band_by, zones = rest
    level = int(band) if band else None
    if level is not None and not 0 <= level < len(BANDS):
        raise ValueError(f"no interruption band {band}")
    if min(int(on_demand or 0), int(spot or 0)) < 0:
        raise ValueError("a price below 0")
    return CatalogPrice(machine, region, int(on_demand or 0), int(spot or 0),
                        known[on_demand_by] if on_demand else None,
                 known[spot_by] if spot else None, level, known[band_by] if band else None,
                 tuple(region + zone for zone in zones.split()))


def written(provider: str, catalog: Catalog) -> str:
    """Return the text of `provider`'s part of `catalog`; `parsed` is the inverse."""
    prices = sorted((p for p in catalog.prices if p.machine.provider == provider), key=lambda p: p.key)
    rates = {region: r for (of, region), r in sorted(catalog.region_rates.items()) if of == provider}
    found = {**{s: 0 for s in sources(prices)}, **{Source(r.source, r.as_of): 0 for r in rates.values()}}
    ids = {source: str(i) for i, source in enumerate(sorted(found, key=lambda s: (s.name, s.as_of, s.url)))}
    lines: list[Iterable[object]] = [
        ["source", i, s.name, s.as_of, s.licence, s.url, "estimate" if s.estimate else ""] for s, i in ids.items()]
    machines = {p.machine.name: p.machine for p in prices}
    lines += [["machine", m.name, m.vcpus, f"{m.memory_gib:g}", m.accelerator, m.count or ""]
              for m in machines.values()]
    lines += [["price", p.machine.name, p.region, *_figure(p.on_demand_micros_h, p.on_demand_source, ids),
               *_figure(p.spot_micros_h, p.spot_source, ids),
               "" if p.band is None else p.band, "" if p.band_source is None else ids[p.band_source],
               " ".join(z.removeprefix(p.region) for z in p.zones)] for p in prices]
    lines += [["rates", region, r.disk_micros_gib_month, r.address_micros_h, r.zone_micros_gib, r.region_micros_gib,
               ids[Source(r.source, r.as_of)]] for region, r in rates.items()]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([MAGIC, VERSION, provider])
    writer.writerows(lines)
    writer.writerow(["end", len(lines)])
    return out.getvalue()


def _figure(micros: int, source: Source | None, ids: dict[Source, str]) -> list[object]:
    return [micros, ids[source]] if micros and source is not None else ["", ""]
