"""AWS's prices from EC2 and the Pricing API, through the provider's own functions.

A spot price belongs to a zone; the catalog keeps the lowest price of a region, and the zones that have a price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from spotfleet.catalog.pricing.values import CatalogPrice, MachineType, Source
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers.aws import prices, types
from spotfleet.providers.aws.session import Account, account_of


def fetch(machines: Iterable[MachineType], day: str, tell: Callable[[str], None],
          config: Mapping[str, str]) -> list[CatalogPrice]:
    """Fetch the prices of `machines`, and of every type with GPUs in the first region, for all regions of the account.

    A region that does not answer is left out, with a line to `tell`. Raises NeedsPerson if no region may be queried.
    """
    account = account_of(config)
    regions = account.all_regions()
    known = {m.name: m for m in machines} | _with_gpus(account)
    names = sorted(known)
    tell(f"aws: on-demand prices of {len(names)} types")
    listed = prices.on_demand(account, names, regions)
    if listed.trouble is not None:
        tell(f"aws: some on-demand prices are not available: {listed.trouble}\n")
    full_by = Source("AWS Price List API", day, url="https://pricing.us-east-1.amazonaws.com")
    spot_by = Source("EC2 DescribeSpotPriceHistory", day)
    found: list[CatalogPrice] = []
    troubles: list[SpotfleetError] = []
    for i, region in enumerate(regions, 1):
        tell(f"aws: spot prices of {region}, {i} of {len(regions)} regions")
        try:
            spot = prices.spot(account, region, names)
        except SpotfleetError as error:
            troubles.append(error)
            tell(f"aws: {region} is left out: {error}\n")
            continue
        for name in names:
            full = listed.micros_h.get((region, name), 0)
            zones = tuple(sorted(zone for zone, kind in spot if kind == name))
            lowest = min((spot[zone, name] for zone in zones), default=0)
            if full or lowest:
                found.append(CatalogPrice(known[name], region, full, lowest, full_by if full else None,
                                   spot_by if lowest else None, zones=zones))
    if troubles and len(troubles) == len(regions):
        raise next((e for e in troubles if isinstance(e, NeedsPerson)), troubles[0])
    return found


def _with_gpus(account: Account) -> dict[str, MachineType]:
    return {f.name: MachineType("aws", f.name, f.vcpus, f.memory_mib / 1024, f.accelerator, f.gpus)
            for f in types.with_gpus(account, account.home_region).values() if f.x86_64}
