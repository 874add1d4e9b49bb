"""Catalog values: machines, prices, their sources, and queries on them. Pure.

A price of 0 is unknown. Every price names its source, and every source its date, because prices of different ages stand
side by side.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from spotfleet.matching import fits_size
from spotfleet.model import Market, Need, Offer, Rates

NEAREST = 3


@dataclass(frozen=True)
class Source:
    """Source of a figure, with its date."""

    name: str
    as_of: str  # YYYY-MM-DD: publication of the figure
    licence: str = ""
    url: str = ""
    estimate: bool = False  # computed from an average, not read from a list
    live: bool = False  # a provider has just reported it


@dataclass(frozen=True)
class MachineType:
    """Machine type."""

    provider: str
    name: str
    vcpus: int = 0
    memory_gib: float = 0.0
    accelerator: str = ""  # "A100"; "" on a CPU machine
    count: int = 0

    @property
    def slots(self) -> int:
        return self.count or 1


@dataclass(frozen=True)
class CatalogPrice:
    """Price of one machine type in one region; all zones cost the same as far as this source shows."""

    machine: MachineType
    region: str
    on_demand_micros_h: int = 0
    spot_micros_h: int = 0
    on_demand_source: Source | None = None
    spot_source: Source | None = None
    band: int | None = None  # index of useful.BANDS: how often the cloud takes it back
    band_source: Source | None = None
    zones: tuple[str, ...] = ()  # zones that sell it, if the source names them

    @property
    def key(self) -> tuple[str, str, str]:
        return self.machine.provider, self.machine.name, self.region

    def micros_h(self, market: Market) -> int:
        return self.spot_micros_h if market is Market.SPOT else self.on_demand_micros_h

    def source(self, market: Market) -> Source | None:
        return self.spot_source if market is Market.SPOT else self.on_demand_source


@dataclass(frozen=True)
class Catalog:
    """Prices of some providers, one per (provider, type, region). A fleet's bill never uses them."""

    prices: tuple[CatalogPrice, ...] = ()
    region_rates: Mapping[tuple[str, str], Rates] = field(default_factory=dict)  # (provider, region or "") -> Rates

    @cached_property
    def by_key(self) -> Mapping[tuple[str, str, str], CatalogPrice]:
        return {p.key: p for p in self.prices}

    @cached_property
    def machines(self) -> Mapping[str, MachineType]:
        return {p.machine.name: p.machine for p in self.prices}

    def regions(self, provider: str = "") -> list[str]:
        return sorted({p.region for p in self.prices if provider in ("", p.machine.provider)})

    def matching(self, need: Need, provider: str = "") -> list[CatalogPrice]:
        """Return prices that satisfy `need`, of all providers unless one is named. Its market matters only with its
        price limit; zones matter where they are known."""
        market = Market.SPOT if need.use_spot else Market.ON_DEMAND
        return [p for p in self.prices
                if provider in ("", p.machine.provider)
                and need.instance_type in ("", p.machine.name)
                and (not need.accelerator or alike(need.accelerator, p.machine.accelerator))
                and (not need.accelerator_count or need.accelerator_count == p.machine.count)
                and (not need.sized or fits_size(need, p.machine.vcpus, p.machine.memory_gib))
                and in_region(need, p)
                and (not need.max_micros_h or 0 < p.micros_h(market) <= need.max_micros_h)]

    def offers(self, need: Need, provider: str = "") -> list[Offer]:
        """Return offers like a provider, cheapest first; if no zone is known, the region's name replaces it. [] if no
        price is known in the market of `need`."""
        market = Market.SPOT if need.use_spot else Market.ON_DEMAND
        found = [Offer(p.machine.provider, p.region, zone, p.machine.name, market, p.machine.slots, p.micros_h(market),
                       p.on_demand_micros_h, p.machine.accelerator)
                 for p in self.matching(need, provider) if p.micros_h(market)
                 for zone in p.zones or (p.region,) if need.zone in ("", zone) or not p.zones]
        return sorted(found, key=lambda o: (o.price_micros_h, o.pool))

    def band(self, provider: str, instance_type: str, region: str) -> int | None:
        """Return an index of useful.BANDS; None if unknown."""
        price = self.by_key.get((provider, instance_type, region))
        return price.band if price else None

    def rates(self, provider: str, region: str = "") -> Rates:
        """Return the rates of `region` besides machines, or the provider's general ones; empty and without source if
        unknown."""
        return self.region_rates.get((provider, region)) or self.region_rates.get((provider, "")) or Rates()

    def nearest(self, word: str, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return types, accelerators and regions that `word` may mean, the nearest first."""
        known = list(among) if among is not None else self.words()
        spelled = {_folded(w): w for w in known}
        close = difflib.get_close_matches(_folded(word), list(spelled), NEAREST, 0.5)
        begins = sorted(w for f, w in spelled.items() if f.startswith(_folded(word)) and word)
        return tuple(dict.fromkeys([*(spelled[c] for c in close), *begins[:NEAREST]]))[:NEAREST]

    def words(self) -> list[str]:
        """Return every name that a user may enter: types, accelerators, regions."""
        return sorted({w for p in self.prices for w in (p.machine.name, p.machine.accelerator, p.region)} - {""})

    def over(self, older: Catalog) -> Catalog:
        """Return this catalog, completed by `older`: prices it lacks, a market, a band, zones, rates."""
        joined = dict(older.by_key)
        for price in self.prices:
            joined[price.key] = _joined(price, joined.get(price.key))
        return Catalog(tuple(joined[k] for k in sorted(joined)), {**older.region_rates, **self.region_rates})


def _joined(new: CatalogPrice, old: CatalogPrice | None) -> CatalogPrice:
    if old is None:
        return new
    if not new.on_demand_micros_h:
        new = replace(new, on_demand_micros_h=old.on_demand_micros_h, on_demand_source=old.on_demand_source)
    if not new.spot_micros_h:
        new = replace(new, spot_micros_h=old.spot_micros_h, spot_source=old.spot_source)
    if new.band is None:
        new = replace(new, band=old.band, band_source=old.band_source)
    machine = replace(new.machine, vcpus=new.machine.vcpus or old.machine.vcpus,
                      memory_gib=new.machine.memory_gib or old.machine.memory_gib,
                      accelerator=new.machine.accelerator or old.machine.accelerator,
                      count=new.machine.count or old.machine.count)
    return replace(new, machine=machine, zones=new.zones or old.zones)


def in_region(need: Need, price: CatalogPrice) -> bool:
    if need.region and need.region != price.region:
        return False
    if not need.zone:
        return True
    return need.zone in price.zones if price.zones else zone_of(need.zone, price.region)


def zone_of(zone: str, region: str) -> bool:
    """Return whether the zone is in the region: us-east-1a in us-east-1, us-central1-b in us-central1, eastus-1 in
    eastus."""
    return zone == region or re.fullmatch(re.escape(region) + r"(-?[a-z0-9])", zone) is not None


def alike(requested: str, name: str) -> bool:
    """Return whether a user's `requested` means `name`. Case, blanks, hyphens and the maker's name do not matter."""
    return _folded(requested) == _folded(name)


def _folded(word: str) -> str:
    return re.sub(r"^(nvidia|amd|tesla)+", "", re.sub(r"[^a-z0-9]", "", word.lower()))


def sources(prices: Sequence[CatalogPrice]) -> dict[Source, int]:
    """Return every source of `prices`, with the number of its figures."""
    found: dict[Source, int] = {}
    for price in prices:
        for source in (price.on_demand_source, price.spot_source, price.band_source):
            if source is not None:
                found[source] = found.get(source, 0) + 1
    return found
