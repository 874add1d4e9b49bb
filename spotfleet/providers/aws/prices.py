"""Prices of machines: spot prices from EC2, on-demand prices from the Pricing API, in micro-dollars, rounded half up.

EC2 reports changes of spot prices: each is for one zone and one type, and is in force until the next change. The
Pricing API reports on-demand prices: one for each region and type. If it does not answer or denies access, the answer
here has no on-demand prices and `OnDemand.why` gives the reason; callers go on with spot prices alone.
Sources: EC2 API reference, DescribeSpotPriceHistory; Price List Query API, GetProducts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from spotfleet.errors import SpotfleetError
from spotfleet.model import PricePoint
from spotfleet.providers.aws.mapping.names import BLOCK
from spotfleet.providers.aws.session import Account
from spotfleet.providers.kit.mapping.prices import micros, price_points

LINUX = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")  # EC2 answers with either or both
SPOT_S = 60.0  # EC2 changes a price every few minutes at most
STALE_S = 1800.0  # an answer this old at most is used while EC2 does not answer
ON_DEMAND_S = 12 * 3600.0
FAILED_S = 300.0
FAILED = "on-demand prices failed"  # key under which the last error is cached: for FAILED_S no type is asked for again
KEPT_S = 89 * 86400.0  # the oldest start of a query: EC2 keeps 90 days
BEHIND_S = 120.0  # the newest start of a query is this long ago: for a start in EC2's future it has no price
TYPES_ASKED = 100  # per call
PRODUCT = {"operatingSystem": "Linux", "preInstalledSw": "NA", "tenancy": "Shared", "capacitystatus": "Used"}


@dataclass(frozen=True)
class OnDemand:
    """On-demand prices: (region, type) -> price, as far as known."""

    micros_h: Mapping[tuple[str, str], int] = field(default_factory=dict)
    trouble: SpotfleetError | None = None  # reason for missing ones

    @property
    def why(self) -> str:
        return str(self.trouble or "")


# ---- spot


def spot(account: Account, region: str, types: Iterable[str]) -> dict[tuple[str, str], int]:
    """Return (zone, type) -> current price."""
    found: dict[tuple[str, str], int] = {}
    names = sorted(set(types))
    for i in range(0, len(names), TYPES_ASKED):
        now = _histories(account, region, tuple(names[i:i + TYPES_ASKED]), None)
        found.update({place: points[-1][1] for place, points in now.items()})
    return found


def prices(account: Account, pools: Sequence[str], since: float) -> list[PricePoint]:
    """Return for each pool the price in force at `since` and every later change, oldest first; none for a pool that is
    not sold. A capacity block costs nothing by the hour: it is paid in advance."""
    blocks = [pool for pool in dict.fromkeys(pools) if pool.rpartition("/")[2].startswith(BLOCK)]
    paid_ahead = [PricePoint(pool, since, 0) for pool in blocks]
    return paid_ahead + price_points(
        [pool for pool in pools if pool not in blocks], since, lambda zone: region_of(account, zone),
        lambda region, types: _histories(account, region, types, since),
        lambda region, types: {k: price for (_, k), price in on_demand(account, types, [region]).micros_h.items()})


def region_of(account: Account, zone: str) -> str:
    """Return the region of a zone: us-east-1 for us-east-1a, and for the local zone us-east-1-bos-1a."""
    among = [r for r in account.regions if zone.startswith(r)]
    return max(among, key=len) if among else zone.rstrip("abcdefghijklmnopqrstuvwxyz")


def _histories(account: Account, region: str, types: tuple[str, ...],
               since: float | None) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """Return (zone, type) -> points, oldest first: the one in force at `since` (now for None), and all later ones."""
    def ask() -> dict[tuple[str, str], list[tuple[float, int]]]:
        now = time.time()
        start = datetime.fromtimestamp(max(min(now if since is None else since, now - BEHIND_S), now - KEPT_S), UTC)
        return histories(account.client("ec2", region).pages(
            "describe_spot_price_history", "SpotPriceHistory", InstanceTypes=list(types), StartTime=start,
            ProductDescriptions=list(LINUX)))

    return account.cached(("spot", region, types, since), SPOT_S, ask, failed_s=5.0, stale_s=STALE_S)


def histories(items: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """Group items of DescribeSpotPriceHistory, in any order, by (zone, type).

    If both product descriptions occur, the first of `LINUX` counts; repeated lines count once.
    """
    found: dict[tuple[str, str], dict[str, dict[float, int]]] = {}
    for item in items:
        place = item["AvailabilityZone"], item["InstanceType"]
        points = found.setdefault(place, {}).setdefault(item.get("ProductDescription", LINUX[0]), {})
        points[item["Timestamp"].timestamp()] = micros(item["SpotPrice"])
    return {place: sorted(next((kinds[k] for k in LINUX if k in kinds), next(iter(kinds.values()))).items())
            for place, kinds in found.items()}


# ---- on demand


def on_demand(account: Account, types: Iterable[str], regions: Sequence[str]) -> OnDemand:
    """Return the prices that are available. Each type is one query: with one region in `regions` for that region, with
    several for all regions that exist."""
    names, wanted = sorted(set(types)), set(regions)
    region = regions[0] if len(wanted) == 1 else ""
    found: dict[tuple[str, str], int] = {}
    trouble: SpotfleetError | None = None

    def ask(kind: str) -> dict[str, int] | SpotfleetError:
        try:
            return account.cached(key(kind), ON_DEMAND_S, lambda: _asked(account, kind, region))
        except SpotfleetError as error:
            return account.cached(FAILED, FAILED_S, lambda e=error: e)

    def key(kind: str) -> tuple[str, ...]:
        return ("on demand", kind, region)

    answers = {kind: _first(account.recent(key(kind)), account.recent(FAILED)) for kind in names}
    missing = [kind for kind, answer in answers.items() if answer is None]
    answers.update(zip(missing, account.each(ask, missing), strict=True))
    for kind, answer in answers.items():
        if isinstance(answer, SpotfleetError):
            trouble = trouble or answer
        else:
            found.update({(r, kind): price for r, price in answer.items() if r in wanted})
    return OnDemand(found, trouble)


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _asked(account: Account, kind: str, region: str) -> dict[str, int]:
    filters = {"instanceType": kind, **PRODUCT, **({"regionCode": region} if region else {})}
    pages = account.client("pricing", endpoint(region or account.home_region)).pages(
        "get_products", "PriceList", ServiceCode="AmazonEC2",
        Filters=[{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in filters.items()])
    return by_region(pages)


def endpoint(region: str) -> str:
    """Return the nearest region with a Pricing API endpoint. GovCloud has none for its own credentials, and China's has
    prices in yuan: there `on_demand` has no prices."""
    near = {"eu": "eu-central-1", "af": "eu-central-1", "me": "eu-central-1", "il": "eu-central-1",
            "ap": "ap-south-1"}
    return near.get(region.partition("-")[0], "us-east-1")


def by_region(texts: Iterable[str | Mapping[str, Any]]) -> dict[str, int]:
    """Parse items of GetProducts, which are JSON texts, into region -> price per hour. Several items may be for one
    region: the highest price counts, as the bill is never above it. Capacity blocks are another market, and skipped.
    """
    found: dict[str, int] = {}
    for text in texts:
        item = json.loads(text) if isinstance(text, str) else text
        attributes = item.get("product", {}).get("attributes", {})
        region = attributes.get("regionCode", "") if attributes.get("marketoption", "OnDemand") == "OnDemand" else ""
        for term in item.get("terms", {}).get("OnDemand", {}).values():
            for dimension in term.get("priceDimensions", {}).values():
                dollars = dimension.get("pricePerUnit", {}).get("USD", "0")
                if region and dimension.get("unit", "Hrs") == "Hrs" and micros(dollars) > 0:
                    found[region] = max(found.get(region, 0), micros(dollars))
    return found
