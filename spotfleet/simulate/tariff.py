"""Prices of hosts in a simulation: the user's, else the record's, else the catalog's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from spotfleet.catalog import names
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, sources
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.providers.local.market.pools import default_rules
from spotfleet.simulate.values.trace import Trace

LOCAL = "local"


@dataclass(frozen=True)
class Tariff:
    instance_type: str
    spot: tuple[tuple[float, int], ...]  # (seconds since the record began, micro-dollars per hour)
    on_demand_micros_h: int
    by: str  # source of the prices


@dataclass(frozen=True)
class PriceOverrides:
    """Prices on the command line, micro-dollars per hour; 0: not given."""

    spot_micros_h: int = 0
    on_demand_micros_h: int = 0


def tariff(trace: Trace, spec: FleetSpec, catalog: Catalog, overrides: PriceOverrides = PriceOverrides()) -> Tariff:
    """Return the prices. Raises UsageError for machines in the fleet file that are nowhere sold, and for an unknown
    price."""
    need = next((n for n in spec.any_of if n.use_spot), spec.any_of[0])
    named = _named(need, spec, catalog)
    price = _nearest(named, trace, need) if named else _of_trace(trace, catalog)
    kind = price.machine.name if price is not None else need.instance_type or trace.instance_type
    same = kind in ("", trace.instance_type) or not trace.instance_type
    spot, spot_by = (((0.0, overrides.spot_micros_h),), "--price") if overrides.spot_micros_h else (
        (trace.prices, "the record") if trace.prices and same else ((), ""))
    full, full_by = (overrides.on_demand_micros_h, "--on-demand-price") if overrides.on_demand_micros_h else (
        (trace.on_demand_micros_h, "the record") if trace.on_demand_micros_h and same else (0, ""))
    dated = f"the catalog of {max((s.as_of for s in sources([price])), default='?')}" if price is not None else ""
    if price is not None and price.region != trace.region:
        dated += f", in {price.region}"
    if not spot and price is not None and price.spot_micros_h:
        spot, spot_by = ((0.0, price.spot_micros_h),), dated
    if not full and price is not None and price.on_demand_micros_h:
        full, full_by = price.on_demand_micros_h, dated
    if spec.provider == LOCAL and not (spot and full):
        spot, full, kind = _local(spot, full, need)
        spot_by, full_by = spot_by or "the local cloud", full_by or "the local cloud"
    for known, what, option in ((spot, "spot", "--price"), (full, "on demand", "--on-demand-price")):
        if not known:
            raise UsageError(f"{trace.name}: nobody says what {kind or 'a host'} costs {what}",
                             hint=f"give {option} in dollars per hour, or name a machine in the fleet file's resources")
    return Tariff(kind, spot, full, spot_by if spot_by == full_by else f"{spot_by}; on demand: {full_by}")


def _named(need: Need, spec: FleetSpec, catalog: Catalog) -> list[CatalogPrice]:
    """Return the prices of the fleet file's machine, wherever it is sold; [] if the file names no machine of a
    catalogued cloud."""
    if spec.provider not in names() or not (need.instance_type or need.accelerator):
        return []
    kind = Need(instance_type=need.instance_type, accelerator=need.accelerator,
                accelerator_count=need.accelerator_count)
    found = catalog.matching(kind, spec.provider)
    if found:
        return found
    word = need.instance_type or need.accelerator
    near = catalog.nearest(word)
    what = need.instance_type or f"{need.accelerator}:{need.accelerator_count or 1}"
    raise UsageError(f"resources: {spec.provider} sells no {what} that the catalog knows",
                     hint=f"did you mean {', '.join(near)}?" if near else "`spotfleet offers --all` lists what is sold")


def _nearest(found: list[CatalogPrice], trace: Trace, need: Need) -> CatalogPrice:
    """Return the price in the record's region if it is sold there, else in the fleet's, else in a region with a name
    that begins like the record's ("us-east", or "us"), else the cheapest."""
    both = [p for p in found if p.spot_micros_h and p.on_demand_micros_h] or found
    return min(both, key=lambda p: (p.region != trace.region, p.region != need.region, -_alike(p.region, trace.region),
                                    p.spot_micros_h or p.on_demand_micros_h, p.key))


def _alike(region: str, other: str) -> int:
    """Return the number of common words at the beginning of two region names: two for us-east-1 and us-east-2."""
    pairs = zip(re.findall(r"[a-z]+", region), re.findall(r"[a-z]+", other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _of_trace(trace: Trace, catalog: Catalog) -> CatalogPrice | None:
    if not trace.instance_type and not trace.accelerator:
        return None
    need = Need(instance_type=trace.instance_type, accelerator="" if trace.instance_type else trace.accelerator)
    found = catalog.matching(need, trace.provider)
    return _nearest(found, trace, need) if found else None


def _local(spot: tuple, full: int, need: Need) -> tuple[tuple[tuple[float, int], ...], int, str]:
    pools = default_rules().pools
    kind = need.instance_type or next((p.instance_type for p in pools if p.accelerator.casefold() ==
                                       need.accelerator.casefold()), pools[0].instance_type)
    own = [p for p in pools if p.instance_type == kind]
    prices = {p.market: p.base_micros_h for p in reversed(own)}
    by_market = {m.value: micros for m, micros in prices.items()}
    return (spot or (((0.0, by_market["spot"]),) if by_market else ()), full or by_market.get("on-demand", 0), kind)
