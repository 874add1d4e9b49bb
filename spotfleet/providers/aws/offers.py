"""Pools for a need: type x zone over the configured regions, and the choice of the cheapest region.

A pool is offered if the region knows the type, the zone sells it, the network has a subnet there, and it has a price:
a pool without a known price would seem free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Market, Need, Offer
from spotfleet.providers.aws import prices, reserved
from spotfleet.providers.aws import types as instance_types
from spotfleet.providers.aws.account import network
from spotfleet.providers.aws.mapping import errors
from spotfleet.providers.aws.session import Account
from spotfleet.providers.aws.types import TypeFacts
from spotfleet.providers.kit import offers as kit
from spotfleet.providers.kit.offers import PricedTypes, RegionChoice, RegionPrice

SCORES_S = 6 * 3600.0  # EC2 answers a limited number of different queries a day
TYPES_SCORED = 3  # with fewer, EC2's documentation says, "the score will always be low"


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
    return kit.of_regions(regions, lambda region: _in_region(account, region, need))


def _in_region(account: Account, region: str, need: Need) -> list[Offer]:
    """Return the pools of a region, reserved capacity first; a region in trouble offers what is reserved there."""
    own = reserved.offers(account, region, need)
    try:
        return [*own, *_sold(account, region, need)]
    except SpotfleetError:
        if not own:
            raise
        return own


def _sold(account: Account, region: str, need: Need) -> list[Offer]:
    places = network.zones(account, region)
    if need.zone:
        places &= {need.zone}
    types = _usable(account, instance_types.fitting(account, region, need), need) if places else {}
    if not types:
        return []
    sold = instance_types.zones(account, region, sorted(types))
    here = {name: sold.get(name, frozenset()) & places for name in types}
    types = {name: facts for name, facts in types.items() if here[name]}
    spot = prices.spot(account, region, types) if need.use_spot and types else {}
    listed = prices.on_demand(account, types, [region])
    if not need.use_spot and types and not listed.micros_h and listed.trouble is not None and account.settings.laptop:
        raise listed.trouble  # on the dispatcher, which then has no such offers, spot hosts matter more
    regular = {kind: price for (_, kind), price in listed.micros_h.items()}
    return kit.priced("aws", region, need, PricedTypes(types, here, spot, regular),
                      lambda kind, market: errors.quota(f"{kind} {market.value}"))


def _usable(account: Account, types: dict[str, TypeFacts], need: Need) -> dict[str, TypeFacts]:
    """Return the types that a tightly coupled fleet can use; the dispatcher, alone on demand, can use any."""
    if account.settings.placement != "cluster" or not need.use_spot:
        return types
    return {name: facts for name, facts in types.items() if facts.clusters}


# ---- choice of a region


def cheapest_region(account: Account, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
    """Choose the region where `hosts` hosts and the dispatcher together cost least now; see `kit.cheapest_region`."""
    return kit.cheapest_region("aws", account.regions, lambda r: _row(account, r, any_of, dispatcher, hosts),
                               lambda: instance_types.unknown(account, [*any_of, dispatcher]))


def _row(account: Account, region: str, any_of: Sequence[Need], dispatcher: Need, hosts: int) -> RegionPrice:
    if region not in _enabled(account):
        return RegionPrice(region, why=f"the region is not enabled for this account: `aws account enable-region "
                                       f"--region-name {region}`")
    places = network.zones(account, region)
    found = list({o.pool: o for need in any_of for o in _here(account, region, need)}.values())
    row = kit.region_price(region, found, _here(account, region, dispatcher), hosts,
                           lambda: placement_score(account, region, found, hosts) if places else 0)
    if not places:
        return replace(row, why="it has no network to launch in: no default VPC with subnets, and none named")
    return row


def _enabled(account: Account) -> tuple[str, ...]:
    """Return the enabled regions; all configured ones if the caller may not list them."""
    try:
        return account.all_regions()
    except SpotfleetError:
        return account.regions


def _here(account: Account, region: str, need: Need) -> list[Offer]:
    if need.region not in ("", region) or (need.zone and not need.zone.startswith(region)):
        return []
    return _in_region(account, region, replace(need, region=region))


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
