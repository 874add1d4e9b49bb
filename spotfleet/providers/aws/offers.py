"""Pools for a need: type x zone over the configured regions, and the choice of the cheapest region.

A pool is offered if the region knows the type, the zone sells it, the network has a subnet there, and it has a price:
a pool without a known price would seem free. While some region answers, the failing ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spotfleet.catalog import load
from spotfleet.catalog.pricing.useful import expected_lifetime_s
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import Market, Need, Offer
from spotfleet.providers.aws import prices, reserved
from spotfleet.providers.aws import types as instance_types
from spotfleet.providers.aws.account import network
from spotfleet.providers.aws.mapping import errors
from spotfleet.providers.aws.session import Account
from spotfleet.providers.aws.types import TypeFacts

SCORES_S = 6 * 3600.0  # EC2 answers a limited number of different queries a day
TYPES_SCORED = 3  # with fewer, EC2's documentation says, "the score will always be low"


@dataclass(frozen=True)
class RegionPrice:
    """One candidate region. Prices are per hour, 0 if there is none."""

    region: str
    hosts: Offer | None = None  # the cheapest
    dispatcher: Offer | None = None
    pools: int = 0  # number of the hosts' pools with a price within the limits
    total_micros_h: int = 0  # for all hosts wanted and the dispatcher
    score: int = 0  # EC2's spot placement score for the hosts, 1 to 10; 0: not known
    why: str = ""  # reason for its exclusion
    reserved: bool = False  # it has reserved capacity for the hosts


@dataclass(frozen=True)
class RegionChoice:
    """The cheapest region, with the prices of all candidates."""

    region: str
    rows: tuple[RegionPrice, ...]  # the chosen one first, then by price


def check(account: Account) -> None:
    """Return if the credentials are valid and some region has a network to launch in; raise NeedsPerson otherwise."""
    account.identity()
    troubles: list[NeedsPerson] = []
    for region in account.regions:
        try:
            network.site(account, region)
            return
        except NeedsPerson as error:
            troubles.append(error)
    raise troubles[0]


def offers(account: Account, need: Need) -> list[Offer]:
    """List the pools that satisfy `need`. Raises an error only if no region has an offer."""
    regions = [r for r in account.regions if need.region in ("", r) and (not need.zone or need.zone.startswith(r))]
    found: list[Offer] = []
    troubles: list[SpotfleetError] = []
    for some in account.each(lambda region: _in_region(account, region, need), regions):
        if isinstance(some, SpotfleetError):
            troubles.append(some)
        else:
            found += some
    if troubles and not found:
        raise next((e for e in troubles if isinstance(e, NeedsPerson)), troubles[0])
    return found


def _in_region(account: Account, region: str, need: Need) -> list[Offer] | SpotfleetError:
    """Return the pools of a region, reserved capacity first; a region in trouble offers what is reserved there."""
    own, sold = reserved.offers(account, region, need), _sold(account, region, need)
    return [*own, *sold] if not isinstance(sold, SpotfleetError) else own or sold


def _sold(account: Account, region: str, need: Need) -> list[Offer] | SpotfleetError:
    try:
        places = network.zones(account, region)
        if need.zone:
            places &= {need.zone}
        types = _usable(account, instance_types.fitting(account, region, need), need) if places else {}
        if not types:
            return []
        sold = instance_types.zones(account, region, sorted(types))
        types = {name: facts for name, facts in types.items() if sold.get(name, frozenset()) & places}
        spot = prices.spot(account, region, types) if need.use_spot and types else {}
        listed = prices.on_demand(account, types, [region])
    except SpotfleetError as error:
        return error
    if not need.use_spot and types and not listed.micros_h and listed.trouble is not None and account.settings.laptop:
        return listed.trouble  # on the dispatcher, which then has no such offers, spot hosts matter more
    market = Market.SPOT if need.use_spot else Market.ON_DEMAND
    lives_s = _lives_s(region, types) if need.use_spot else {}
    found = []
    for name, facts in sorted(types.items()):
        regular = listed.micros_h.get((region, name), 0)
        for zone in sorted(sold[name] & places):
            price = spot.get((zone, name), 0) if need.use_spot else regular
            if price and (not need.max_micros_h or price <= need.max_micros_h):
                found.append(Offer("aws", region, zone, name, market, facts.slots, price, regular, facts.accelerator,
                                   life_s=lives_s.get(name, 0.0), quota=errors.quota(f"{name} {market.value}")))
    return found


def _lives_s(region: str, types: Iterable[str]) -> dict[str, float]:
    """Return the expected life of spot hosts, for the types whose Spot Instance Advisor band is in our catalog."""
    known = load()
    bands = {name: known.band("aws", name, region) for name in types}
    return {name: expected_lifetime_s(band) for name, band in bands.items() if band is not None}


def _usable(account: Account, types: dict[str, TypeFacts], need: Need) -> dict[str, TypeFacts]:
    """Return the types that a tightly coupled fleet can use; the dispatcher, alone on demand, can use any."""
    if account.settings.placement != "cluster" or not need.use_spot:
        return types
    return {name: facts for name, facts in types.items() if facts.clusters}


# ---- choice of a region


def cheapest_region(account: Account, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
    """Choose the region where `hosts` hosts and the dispatcher together cost least now, among those that sell both; one
    with reserved capacity before all others.

    Raises UsageError for words that match nothing, NoCapacity if no region sells both, NeedsPerson if a person must
    act in each.
    """
    rows: list[RegionPrice] = []
    troubles: list[SpotfleetError] = []
    for region, row in zip(account.regions, account.each(
            lambda r: _row(account, r, any_of, dispatcher, hosts), account.regions), strict=True):
        if isinstance(row, SpotfleetError):
            troubles.append(row)
            rows.append(RegionPrice(region, why=str(row)))
        else:
            rows.append(row)
    rows.sort(key=lambda r: (bool(r.why), not r.reserved, r.total_micros_h, -r.score, r.region))
    if not rows[0].why:
        return RegionChoice(rows[0].region, tuple(rows))
    if troubles and len(troubles) == len(rows):
        raise next((e for e in troubles if isinstance(e, NeedsPerson)), troubles[0])
    words = instance_types.unknown(account, [*any_of, dispatcher])
    if words:
        raise UsageError(f"aws: {words}", hint="see `resources` in the fleet file")
    raise NoCapacity("aws: no region has offers for hosts and dispatcher: "
                     + "; ".join(f"{r.region}: {r.why}" for r in rows), scope="account",
                     hint="name more regions under `aws.regions`, other types, or a higher price limit")


def _row(account: Account, region: str, any_of: Sequence[Need], dispatcher: Need,
         hosts: int) -> RegionPrice | SpotfleetError:
    try:
        if region not in _enabled(account):
            return RegionPrice(region, why=f"the region is not enabled for this account: `aws account enable-region "
                                           f"--region-name {region}`")
        places = network.zones(account, region)
        found = {o.pool: o for need in any_of for o in _here(account, region, need)}
        for_dispatcher = _here(account, region, dispatcher)
    except SpotfleetError as error:
        return error
    cheapest = min(found.values(), key=lambda o: (o.price_micros_h, o.pool), default=None)
    own = min(for_dispatcher, key=lambda o: (o.price_micros_h, o.pool), default=None)
    if not places:
        why = "it has no network to launch in: no default VPC with subnets, and none named"
    elif cheapest is None or own is None:
        missing = [what for what, offer in (("hosts", cheapest), ("the dispatcher", own)) if offer is None]
        why = f"nothing on offer for {' and '.join(missing)}"
    else:
        why = ""
    total = (hosts * cheapest.price_micros_h + own.price_micros_h) if cheapest and own else 0
    score = placement_score(account, region, list(found.values()), hosts) if not why else 0
    return RegionPrice(region, cheapest, own, len(found), total, score, why, any(o.reserved for o in found.values()))


def _enabled(account: Account) -> tuple[str, ...]:
    """Return the enabled regions; all configured ones if the caller may not list them."""
    try:
        return account.all_regions()
    except SpotfleetError:
        return account.regions


def _here(account: Account, region: str, need: Need) -> list[Offer]:
    if need.region not in ("", region) or (need.zone and not need.zone.startswith(region)):
        return []
    found = _in_region(account, region, replace(need, region=region))
    if isinstance(found, SpotfleetError):
        raise found
    return found


def placement_score(account: Account, region: str, pools: Sequence[Offer], hosts: int) -> int:
    """Return EC2's estimate, 1 to 10, of the chance to get `hosts` spot hosts there now; 0 if unknown.

    A hint only: requested if permitted, and if there are enough types for a meaningful answer.
    """
    types = tuple(sorted({o.instance_type for o in pools if o.market is Market.SPOT}))
    if len(types) < TYPES_SCORED:
        return 0
    alone = account.settings.placement != "spread"

    def ask() -> int:
        try:
            found = list(account.client("ec2", region).pages(
                "get_spot_placement_scores", "SpotPlacementScores", InstanceTypes=list(types), TargetCapacity=hosts,
                TargetCapacityUnitType="units", SingleAvailabilityZone=alone, RegionNames=[region]))
        except SpotfleetError:
            return 0
        return max((int(s["Score"]) for s in found), default=0)

    return account.cached(("score", region, types, hosts, alone), SCORES_S, ask)
