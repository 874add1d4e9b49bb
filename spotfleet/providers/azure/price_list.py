"""Azure's prices from the Retail Prices API: public, no credentials, pages of JSON.

Source: https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices. A meter of a virtual
machine is Linux's unless its product contains "Windows". Its SKU's name ends in "Spot" for spot, and in "Low Priority"
for a market that no longer exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from typing import Any
from urllib.parse import urlsplit

from spotfleet.catalog import web
from spotfleet.catalog.pricing.values import CatalogPrice, MachineType, Source
from spotfleet.errors import SpotfleetError

URL = "https://prices.azure.com/api/retail/prices"
URL_VARIABLE = "SPOTFLEET_AZURE_PRICES_URL"
VERSION = "2023-01-01-preview"
ASKED = 8  # types in one query
PAGES = 200  # limit for one query; more would be a loop


def fetch(machines: Iterable[MachineType], day: str, tell: Callable[[str], None],
          _config: Mapping[str, str]) -> list[CatalogPrice]:
    """Of `machines`, in every region. SpotfleetError if any page is missing: half of the prices are none."""
    known = {m.name: m for m in machines}
    base = os.environ.get(URL_VARIABLE) or URL
    source = Source("Azure Retail Prices API", day, url=base)
    found: dict[tuple[str, str], CatalogPrice] = {}
    names = sorted(known)
    for i in range(0, len(names), ASKED):
        tell(f"azure: types {i + 1} to {min(i + ASKED, len(names))} of {len(names)}")
        for item in items(base, names[i:i + ASKED]):
            add(found, item, known, source)
    return list(found.values())


def items(base: str, names: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    skus = " or ".join(f"armSkuName eq '{name}'" for name in names)
    asked: dict[str, str] | None = {
        "api-version": VERSION,
        "$filter": f"serviceName eq 'Virtual Machines' and priceType eq 'Consumption' and ({skus})"}
    url = base
    for _ in range(PAGES):
        page = web.get(url, asked)
        if not isinstance(page.get("Items"), list):
            raise SpotfleetError(f"{urlsplit(base).hostname} sent a page without Items",
                                 hint="its API may have changed; try a newer spotfleet")
        yield from page["Items"]
        url, asked = page.get("NextPageLink") or "", None
        if not url:
            return
        if urlsplit(url).hostname != urlsplit(base).hostname:
            raise SpotfleetError(f"the next page is on another host: {urlsplit(url).hostname}")
    raise SpotfleetError(f"{urlsplit(base).hostname} has more than {PAGES} pages for one question")


def add(found: dict[tuple[str, str], CatalogPrice], item: Mapping[str, Any], known: Mapping[str, MachineType],
        source: Source) -> None:
    """Add an item to `found`. If one market has several meters, the most expensive one counts: cheaper ones have
    conditions."""
    machine, region = known.get(item.get("armSkuName", "")), item.get("armRegionName", "")
    kind = f"{item.get('skuName', '')} {item.get('meterName', '')}"
    if (machine is None or not region or item.get("unitOfMeasure") != "1 Hour" or item.get("currencyCode") != "USD"
            or item.get("type", "Consumption") != "Consumption" or "Low Priority" in kind
            or any(word in item.get("productName", "") for word in ("Windows", "CloudServices", "Cloud Services"))):
        return
    micros = int((Decimal(str(item.get("retailPrice", 0))) * 1_000_000).to_integral_value(ROUND_HALF_UP))
    if micros <= 0:
        return
    before = found.get((machine.name, region), CatalogPrice(machine, region))
    if "Spot" in kind:
        found[machine.name, region] = replace(before, spot_micros_h=max(before.spot_micros_h, micros),
                                              spot_source=source)
    else:
        found[machine.name, region] = replace(before, on_demand_micros_h=max(before.on_demand_micros_h, micros),
                                              on_demand_source=source)
