"""What hosts cost in a simulation: by the user's word, the record's, or the catalog's, in this order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from spotfleet.catalog.values import Catalog, Price, sources
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.providers.local.pools import default_rules
from spotfleet.simulate.trace import Trace

LOCAL = "local"


@dataclass(frozen=True)
class Tariff:
    instance_type: str
    spot: tuple[tuple[float, int], ...]  # (seconds since the record began, micro-dollars per hour)
    on_demand_micros_h: int
    by: str  # whose word it is


@dataclass(frozen=True)
class Said:
    """Prices on the command line, micro-dollars per hour; 0: not said."""

    spot_micros_h: int = 0
    on_demand_micros_h: int = 0


def tariff(trace: Trace, spec: FleetSpec, catalog: Catalog, said: Said = Said()) -> Tariff:
    """Raises UsageError for machines of the fleet file that nobody sells, and where a price is not known."""
    wish = next((n for n in spec.any_of if n.use_spot), spec.any_of[0])
    named = _named(wish, spec, catalog)
    price = _nearest(named, trace, wish) if named else _of_trace(trace, catalog)
    kind = price.machine.name if price is not None else wish.instance_type or trace.instance_type
    same = kind in ("", trace.instance_type) or not trace.instance_type
    spot, spot_by = (((0.0, said.spot_micros_h),), "--price") if said.spot_micros_h else (
        (trace.prices, "the record") if trace.prices and same else ((), ""))
    full, full_by = (said.on_demand_micros_h, "--on-demand-price") if said.on_demand_micros_h else (
        (trace.on_demand_micros_h, "the record") if trace.on_demand_micros_h and same else (0, ""))
    dated = f"the catalog of {max((s.as_of for s in sources([price])), default='?')}" if price is not None else ""
    if price is not None and price.region != trace.region:
        dated += f", in {price.region}"
    if not spot and price is not None and price.spot_micros_h:
        spot, spot_by = ((0.0, price.spot_micros_h),), dated
    if not full and price is not None and price.on_demand_micros_h:
        full, full_by = price.on_demand_micros_h, dated
    if spec.provider == LOCAL and not (spot and full):
        spot, full, kind = _local(spot, full, wish)
        spot_by, full_by = spot_by or "the local cloud", full_by or "the local cloud"
    for known, what, option in ((spot, "spot", "--price"), (full, "on demand", "--on-demand-price")):
        if not known:
            raise UsageError(f"{trace.name}: nobody says what {kind or 'a host'} costs {what}",
                             hint=f"give {option} in dollars per hour, or name a machine in the fleet file's resources")
    return Tariff(kind, spot, full, spot_by if spot_by == full_by else f"{spot_by}; on demand: {full_by}")


def _named(wish: Need, spec: FleetSpec, catalog: Catalog) -> list[Price]:
    """What the fleet file asks for, wherever it is sold; [] if it names no machine of a catalogued cloud."""
    if spec.provider not in ("aws", "gcp", "azure") or not (wish.instance_type or wish.accelerator):
        return []
    kind = Need(instance_type=wish.instance_type, accelerator=wish.accelerator,
                accelerator_count=wish.accelerator_count)
    found = catalog.matching(kind, spec.provider)
    if found:
        return found
    word = wish.instance_type or wish.accelerator
    near = catalog.nearest(word)
    what = wish.instance_type or f"{wish.accelerator}:{wish.accelerator_count or 1}"
    raise UsageError(f"resources: {spec.provider} sells no {what} that the catalog knows",
                     hint=f"did you mean {', '.join(near)}?" if near else "`spotfleet offers --all` lists what is sold")


def _nearest(found: list[Price], trace: Trace, wish: Need) -> Price:
    """In the record's region if it is sold there, else in the fleet's, else in one whose name begins like the record's
    ("us-east", or "us"), else where it costs least."""
    both = [p for p in found if p.spot_micros_h and p.on_demand_micros_h] or found
    return min(both, key=lambda p: (p.region != trace.region, p.region != wish.region, -_alike(p.region, trace.region),
                                    p.spot_micros_h or p.on_demand_micros_h, p.key))


def _alike(region: str, other: str) -> int:
    """How many words the names of two regions have in common at their beginning: of us-east-1 and us-east-2 two."""
    pairs = zip(re.findall(r"[a-z]+", region), re.findall(r"[a-z]+", other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _of_trace(trace: Trace, catalog: Catalog) -> Price | None:
    if not trace.instance_type and not trace.accelerator:
        return None
    need = Need(instance_type=trace.instance_type, accelerator="" if trace.instance_type else trace.accelerator)
    found = catalog.matching(need, trace.provider)
    return _nearest(found, trace, need) if found else None


def _local(spot: tuple, full: int, wish: Need) -> tuple[tuple[tuple[float, int], ...], int, str]:
    pools = default_rules().pools
    kind = wish.instance_type or next((p.instance_type for p in pools if p.accelerator.casefold() ==
                                       wish.accelerator.casefold()), pools[0].instance_type)
    mine = [p for p in pools if p.instance_type == kind]
    prices = {p.market: p.base_micros_h for p in reversed(mine)}
    by_market = {m.value: micros for m, micros in prices.items()}
    return (spot or (((0.0, by_market["spot"]),) if by_market else ()), full or by_market.get("on-demand", 0), kind)
