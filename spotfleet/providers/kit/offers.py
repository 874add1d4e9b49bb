"""Offers of a cloud with regions: pools for a need, and the choice of the cheapest region for a new fleet.

A cloud passes in what it knows of one region. While some region answers, the failing ones are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from spotfleet.catalog import load
from spotfleet.catalog.pricing.useful import expected_lifetime_s
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import Market, Need, Offer
from spotfleet.providers.kit.mapping.types import OfferedType, market_of
from spotfleet.providers.kit.requests import each
from spotfleet.providers.plugin import RegionRow

T = TypeVar("T")


@dataclass(frozen=True)
class PricedTypes:
    """Types of one region that satisfy a need, with the zones that sell them and their prices."""

    types: Mapping[str, OfferedType]
    zones: Mapping[str, Iterable[str]]  # type -> zones where a host can be launched
    spot: Mapping[tuple[str, str], int]  # (zone, type) -> micro-dollars an hour
    on_demand: Mapping[str, int]  # type -> micro-dollars an hour; the same in each zone


def priced(cloud: str, region: str, need: Need, found: PricedTypes, quota: Callable[[str, Market], str]) -> list[Offer]:
    """Return the offers of one region that satisfy `need`: each type in each zone.

    A pool without a known price is left out: it would seem free. `quota(type, market)` names the quota that counts it.
    """
    market = market_of(need)
    lives_s = _lives_s(cloud, region, found.types) if need.use_spot else {}
    offers = []
    for name, facts in sorted(found.types.items()):
        regular = found.on_demand.get(name, 0)
        for zone in sorted(found.zones.get(name, ())):
            price = found.spot.get((zone, name), 0) if need.use_spot else regular
            if price and (not need.max_micros_h or price <= need.max_micros_h):
                offers.append(Offer(cloud, region, zone, name, market, facts.slots, price, regular, facts.accelerator,
                                    life_s=lives_s.get(name, 0.0), quota=quota(name, market)))
    return offers


def _lives_s(cloud: str, region: str, types: Iterable[str]) -> dict[str, float]:
    """Return the expected life of spot hosts, for the types whose rate of interruptions is in our catalog."""
    known = load()
    bands = {name: known.band(cloud, name, region) for name in types}
    return {name: expected_lifetime_s(band) for name, band in bands.items() if band is not None}


def of_regions(regions: Sequence[str], in_region: Callable[[str], list[Offer]]) -> list[Offer]:
    """List the offers of all regions. Raises an error only if no region has an offer."""
    answers = each(_or_error(in_region), regions)
    troubles = [some for some in answers if isinstance(some, SpotfleetError)]
    found = [offer for some in answers if not isinstance(some, SpotfleetError) for offer in some]
    if troubles and not found:
        raise _decisive(troubles)
    return found


def _or_error(ask: Callable[[str], T]) -> Callable[[str], T | SpotfleetError]:
    """Return `ask`, with the error that it raises as its answer."""
    def asked(region: str) -> T | SpotfleetError:
        try:
            return ask(region)
        except SpotfleetError as error:
            return error

    return asked


# ---- choice of a region


@dataclass(frozen=True)
class RegionPrice:
    """One candidate region. Prices are per hour, 0 if there is none."""

    region: str
    hosts: Offer | None = None  # the cheapest
    dispatcher: Offer | None = None
    pools: int = 0  # number of the hosts' pools with a price within the limits
    total_micros_h: int = 0  # for all hosts wanted and the dispatcher
    score: int = 0  # the cloud's estimate of its capacity for the hosts, 1 to 10; 0: not known
    why: str = ""  # reason for its exclusion
    reserved: bool = False  # it has reserved capacity for the hosts


@dataclass(frozen=True)
class RegionChoice:
    """The cheapest region, with the prices of all candidates."""

    region: str
    rows: tuple[RegionPrice, ...]  # the chosen one first, then by price


def region_price(region: str, pools: Sequence[Offer], for_dispatcher: Sequence[Offer], hosts: int,
                 score: Callable[[], int] = lambda: 0) -> RegionPrice:
    """Return the row of a region with these offers for hosts and dispatcher."""
    cheapest = min(pools, key=lambda o: (o.price_micros_h, o.pool), default=None)
    own = min(for_dispatcher, key=lambda o: (o.price_micros_h, o.pool), default=None)
    if cheapest is None or own is None:
        missing = [what for what, offer in (("hosts", cheapest), ("the dispatcher", own)) if offer is None]
        return RegionPrice(region, cheapest, own, len(pools), why=f"nothing on offer for {' and '.join(missing)}")
    total = hosts * cheapest.price_micros_h + own.price_micros_h
    return RegionPrice(region, cheapest, own, len(pools), total, score(), reserved=any(o.reserved for o in pools))


def cheapest_region(cloud: str, regions: Sequence[str], row: Callable[[str], RegionPrice],
                    unknown: Callable[[], str]) -> RegionChoice:
    """Choose the region where all hosts and the dispatcher together cost least now, among those that sell both; one
    with reserved capacity before all others.

    `unknown` names words of the fleet file that match nothing on sale. Raises UsageError for them, NoCapacity if no
    region sells both, NeedsPerson if a person must act in each.
    """
    answers = each(_or_error(row), regions)
    troubles = [answer for answer in answers if isinstance(answer, SpotfleetError)]
    rows = [RegionPrice(region, why=str(answer)) if isinstance(answer, SpotfleetError) else answer
            for region, answer in zip(regions, answers, strict=True)]
    rows.sort(key=lambda r: (bool(r.why), not r.reserved, r.total_micros_h, -r.score, r.region))
    if not rows[0].why:
        return RegionChoice(rows[0].region, tuple(rows))
    if troubles and len(troubles) == len(rows):
        raise _decisive(troubles)
    if words := unknown():
        raise UsageError(f"{cloud}: {words}", hint="see `resources` in the fleet file")
    raise NoCapacity(f"{cloud}: no region has offers for hosts and dispatcher: "
                     + "; ".join(f"{r.region}: {r.why}" for r in rows), scope="account",
                     hint=f"name more regions under `{cloud}.regions`, other types, or a higher price limit")


def in_turn(needs: Sequence[Need], choose: Callable[[Sequence[Need]], RegionChoice]) -> RegionChoice:
    """Choose a region for the alternatives that come first in the user's order; for the next if none sells them."""
    for turn in sorted({need.turn for need in needs})[:-1]:
        with suppress(NoCapacity, UsageError):
            return choose([need for need in needs if need.turn == turn])
    last = max(need.turn for need in needs)
    return choose([need for need in needs if need.turn == last])


def region_rows(choice: RegionChoice, scored: str = "its capacity is scored") -> tuple[RegionRow, ...]:
    """Return the rows of `CloudPlugin.settle`. `scored`: words before a score."""
    def why(row: RegionPrice) -> str:
        more = f"; {scored} {row.score} of 10" if row.score else ""
        if row.region == choice.region:
            return f"chosen{more}"
        return ("dearer" if row.total_micros_h > choice.rows[0].total_micros_h else "not cheaper") + more

    return tuple(RegionRow(row.region, row.hosts.price_micros_h if row.hosts else 0,
                           row.dispatcher.price_micros_h if row.dispatcher else 0, row.total_micros_h,
                           row.why or why(row)) for row in choice.rows)


def _decisive(troubles: Sequence[SpotfleetError]) -> SpotfleetError:
    """Return the error that a person must act on, if there is one."""
    return next((e for e in troubles if isinstance(e, NeedsPerson)), troubles[0])
