"""What is sold where, at which price, by whose word: values, and questions to them. Pure.

A price of 0 is unknown. Every price names its source, and every source its date: prices of different ages stand side by
side, and each says how old it is.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from spotfleet.model import Market, Need, Offer, Rates

PROVIDERS = ("aws", "gcp", "azure")
NEAREST = 3


@dataclass(frozen=True)
class Source:
    """Whose word a figure is, and since when."""

    name: str
    as_of: str  # YYYY-MM-DD: when it was said
    licence: str = ""
    url: str = ""
    estimate: bool = False  # computed from an average, not read off a list
    live: bool = False  # a provider has just said it


@dataclass(frozen=True)
class Machine:
    """A machine type."""

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
class Price:
    """One machine type in one region, of which all zones cost the same as far as this source tells."""

    machine: Machine
    region: str
    on_demand_micros_h: int = 0
    spot_micros_h: int = 0
    on_demand_source: Source | None = None
    spot_source: Source | None = None
    band: int | None = None  # index of useful.BANDS: how often the cloud takes it back
    band_source: Source | None = None
    zones: tuple[str, ...] = ()  # where it is sold, if the source says

    @property
    def key(self) -> tuple[str, str, str]:
        return self.machine.provider, self.machine.name, self.region

    def micros_h(self, market: Market) -> int:
        return self.spot_micros_h if market is Market.SPOT else self.on_demand_micros_h

    def source(self, market: Market) -> Source | None:
        return self.spot_source if market is Market.SPOT else self.on_demand_source


@dataclass(frozen=True)
class Catalog:
    """Prices of some providers, one per (provider, type, region). Nothing of a fleet's bill is ever read from here."""

    prices: tuple[Price, ...] = ()
    region_rates: Mapping[tuple[str, str], Rates] = field(default_factory=dict)  # (provider, region or "") -> Rates

    @cached_property
    def by_key(self) -> Mapping[tuple[str, str, str], Price]:
        return {p.key: p for p in self.prices}

    @cached_property
    def machines(self) -> Mapping[str, Machine]:
        return {p.machine.name: p.machine for p in self.prices}

    def regions(self, provider: str = "") -> list[str]:
        return sorted({p.region for p in self.prices if provider in ("", p.machine.provider)})

    def matching(self, need: Need, provider: str = "") -> list[Price]:
        """What satisfies `need` at a known price, whichever provider sells it unless one is named. Its market counts
        only with its price limit; zones count where they are known."""
        market = Market.SPOT if need.use_spot else Market.ON_DEMAND
        return [p for p in self.prices
                if provider in ("", p.machine.provider)
                and need.instance_type in ("", p.machine.name)
                and (not need.accelerator or alike(need.accelerator, p.machine.accelerator))
                and (not need.accelerator_count or need.accelerator_count == p.machine.count)
                and in_region(need, p)
                and (not need.max_micros_h or 0 < p.micros_h(market) <= need.max_micros_h)]

    def offers(self, need: Need, provider: str = "") -> list[Offer]:
        """As a provider would answer, cheapest first; where no zone is known, the region's name stands for it. [] for
        what has no known price in the market of `need`."""
        market = Market.SPOT if need.use_spot else Market.ON_DEMAND
        found = [Offer(p.machine.provider, p.region, zone, p.machine.name, market, p.machine.slots, p.micros_h(market),
                       p.on_demand_micros_h, p.machine.accelerator)
                 for p in self.matching(need, provider) if p.micros_h(market)
                 for zone in p.zones or (p.region,) if need.zone in ("", zone) or not p.zones]
        return sorted(found, key=lambda o: (o.price_micros_h, o.pool))

    def band(self, provider: str, instance_type: str, region: str) -> int | None:
        """Index of useful.BANDS; None where nobody says."""
        price = self.by_key.get((provider, instance_type, region))
        return price.band if price else None

    def rates(self, provider: str, region: str = "") -> Rates:
        """What `region` charges beside machines, or its provider in general; nothing and no source if nobody knows."""
        return self.region_rates.get((provider, region)) or self.region_rates.get((provider, "")) or Rates()

    def nearest(self, word: str, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """Types, accelerators and regions that `word` may have meant, the nearest first."""
        known = list(among) if among is not None else self.words()
        spelled = {_folded(w): w for w in known}
        close = difflib.get_close_matches(_folded(word), list(spelled), NEAREST, 0.5)
        begins = sorted(w for f, w in spelled.items() if f.startswith(_folded(word)) and word)
        return tuple(dict.fromkeys([*(spelled[c] for c in close), *begins[:NEAREST]]))[:NEAREST]

    def words(self) -> list[str]:
        """Every name that a user may say: types, accelerators, regions."""
        return sorted({w for p in self.prices for w in (p.machine.name, p.machine.accelerator, p.region)} - {""})

    def over(self, older: Catalog) -> Catalog:
        """This one, with what only `older` knows: prices it lacks, a market, a band, zones, rates."""
        joined = dict(older.by_key)
        for price in self.prices:
            joined[price.key] = _joined(price, joined.get(price.key))
        return Catalog(tuple(joined[k] for k in sorted(joined)), {**older.region_rates, **self.region_rates})


def _joined(new: Price, old: Price | None) -> Price:
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


def in_region(need: Need, price: Price) -> bool:
    if need.region and need.region != price.region:
        return False
    if not need.zone:
        return True
    return need.zone in price.zones if price.zones else zone_of(need.zone, price.region)


def zone_of(zone: str, region: str) -> bool:
    """us-east-1a of us-east-1, us-central1-b of us-central1, eastus-1 of eastus."""
    return zone == region or re.fullmatch(re.escape(region) + r"(-?[a-z0-9])", zone) is not None


def alike(wish: str, name: str) -> bool:
    """Is `name` what a user means by `wish`? Case, blanks, hyphens and the maker's name do not matter."""
    return _folded(wish) == _folded(name)


def _folded(word: str) -> str:
    return re.sub(r"^(nvidia|amd|tesla)+", "", re.sub(r"[^a-z0-9]", "", word.lower()))


def sources(prices: Sequence[Price]) -> dict[Source, int]:
    """Every source of `prices`, with how many figures are its word."""
    found: dict[Source, int] = {}
    for price in prices:
        for source in (price.on_demand_source, price.spot_source, price.band_source):
            if source is not None:
                found[source] = found.get(source, 0) + 1
    return found
