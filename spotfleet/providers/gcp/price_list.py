"""GCP's prices from the Cloud Billing Catalog API.

GCP sells cores, memory and GPUs instead of machines: a machine costs their sum, where a region has all of them.

Source: https://cloud.google.com/billing/v1/how-tos/catalog-api. The API requires an identity: an API key in
GOOGLE_API_KEY, or the credentials that google-auth finds. Local SSDs, which some types include, are SKUs of their own
and are left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from spotfleet.catalog import web
from spotfleet.catalog.pricing.values import CatalogPrice, MachineType, Source
from spotfleet.errors import NeedsPerson, SpotfleetError
from spotfleet.model import Market

URL = "https://cloudbilling.googleapis.com"
URL_VARIABLE, KEY_VARIABLE = "SPOTFLEET_GCP_BILLING_URL", "GOOGLE_API_KEY"
COMPUTE = "6F81-5844-456A"  # the service Compute Engine
PAGE, PAGES = 5000, 100
HINT = ("make an API key that may call the Cloud Billing API (console: APIs and services, Credentials) and put it into "
        f"{KEY_VARIABLE}; or `pip install google-auth` and `gcloud auth application-default login`")
FAMILIES = {"a2": "A2", "a3": "A3", "a3-megagpu": "A3Plus", "g2": "G2", "e2": "E2", "n1": "N1"}  # as SKUs name them
GPUS = {"A100": ("Tesla A100",), "A100-80GB": ("Tesla A100 80GB",), "H100": ("H100 80GB",), "L4": ("L4",),
        "H100-MEGA": ("H100 80GB Plus", "H100 80GB Mega"), "T4": ("Tesla T4",), "V100": ("Tesla V100",)}
# N1 types with attached GPUs: vCPUs, GPU, number of GPUs. Each is within Compute Engine's limits of vCPUs per GPU.
ATTACHED = [(4, "T4", 1), (8, "T4", 1), (16, "T4", 2), (32, "T4", 4), (8, "V100", 1), (16, "V100", 2), (32, "V100", 4)]
N1 = [MachineType("gcp", f"n1-standard-{cores}+nvidia-tesla-{gpu.lower()}x{count}", cores, cores * 3.75, gpu, count)
      for cores, gpu, count in ATTACHED]
SHARED = {"e2-micro": Decimal("0.25"), "e2-small": Decimal("0.5"), "e2-medium": Decimal(1)}  # cores that are billed
# Neither pattern matches cheaper, limited SKUs: "... in Calendar Mode", "... attached to DWS Defined Duration VMs ...".
PART = re.compile(r"^(?:Spot Preemptible )?(?P<family>[A-Z]\d\w*)(?: Predefined)? Instance (?P<part>Core|Ram) "
                  r"running in ")
GPU = re.compile(r"^(?:Nvidia |NVIDIA )?(?P<gpu>.+?) GPU (?:attached to Spot Preemptible VMs )?running in ")

Parts = dict[tuple[str, Market, str], Decimal]  # (part, market, region) -> dollars per hour and piece


def fetch(machines: Iterable[MachineType], day: str, tell: Callable[[str], None],
          _config: Mapping[str, str]) -> list[CatalogPrice]:
    """Of `machines`, and of N1 types with GPUs, in every region that has all their parts. SpotfleetError if any page is
    missing; NeedsPerson without a way to say who asks."""
    base = os.environ.get(URL_VARIABLE) or URL
    source = Source("Cloud Billing Catalog API", day, url=base)
    parts: Parts = {}
    for sku in skus(base, tell):
        for key, dollars in parsed(sku):
            parts[key] = max(dollars, parts.get(key, dollars))
    regions = sorted({region for _, _, region in parts})
    known = {m.name: m for m in (*N1, *machines)}
    found = [_price(m, region, parts, source) for m in known.values() for region in regions]
    return [p for p in found if p.on_demand_micros_h or p.spot_micros_h]


def skus(base: str, tell: Callable[[str], None]) -> Iterator[Mapping[str, Any]]:
    headers, token, count = _credentials(), "", 0
    for _ in range(PAGES):
        asked = {"pageSize": str(PAGE), "currencyCode": "USD", **({"pageToken": token} if token else {})}
        try:
            page = web.get(f"{base}/v1/services/{COMPUTE}/skus", asked, headers)
        except NeedsPerson as error:
            raise NeedsPerson(str(error), hint=HINT) from error
        if not isinstance(page.get("skus"), list):
            raise SpotfleetError("a page of the Cloud Billing Catalog API has no skus",
                                 hint="its API may have changed; try a newer spotfleet")
        count += len(page["skus"])
        tell(f"gcp: {count} SKUs")
        yield from page["skus"]
        token = page.get("nextPageToken") or ""
        if not token:
            return
    raise SpotfleetError(f"the Cloud Billing Catalog API has more than {PAGES} pages")


def parsed(sku: Mapping[str, Any]) -> list[tuple[tuple[str, Market, str], Decimal]]:
    """Return the prices that a SKU has for known parts; [] for all others: commitments, sole tenancy, custom machines.
    """
    category, text = sku.get("category", {}), sku.get("description", "")
    market = {"OnDemand": Market.ON_DEMAND, "Preemptible": Market.SPOT}.get(category.get("usageType", ""))
    part = (f"{m['family']} {m['part']}" if (m := PART.match(text)) else m["gpu"] if (m := GPU.match(text)) else "")
    if market is None or not part or category.get("resourceFamily") != "Compute" or not sku.get("pricingInfo"):
        return []
    rates = sku["pricingInfo"][-1].get("pricingExpression", {}).get("tieredRates") or []
    if not rates:
        return []
    price = rates[-1].get("unitPrice", {})
    dollars = Decimal(price.get("units") or 0) + Decimal(price.get("nanos") or 0) / 10**9
    return [((part, market, region), dollars) for region in sku.get("serviceRegions", []) if dollars > 0]


def _price(machine: MachineType, region: str, parts: Parts, source: Source) -> CatalogPrice:
    spot, full = (_sum(machine, region, parts, market) for market in (Market.SPOT, Market.ON_DEMAND))
    return CatalogPrice(machine, region, full, spot, source if full else None, source if spot else None)


def _sum(machine: MachineType, region: str, parts: Parts, market: Market) -> int:
    """Return the price of all parts; 0 if a part has no price."""
    family = FAMILIES.get(machine.name.rpartition("-")[0]) or FAMILIES.get(machine.name.partition("-")[0], "")
    wanted = [((f"{family} Core",), SHARED.get(machine.name, Decimal(machine.vcpus))),
              ((f"{family} Ram",), Decimal(str(machine.memory_gib)))]
    if machine.count:
        wanted.append((GPUS.get(machine.accelerator, ()), Decimal(machine.count)))
    total = Decimal(0)
    for names, count in wanted:
        prices = [parts[name, market, region] for name in names if (name, market, region) in parts]
        if not prices:
            return 0
        total += prices[0] * count
    return int((total * 1_000_000).to_integral_value(ROUND_HALF_UP))


def _credentials() -> dict[str, str]:
    if key := os.environ.get(KEY_VARIABLE, ""):
        return {"X-Goog-Api-Key": key}
    try:
        import google.auth
        import google.auth.transport.requests
    except ImportError:
        raise NeedsPerson("gcp: nobody says who asks: no API key, and google-auth is not installed",
                          hint=HINT) from None
    try:
        found, project = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-billing.readonly"])
        found.refresh(google.auth.transport.requests.Request())
    except google.auth.exceptions.GoogleAuthError as error:
        raise NeedsPerson(f"gcp: no valid credentials: {error}", hint=HINT) from error
    return {"Authorization": f"Bearer {found.token}", **({"X-Goog-User-Project": project} if project else {})}
