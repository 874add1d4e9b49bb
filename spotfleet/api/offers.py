"""`offers`: what is on sale, by the word of providers that are set up here and of the catalog for all others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spotfleet import catalog, providers
from spotfleet.api.house import House
from spotfleet.api.machine import provider_config
from spotfleet.catalog import ranking
from spotfleet.catalog.ranking import Row
from spotfleet.catalog.store import Store
from spotfleet.catalog.values import PROVIDERS, Catalog, Price
from spotfleet.config.values import did_you_mean
from spotfleet.errors import NeedsPerson, SpotfleetError, UsageError
from spotfleet.model import AwsSpec, FleetSpec, Market, Need, Offer

UPDATE = "`spotfleet catalog update` fetches what its providers sell today"


@dataclass(frozen=True)
class Wish:
    need: Need
    provider: str = ""  # "": all
    markets: tuple[Market, ...] = ranking.BOTH
    live: bool | None = None  # None: where a provider is set up; True: it must be
    cpus: bool = False  # machines without GPUs too, where none are named


def place(infra: str) -> tuple[str, str, str]:
    """(provider, region, zone) of "aws", "aws/us-east-1" or "aws/us-east-1/us-east-1a"; "" for what is not said."""
    provider, region, zone, *more = [*(part.strip() for part in infra.split("/")), "", ""]
    known = [*PROVIDERS, "local"]
    if provider == "ssh":
        raise UsageError("machines over SSH are yours already, nobody offers them",
                         hint="a fleet file names them, with their prices: docs/machines.md")
    if any(more[:-2] if len(more) > 2 else more) or (provider and provider not in known):
        raise UsageError(f"'{infra}' is no place: unknown provider '{provider}'{did_you_mean(provider, known)}",
                         hint=f"PROVIDER[/REGION[/ZONE]], PROVIDER one of {', '.join(known)}")
    return provider, region, zone


def offers(house: House, wish: Wish, tell: Callable[[str], None]) -> list[Row]:
    """Cheapest work first. `tell` gets a line for each provider that was asked in vain.

    Raises UsageError for words that name nothing; SpotfleetError when nothing satisfies the wish, saying where else.
    """
    known = catalog.load(house.path)
    for trouble in Store(house.path).troubles():
        tell(f"{trouble}; what the package carries counts instead")
    found, answered = _live(house, wish, tell) if wish.live is not False else ([], [])
    known = ranking.with_live(known, found, time.strftime("%Y-%m-%d", time.gmtime()))
    rows = ranking.ranked(_wanted(known, wish), wish.markets)
    if not rows:
        raise _nothing(known, wish, answered)
    return rows


def _wanted(known: Catalog, wish: Wish) -> list[Price]:
    # The limit is on the price in the market of the need, and every market that was asked for has to be looked at.
    matching = known.matching(replace(wish.need, max_micros_h=0), wish.provider)
    named = wish.need.instance_type or wish.need.accelerator or wish.provider == "local"
    return [p for p in matching if named or wish.cpus or p.machine.count]


def _nothing(known: Catalog, wish: Wish, answered: Sequence[str]) -> SpotfleetError:
    words = ranking.unknown(known, wish.need, wish.provider)
    if words:
        return UsageError(words, hint="" if answered else UPDATE)
    markets = " or ".join(m.value for m in wish.markets)
    there = ranking.elsewhere(known, wish.need, wish.markets)
    sold = f"; it is sold in {', '.join(there[:6])}{' ...' if len(there) > 6 else ''}" if there else ""
    return SpotfleetError(f"no {markets} price is known of what was asked for{sold}", hint=UPDATE)


# ---- asking providers


def _live(house: House, wish: Wish, tell: Callable[[str], None]) -> tuple[list[Offer], list[str]]:
    """What providers say now, and which have. Only a provider that is named or meant must be there: of the others, one
    that has no credentials here is passed over in silence."""
    found: list[Offer] = []
    answered: list[str] = []
    asked = [wish.provider] if wish.provider else ["aws"]
    installed = providers.names()
    for name in asked:
        if name == "aws" and not (wish.need.instance_type or wish.need.accelerator):
            if wish.live:
                tell("aws: name a GPU or an instance type to ask what it costs now; the catalog answers")
            continue  # prices of everything take minutes: that is what `catalog update` is for
        if name not in installed:
            if wish.live:
                tell(f"{name}: this release cannot ask it what it sells now; the catalog answers")
            continue
        try:
            found += _offers_of(house, name, wish)
            answered.append(name)
        except NeedsPerson as error:
            if wish.provider or wish.live:
                tell(f"{name} was not asked: {error}; the catalog answers")
        except SpotfleetError as error:
            if name == "local":
                raise
            tell(f"{name} did not answer: {error}; the catalog answers")
    return found, answered


def _offers_of(house: House, name: str, wish: Wish) -> list[Offer]:
    spec = FleetSpec("", provider=name)
    if name == "aws":
        if not _may_have_credentials() and not wish.live:
            raise NeedsPerson("there are no credentials here")
        region = wish.need.region or wish.need.zone.rstrip("abcdef")
        spec = replace(spec, aws=AwsSpec(regions=(region,) if region else ()))
    provider = providers.load(name, provider_config(house, spec))
    found: list[Offer] = []
    for market in wish.markets:
        found += provider.offers(replace(wish.need, use_spot=market is Market.SPOT, max_micros_h=0))
    return found


def _may_have_credentials() -> bool:
    """Without asking anybody: a machine that has none should not wait seconds for its metadata."""
    named = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
             "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    files = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
             os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config")
    return any(os.environ.get(n) for n in named) or any(
        os.path.isfile(os.path.expanduser(f)) and os.path.getsize(os.path.expanduser(f)) for f in files)
