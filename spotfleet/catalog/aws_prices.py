"""AWS's prices, by EC2 and the Pricing API, through the provider's own functions.

A spot price is one of a zone; the catalog keeps the lowest of a region, and in which zones there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from spotfleet.catalog.values import Machine, Price, Source
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.providers.aws import catalog, prices
from spotfleet.providers.aws.session import Account, account_of


def fetch(machines: Iterable[Machine], day: str, tell: Callable[[str], None], config: Mapping[str, str]) -> list[Price]:
    """Of `machines`, and of every type with GPUs that the first region knows, in all regions of the account.

    A region that does not answer is left out, with a line to `tell`. NeedsPerson where none may be asked.
    """
    account = account_of(config)
    regions = account.everywhere()
    known = {m.name: m for m in machines} | _with_gpus(account)
    names = sorted(known)
    tell(f"aws: on-demand prices of {len(names)} types")
    listed = prices.on_demand(account, names, regions)
    if listed.trouble is not None:
        tell(f"aws: some on-demand prices are not to be had: {listed.trouble}\n")
    full_by = Source("AWS Price List API", day, url="https://pricing.us-east-1.amazonaws.com")
    spot_by = Source("EC2 DescribeSpotPriceHistory", day)
    found: list[Price] = []
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
                found.append(Price(known[name], region, full, lowest, full_by if full else None,
                                   spot_by if lowest else None, zones=zones))
    if troubles and len(troubles) == len(regions):
        raise next((e for e in troubles if isinstance(e, NeedsPerson)), troubles[0])
    return found


def _with_gpus(account: Account) -> dict[str, Machine]:
    return {f.name: Machine("aws", f.name, f.vcpus, f.memory_mib / 1024, f.accelerator, f.gpus)
            for f in catalog.with_gpus(account, account.home_region).values() if f.x86_64}
