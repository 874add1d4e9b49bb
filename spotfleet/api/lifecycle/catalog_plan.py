"""Plan of a new fleet with the catalog's prices: for a user who has no account yet, or names no provider yet.

Nothing is asked of a cloud. The planner, the choice of a region and the limits of cost are those of `up`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet import catalog
from spotfleet.api import cloud
from spotfleet.api.home import Home
from spotfleet.api.lifecycle.preview import PlanKind, UpPlan, preview
from spotfleet.api.machine import provider_config
from spotfleet.catalog.pricing import ranking
from spotfleet.catalog.pricing.values import Catalog
from spotfleet.config import FleetFile, Given, load, no_provider
from spotfleet.errors import NoCapacity, SpotfleetError
from spotfleet.model import FleetSpec, Market, Need, Offer
from spotfleet.plugins import JOINED, Machines
from spotfleet.providers import names
from spotfleet.providers.kit import offers as kit
from spotfleet.providers.kit.plugin import RegionalPlugin
from spotfleet.providers.plugin import RegionRow, plugin_of, traits_of, usable
from spotfleet.providers.several import for_part

SHOWN = 4  # places in a message
REGIONS = 6  # in a plan


@dataclass(frozen=True)
class CatalogProvider:
    """The catalog in the place of a provider, for plans: it offers, and launches nothing."""

    name: str
    catalog: Catalog
    spec: FleetSpec
    regions: tuple[str, ...] = ()  # the only ones; (): all

    def offers(self, need: Need) -> list[Offer]:
        found: list[Offer] = []
        for name in self.name.split(JOINED):
            if need.provider in ("", name):
                found += self._of(name, need)
        return found

    def _of(self, name: str, need: Need) -> list[Offer]:
        plugin, offers = plugin_of(name) if name in names() else None, self._priced(need, name)
        if not (need.instance_type or need.accelerator or need.accelerator_count):
            usual = plugin.usual_types(need) if plugin else ()
            offers = [o for o in offers if not o.accelerator and (not usual or o.instance_type in usual)]
        if plugin is None:
            return offers
        ready = [o for o in offers if not plugin.obstacle(_part(self.spec, name), o.instance_type)]
        return ready or offers

    def _priced(self, need: Need, name: str) -> list[Offer]:
        """Return the offers; types without a known spot price at their price on demand, which it does not exceed."""
        offers = self.catalog.offers(need, name)
        if need.use_spot:
            known = {(o.instance_type, o.region) for o in offers}
            offers += [replace(o, market=Market.SPOT) for o in self.catalog.offers(replace(need, use_spot=False), name)
                       if (o.instance_type, o.region) not in known]
        return [o for o in offers if not self.regions or o.region in self.regions]

    def unknown(self, needs: Sequence[Need]) -> str:
        found = [ranking.unknown(self.catalog, need, name) for need in needs for name in self.name.split(JOINED)
                 if need.provider in ("", name)]
        return "; ".join(dict.fromkeys(filter(None, found)))

    def all_regions(self) -> tuple[str, ...]:
        return tuple(self.catalog.regions(self.name))

    def cheapest_region(self, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> kit.RegionChoice:
        pools, own = [o for need in any_of for o in self.offers(need)], self.offers(dispatcher)

        def row(region: str) -> kit.RegionPrice:
            return kit.region_price(region, [o for o in pools if o.region == region],
                                    [o for o in own if o.region == region], hosts)

        return kit.cheapest_region(self.name, self.regions or self.all_regions(), row,
                                   lambda: self.unknown([*any_of, dispatcher]))


def has_prices(spec: FleetSpec) -> bool:
    """Return whether the catalog can stand in for the provider of `spec`."""
    return traits_of(spec).machines is Machines.MADE and set(spec.provider.split(JOINED)) <= set(catalog.names())


def plan_by_catalog(home: Home, spec: FleetSpec, why: str, seller: str = "") -> UpPlan:
    """Return the plan of a new fleet. `why`: why its provider was not asked; `seller`: a cloud of the catalog that has
    no provider here, instead of that of `spec`. Raises UsageError for words of the file that the catalog does not know,
    and SpotfleetError where it has no price."""
    try:
        return _of_seller(home, spec, why, seller) if seller else _of_provider(home, spec, why)
    except NoCapacity as error:
        known = catalog.load(home.path)
        places = dict.fromkeys(place for need in spec.any_of for place in ranking.elsewhere(known, need))
        raise SpotfleetError(f"the catalog has no price: {error}" + (
            f"; it has prices of such machines in {', '.join(list(places)[:SHOWN])}" if places else ""),
            hint="name another place or type, or fetch today's prices: `spotfleet catalog update`") from None


def _of_seller(home: Home, spec: FleetSpec, why: str, seller: str) -> UpPlan:
    provider = CatalogProvider(seller, catalog.load(home.path), spec)
    first = cloud.of_main_group(spec)
    hosts = cloud.hosts_of(first)
    choice = kit.in_turn(first.any_of, lambda needs: provider.cheapest_region(needs, spec.dispatcher, hosts))
    here = replace(provider, regions=(choice.region,))
    plan = preview(spec, spec.name, PlanKind.NEW, None, here, time.time())  # type: ignore[arg-type]
    missing = (f"name a provider: {' and '.join(_clouds())} sells no such machine; {seller} does, for which no "
               "provider is installed here")
    return replace(plan, provider=seller, region=choice.region, regions=_sold(kit.region_rows(choice)), beside="",
                   keep_s=0.0, priced_by=_source(plan, provider.catalog, why), before_up=(missing,))


def _of_provider(home: Home, spec: FleetSpec, why: str) -> UpPlan:
    plugin, config = plugin_of(spec.provider), provider_config(home, spec)
    regions = (plugin.regions_in(config) or plugin.usual_regions()) if isinstance(plugin, RegionalPlugin) else ()
    named = {n.region or plugin.region_of(n.zone) for n in spec.any_of} - {""} \
        if isinstance(plugin, RegionalPlugin) else set()
    provider = CatalogProvider(spec.provider, catalog.load(home.path), spec, tuple(named) or regions)
    rows: tuple[RegionRow, ...] = ()
    if traits_of(spec).settles_region and JOINED not in spec.provider:
        config, found = cloud.choose_region(provider, config, spec)  # type: ignore[arg-type]
        rows = _sold(found)
        provider = replace(provider, regions=(plugin.region(config),))
    plan = preview(spec, spec.name, PlanKind.NEW, None, provider, time.time())  # type: ignore[arg-type]
    return replace(plan, region=plugin.region(config), regions=rows, priced_by=_source(plan, provider.catalog, why),
                   before_up=_obstacles(spec, plan))


def _sold(rows: Sequence[RegionRow]) -> tuple[RegionRow, ...]:
    """Return the cheapest regions that sell all of it."""
    return tuple(row for row in rows if row.total_micros_h)[:REGIONS]


def _source(plan: UpPlan, known: Catalog, why: str) -> str:
    """Return the line that names the catalog's dates."""
    launches = [*([plan.dispatcher] if plan.dispatcher else []), *plan.workers]
    prices = [(known.by_key.get((o.provider, o.instance_type, o.region)), o.market)
              for o in (launch.offer for launch in launches)]
    dates = sorted({source.as_of for price, market in prices if price and (source := price.source(market))})
    guessed = sorted({o.instance_type for o in (launch.offer for launch in launches) if o.market is Market.SPOT
                      and not known.by_key[o.provider, o.instance_type, o.region].spot_micros_h})
    most = f"; it has no spot price of {', '.join(guessed)}, whose price on demand is shown" if guessed else ""
    dates = sorted({*dates, *(p.on_demand_source.as_of for p, _ in prices if p and guessed and p.on_demand_source)})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "no known date"
    return (f"prices are the catalog's, of {span}, as {why}{most}; `spotfleet catalog update` fetches today's")


def _obstacles(spec: FleetSpec, plan: UpPlan) -> tuple[str, ...]:
    types = {(launch.offer.provider, launch.offer.instance_type) for launch in plan.workers}
    found = (plugin_of(provider).obstacle(_part(spec, provider), kind) for provider, kind in sorted(types))
    return tuple(dict.fromkeys(filter(None, found)))


def _part(spec: FleetSpec, name: str) -> FleetSpec:
    return for_part(spec, name) if JOINED in spec.provider else spec


def draft(home: Home, path: Path, given: Given) -> tuple[FleetFile, UpPlan | None]:
    """Read a file as a draft. If it names no provider, choose the cloud whose plan costs least by the catalog, and
    return that plan, too."""
    file = load(path, given=replace(given, draft=True))
    if not file.chosen:
        return file, None
    found: list[tuple[FleetFile, UpPlan]] = []
    troubles: list[SpotfleetError] = []
    for name in [*_clouds(), *(n for n in catalog.names() if n not in names())]:
        seller = "" if name in names() else name
        if found and seller:
            break  # a cloud that has a provider sells it
        try:
            other = file if seller else load(path, given=replace(given, draft=True, infra=name))
            if seller or has_prices(other.spec):
                plan = plan_by_catalog(home, other.spec, "the file names no provider", seller)
                asked = () if seller else (f"{path}: {no_provider(_clouds())}",)
                found.append((replace(other, before_up=(*asked, *other.before_up)), plan))
        except SpotfleetError as error:
            troubles.append(error)
    if not found and troubles:
        raise troubles[0]
    return min(found, key=lambda pair: pair[1].micros_h) if found else (file, None)


def _clouds() -> list[str]:
    return [p.name for p in usable() if p.traits.machines is Machines.MADE]
