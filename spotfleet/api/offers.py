"""`offers`: current offers of the providers that are set up here, and the catalog's prices for all others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spotfleet import catalog, providers
from spotfleet.api.home import Home
from spotfleet.api.machine import provider_config
from spotfleet.catalog.pricing import ranking
from spotfleet.catalog.pricing.ranking import OfferRow
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice
from spotfleet.catalog.store import Store
from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import FleetSpec, Market, Need, Offer
from spotfleet.plugins import Machines
from spotfleet.providers.plugin import plugin_of, usable
from spotfleet.words import did_you_mean

UPDATE = "`spotfleet catalog update` fetches what its providers sell today"


@dataclass(frozen=True)
class OffersQuery:
    need: Need
    provider: str = ""  # "": all
    markets: tuple[Market, ...] = ranking.BOTH
    live: bool | None = None  # None: where a provider is set up; True: it must be
    cpus: bool = False  # machines without GPUs too, where none are named


def place(infra: str) -> tuple[str, str, str]:
    """Parse PROVIDER, PROVIDER/REGION or PROVIDER/REGION/ZONE into (provider, region, zone); "" for what is left
    out."""
    provider, region, zone, *more = [*(part.strip() for part in infra.split("/")), "", ""]
    owned = [p.name for p in usable() if p.traits.machines is Machines.EXISTING]
    known = [*dict.fromkeys([*catalog.names(), *(n for n in providers.names() if n not in owned)])]
    if provider in owned:
        raise UsageError("machines over SSH are yours already, nobody offers them",
                         hint="a fleet file names them, with their prices: docs/machines.md")
    if any(more[:-2] if len(more) > 2 else more) or (provider and provider not in known):
        raise UsageError(f"'{infra}' is no place: unknown provider '{provider}'{did_you_mean(provider, known)}",
                         hint=f"PROVIDER[/REGION[/ZONE]], PROVIDER one of {', '.join(known)}")
    return provider, region, zone


def offers(home: Home, query: OffersQuery, progress: Callable[[str], None]) -> list[OfferRow]:
    """Return matching offers, cheapest work first. `progress` receives a line for each provider that did not answer.

    Raises UsageError for words that name nothing; SpotfleetError, with the places that sell it, when nothing matches.
    """
    known = catalog.load(home.path)
    for trouble in Store(home.path).problems():
        progress(f"{trouble}; what the package carries counts instead")
    found, answered = _live(home, query, progress) if query.live is not False else ([], [])
    known = ranking.with_live(known, found, time.strftime("%Y-%m-%d", time.gmtime()))
    rows = ranking.ranked(_wanted(known, query), query.markets)
    if not rows:
        raise _no_offer(known, query, answered)
    return rows


def _wanted(known: Catalog, query: OffersQuery) -> list[CatalogPrice]:
    # A need's price limit holds for its own market, but all requested markets are compared: so no limit here.
    matching = known.matching(replace(query.need, max_micros_h=0), query.provider)
    named = query.need.instance_type or query.need.accelerator or (
        query.provider and query.provider not in catalog.names())
    return [p for p in matching if named or query.cpus or p.machine.count]


def _no_offer(known: Catalog, query: OffersQuery, answered: Sequence[str]) -> SpotfleetError:
    words = ranking.unknown(known, query.need, query.provider)
    if words:
        return UsageError(words, hint="" if answered else UPDATE)
    markets = " or ".join(m.value for m in query.markets)
    places = ranking.elsewhere(known, query.need, query.markets)
    sold = f"; it is sold in {', '.join(places[:6])}{' ...' if len(places) > 6 else ''}" if places else ""
    return SpotfleetError(f"no {markets} price is known of what was asked for{sold}", hint=UPDATE)


# ---- asking providers


def _live(home: Home, query: OffersQuery, progress: Callable[[str], None]) -> tuple[list[Offer], list[str]]:
    """Return current offers and the providers that sent them.

    A provider without credentials here is reported only if it was named or `live` was requested.
    """
    found: list[Offer] = []
    answered: list[str] = []
    installed = providers.names()
    for name in [query.provider] if query.provider else _clouds():
        if name not in installed:
            if query.live:
                progress(f"{name}: this release cannot ask it what it sells now; the catalog answers")
            continue
        if plugin_of(name).traits.open_ended_types and not (query.need.instance_type or query.need.accelerator):
            if query.live:
                progress(f"{name}: name a GPU or an instance type to ask what it costs now; the catalog answers")
            continue  # prices of everything take minutes: that is what `catalog update` is for
        try:
            found += _offers_of(home, name, query)
            answered.append(name)
        except NeedsPerson as error:
            if query.provider or query.live:
                progress(f"{name} was not asked: {error}; the catalog answers")
        except SpotfleetError as error:
            if query.provider and name not in catalog.names():
                raise
            progress(f"{name} did not answer: {error}; the catalog answers")
    return found, answered


def _offers_of(home: Home, name: str, query: OffersQuery) -> list[Offer]:
    plugin = plugin_of(name)
    if not plugin.may_have_credentials(os.environ) and not query.live:
        raise NeedsPerson("there are no credentials here")
    config = plugin.narrowed(provider_config(home, FleetSpec("", provider=name)), query.need)
    provider = providers.load(name, config)
    found: list[Offer] = []
    for market in query.markets:
        found += provider.offers(replace(query.need, use_spot=market is Market.SPOT, max_micros_h=0))
    return found


def _clouds() -> list[str]:
    return [plugin.name for plugin in usable() if plugin.traits.machines is Machines.MADE]
