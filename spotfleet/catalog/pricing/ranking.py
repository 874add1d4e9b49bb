"""Ranking of prices by the cost of useful work, and messages for requests that nothing satisfies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotfleet.catalog.pricing.useful import expected_lifetime_s, useful_micros_h
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType, Source, alike
from spotfleet.model import Market, Need, Offer

BOTH = (Market.SPOT, Market.ON_DEMAND)


@dataclass(frozen=True)
class OfferRow:
    """Line of `offers`."""

    price: CatalogPrice
    market: Market  # the requested market with the cheapest useful work
    useful_micros_h: int  # per hour of useful work of one GPU
    lifetime_s: float  # expected, in that market

    @property
    def savings(self) -> float | None:
        """Share saved by spot against on demand; None if one price is unknown."""
        spot, full = self.price.spot_micros_h, self.price.on_demand_micros_h
        return 1 - spot / full if spot and full else None


def ranked(prices: Iterable[CatalogPrice], markets: Sequence[Market] = BOTH) -> list[OfferRow]:
    """Cheapest work first; without those that have no known price in any of `markets`."""
    rows = [min((_row(p, m) for m in markets if p.micros_h(m)), key=lambda r: r.useful_micros_h)
            for p in prices if any(p.micros_h(m) for m in markets)]
    return sorted(rows, key=lambda r: (r.useful_micros_h, *r.price.key, r.price.zones))


def _row(price: CatalogPrice, market: Market) -> OfferRow:
    lifetime_s = expected_lifetime_s(price.band) if market is Market.SPOT else float("inf")
    return OfferRow(price, market, useful_micros_h(price.micros_h(market), price.machine.slots, lifetime_s), lifetime_s)


def best(rows: Iterable[OfferRow]) -> list[OfferRow]:
    """Return the first row of each type in each region: one zone stands for the others."""
    return list({row.price.key: row for row in reversed(list(rows))}.values())[::-1]


def with_live(catalog: Catalog, offers: Iterable[Offer], day: str) -> Catalog:
    """Return `catalog` with the prices that providers have offered on `day`. They replace the prices of the same type
    and region, with one price for each offered zone. An on-demand price missing in the offer stays the catalog's."""
    zones: dict[tuple[str, str, str], dict[str, CatalogPrice]] = {}
    for o in offers:
        here = zones.setdefault((o.provider, o.instance_type, o.region), {})
        here[o.zone] = _seen(o, here.get(o.zone), catalog, day)
    kept = [p for p in catalog.prices if p.key not in zones]
    return Catalog((*kept, *(p for some in zones.values() for p in some.values())), catalog.region_rates)


def _seen(offer: Offer, other: CatalogPrice | None, catalog: Catalog, day: str) -> CatalogPrice:
    """Return the price of one zone, combined with an earlier offer of it."""
    known = other or catalog.by_key.get((offer.provider, offer.instance_type, offer.region))
    machine = catalog.machines.get(offer.instance_type) or MachineType(
        offer.provider, offer.instance_type, accelerator=offer.accelerator,
        count=offer.slots if offer.accelerator else 0)
    live = Source(offer.provider, day, live=True)
    spot, spot_by = (offer.price_micros_h, live) if offer.market is Market.SPOT else (
        known.spot_micros_h if other else 0, known.spot_source if other else None)
    full, full_by = offer.on_demand_micros_h, live
    if not full and known is not None:
        full, full_by = known.on_demand_micros_h, known.on_demand_source
    return CatalogPrice(machine, offer.region, full, spot, full_by if full else None, spot_by,
                        known.band if known else None,
                 known.band_source if known else None, (offer.zone,))


def unknown(catalog: Catalog, need: Need, provider: str = "") -> str:
    """Return a message for the word of `need` that names nothing in `catalog`, with the nearest known words; "" if all
    are known."""
    here = [p for p in catalog.prices if provider in ("", p.machine.provider)]
    where = provider or "the catalog"
    regions = sorted({p.region for p in here})
    if need.region and need.region not in regions:
        return f"{where} has no region '{need.region}'{_near(catalog, need.region, regions)}"
    names = sorted({p.machine.name for p in here})
    if need.instance_type and need.instance_type not in names:
        sellers = _sellers(p for p in catalog.prices if p.machine.name == need.instance_type)
        near = sellers or _near(catalog, need.instance_type, names)
        return f"{where} has no instance type '{need.instance_type}'{near}"
    kinds = sorted({p.machine.accelerator for p in here} - {""})
    if need.accelerator and not any(alike(need.accelerator, k) for k in kinds):
        sellers = _sellers(p for p in catalog.prices if alike(need.accelerator, p.machine.accelerator))
        near = sellers or _near(catalog, need.accelerator, kinds) or _all(kinds)
        return f"{where} has no GPU '{need.accelerator}'{near}"
    counts = sorted({p.machine.count for p in here if alike(need.accelerator, p.machine.accelerator)})
    if need.accelerator and need.accelerator_count and need.accelerator_count not in counts:
        return (f"no type has {need.accelerator_count} of '{need.accelerator}': there are types with "
                f"{', '.join(map(str, counts))}")
    machine = catalog.machines.get(need.instance_type)
    if machine and need.accelerator and not (alike(need.accelerator, machine.accelerator)
                                             and need.accelerator_count in (0, machine.count)):
        has = f"{machine.accelerator}:{machine.count}" if machine.count else "no GPU"
        return f"{machine.name} has {has}, not {need.accelerator}{f':{n}' if (n := need.accelerator_count) else ''}"
    return ""


def _near(catalog: Catalog, word: str, among: Sequence[str]) -> str:
    near = catalog.nearest(word, among)
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def _sellers(prices: Iterable[CatalogPrice]) -> str:
    found = sorted({p.machine.provider for p in prices})
    return f"; it is sold by {', '.join(found)}" if found else ""


def _all(kinds: Sequence[str]) -> str:
    return f"; there are {', '.join(kinds)}"


def elsewhere(catalog: Catalog, need: Need, markets: Sequence[Market] = BOTH) -> list[str]:
    """Return places that sell `need` in one of `markets`, ignoring the place in the need itself: "aws/us-east-1"."""
    anywhere = Need(instance_type=need.instance_type, accelerator=need.accelerator,
                    accelerator_count=need.accelerator_count)
    return sorted({f"{p.machine.provider}/{p.region}" for p in catalog.matching(anywhere)
                   if any(p.micros_h(m) for m in markets)})
