"""Pools for a need: machine types of the catalog x the zones that sell them, at the prices of today.

Compute Engine has no price of a machine in its API, except for Spot machines: the capacity history has their list
prices. Everything else comes from the catalog, whose prices `spotfleet catalog update` renews. Committed-use prices
are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from spotfleet.catalog import load
from spotfleet.catalog.pricing.values import CatalogPrice
from spotfleet.errors import SpotfleetError
from spotfleet.model import Market, Need, Offer, PricePoint
from spotfleet.providers.gcp.mapping import listing, names
from spotfleet.providers.gcp.mapping.quotas import metric
from spotfleet.providers.gcp.session import GcpAccount
from spotfleet.providers.kit import offers as kit
from spotfleet.providers.kit.mapping import types as kit_types
from spotfleet.providers.kit.mapping.prices import price_points
from spotfleet.providers.kit.mapping.types import OfferedType
from spotfleet.providers.kit.offers import PricedTypes, RegionChoice, RegionPrice
from spotfleet.providers.kit.requests import each
from spotfleet.words import did_you_mean

ZONES_S = 6 * 3600.0
SPOT_S = 3600.0  # spot prices change once a day at most
STALE_S, FAILED_S = 24 * 3600.0, 600.0
SCORES_S = 600.0
REGIONS_ASKED = 8  # in a fleet with more regions, the catalog's prices count: each type and region is one request
HISTORY = ("PRICE",)
FAR_ABOVE = 10

History = list[tuple[float, int]]


def check(account: GcpAccount) -> None:
    """Return if the credentials are valid and the project may be read; raise NeedsPerson otherwise."""
    account.ask("projects", "get")


def offers(account: GcpAccount, need: Need) -> list[Offer]:
    """List the pools that satisfy `need`. Raises an error only if no region has an offer."""
    home = names.region_of(need.zone)
    regions = [r for r in account.regions if need.region in ("", r) and home in ("", r)]
    return kit.of_regions(regions, lambda region: _in_region(account, region, need))


def _in_region(account: GcpAccount, region: str, need: Need) -> list[Offer]:
    known = [p for p in load().matching(replace(need, region=region, zone="", max_micros_h=0), "gcp")
             if p.region == region]
    types = {p.machine.name: offered(p) for p in known}
    if not types:
        return []
    sold = _zones(account, region, types)
    here = {kind: [z for z in sold.get(kind, ()) if need.zone in ("", z)] for kind in types}
    regular = {p.machine.name: p.on_demand_micros_h for p in known}
    spot = {}
    if need.use_spot:
        for kind, points in _histories(account, region, [k for k in types if here[k]], regular).items():
            spot.update({(zone, kind): points[-1][1] for zone in here[kind] if points})
    return kit.priced("gcp", region, need, PricedTypes(types, here, spot, regular), metric)


def offered(price: CatalogPrice) -> OfferedType:
    machine = price.machine
    return OfferedType(machine.name, machine.vcpus, int(machine.memory_gib * 1024), machine.count, machine.accelerator)


def _zones(account: GcpAccount, region: str, kinds: Iterable[str]) -> dict[str, list[str]]:
    """Return machine type -> zones of the region that sell it, and that sell the GPUs attached to it."""
    found: dict[str, list[str]] = {}
    machines = _sold(account, "machine_types", tuple(sorted({listing.split(kind)[0] for kind in kinds})))
    attached = _sold(account, "accelerator_types", tuple(sorted({listing.split(k)[1] for k in kinds} - {""})))
    for kind in kinds:
        base, accelerator, _ = listing.split(kind)
        zones = machines.get(base, frozenset())
        zones = zones & attached.get(accelerator, frozenset()) if accelerator else zones
        found[kind] = sorted(z for z in zones if names.region_of(z) == region)
    return found


def _sold(account: GcpAccount, service: str, kinds: tuple[str, ...]) -> Mapping[str, frozenset[str]]:
    """Return type -> zones that have it."""
    def ask() -> dict[str, frozenset[str]]:
        zones: dict[str, set[str]] = defaultdict(set)
        wanted = " OR ".join(f'(name = "{kind}")' for kind in kinds)
        for thing in account.everywhere(service, service, filter=wanted):
            zones[thing["name"]].add(names.last(thing.get("zone", "")))
        return {kind: frozenset(of) for kind, of in zones.items()}

    return account.cached((service, kinds), ZONES_S, ask, stale_s=STALE_S) if kinds else {}


# ---- prices


def prices(account: GcpAccount, pools: Sequence[str], since: float) -> list[PricePoint]:
    """Return the price in force at `since` and every later change, oldest first, per pool; none for unsold pools."""
    def spot(region: str, types: tuple[str, ...]) -> dict[tuple[str, str], History]:
        zones: dict[str, set[str]] = defaultdict(set)
        for pool in pools:
            _, zone, kind, market = pool.split("/")
            if market == Market.SPOT.value:
                zones[kind].add(zone)
        found = _histories(account, region, types, _regular(region, types))
        return {(zone, kind): points for kind, points in found.items() for zone in zones[kind]}

    return price_points(pools, since, names.region_of, spot, _regular)


def _regular(region: str, types: Iterable[str]) -> dict[str, int]:
    known = load().by_key
    return {kind: p.on_demand_micros_h for kind in types
            if (p := known.get(("gcp", kind, region))) is not None and p.on_demand_micros_h}


def _histories(account: GcpAccount, region: str, types: Iterable[str],
               regular: Mapping[str, int]) -> dict[str, History]:
    """Return machine type -> its spot prices, oldest first: Google's history, or else the price of the catalog.

    A price far above that on demand is none of an hour, and is left out.
    """
    kinds, known = list(types), load().by_key
    asked = kinds if 0 < len(account.settings.spec.regions) <= REGIONS_ASKED else []
    found = {kind: [] for kind in kinds} | dict(zip(asked, each(lambda k: _history(account, region, k), asked),
                                                    strict=True))
    for kind in kinds:
        limit = FAR_ABOVE * regular.get(kind, 0)
        found[kind] = [(at, micros_h) for at, micros_h in found[kind] if not limit or micros_h <= limit]
        price = known.get(("gcp", kind, region))
        if not found[kind] and price is not None and price.spot_micros_h:
            found[kind] = [(0.0, price.spot_micros_h)]
    return found


def _history(account: GcpAccount, region: str, kind: str) -> History:
    """Return Google's record of spot prices; [] if it has none, or does not answer."""
    def ask() -> History:
        base, accelerator, gpus = listing.split(kind)
        answer = account.ask("advice", "capacity_history", region=region, capacity_history_request_resource={
            "types": list(HISTORY), "location_policy": {"location": f"regions/{region}"},
            "instance_properties": {
                "machine_type": base, "scheduling": {"provisioning_model": "SPOT"},
                **({"guest_accelerators": [{"accelerator_type": accelerator, "accelerator_count": gpus}]}
                   if accelerator else {})}})
        points = [(listing.instant((r.get("interval") or {}).get("start_time", "")), _micros(r.get("list_price") or {}))
                  for r in answer.get("price_history") or ()]
        return sorted(point for point in points if point[1])

    try:
        return account.cached(("history", region, kind), SPOT_S, ask, failed_s=FAILED_S, stale_s=STALE_S)
    except SpotfleetError:
        return []


def _micros(money: Mapping[str, object]) -> int:
    if money.get("currency_code", "USD") not in ("", "USD"):
        return 0
    return int(str(money.get("units") or 0)) * 1_000_000 + round(int(str(money.get("nanos") or 0)) / 1000)


def priced(account: GcpAccount, bare: Offer) -> Offer:
    """Add what the catalog knows of a pool. Sends no request: the listing must not wait for prices."""
    price = load().by_key.get(("gcp", bare.instance_type, bare.region))
    if price is None:
        return bare
    spot = bare.market is Market.SPOT
    return replace(bare, slots=price.machine.slots, accelerator=price.machine.accelerator,
                   price_micros_h=price.spot_micros_h if spot else price.on_demand_micros_h,
                   on_demand_micros_h=price.on_demand_micros_h, quota=metric(bare.instance_type, bare.market))


# ---- choice of a region, and words that match nothing


def cheapest_region(account: GcpAccount, any_of: Sequence[Need], dispatcher: Need, hosts: int = 1) -> RegionChoice:
    """Choose the region where `hosts` hosts and the dispatcher together cost least now; see `kit.cheapest_region`."""
    def row(region: str) -> RegionPrice:
        def here(need: Need) -> list[Offer]:
            return [o for o in offers(account, replace(need, region=need.region or region)) if o.region == region]

        pools = list({o.pool: o for need in any_of for o in here(need)}.values())
        return kit.region_price(region, pools, here(dispatcher), hosts,
                                lambda: _score(account, region, pools, hosts))

    selling = {p.region for need in any_of for p in load().matching(need, "gcp")}
    regions = [r for r in account.regions if r in selling] or list(account.regions)
    return kit.cheapest_region("gcp", regions, row, lambda: unknown(account, [*any_of, dispatcher]))


def _score(account: GcpAccount, region: str, pools: Sequence[Offer], hosts: int) -> int:
    """Return Google's estimate, 1 to 10, of the chance to get `hosts` spot hosts there now; 0 if unknown."""
    kinds = sorted({listing.split(o.instance_type)[0] for o in pools
                    if o.market is Market.SPOT and not listing.split(o.instance_type)[1]})
    if not kinds:
        return 0

    def ask() -> int:
        answer = account.ask("advice", "capacity", region=region, capacity_advice_request_resource={
            "size": hosts, "distribution_policy": {"target_shape": "ANY_SINGLE_ZONE" if account.settings.placement
                                                   != "spread" else "ANY"},
            "instance_flexibility_policy": {"instance_selections": {"any": {"machine_types": kinds}}},
            "instance_properties": {"scheduling": {"provisioning_model": "SPOT"}}})
        scores = [(r.get("scores") or {}).get("obtainability", 0.0) for r in answer.get("recommendations") or ()]
        return max((max(1, round(10 * score)) for score in scores), default=0)

    try:
        return account.cached(("score", region, tuple(kinds), hosts), SCORES_S, ask, failed_s=FAILED_S)
    except SpotfleetError:
        return 0


def unknown(account: GcpAccount, needs: Sequence[Need]) -> str:
    """Name the words in `needs` that match no machine type of the catalog, and no zone of the project."""
    if nowhere := sorted({n.zone for n in needs if n.zone} - set(account.zones())):
        return f"there is no zone {', '.join(nowhere)}{did_you_mean(nowhere[0], account.zones())}"
    types = list({name: offered(p) for p in load().prices if p.machine.provider == "gcp"
                  for name in [p.machine.name]}.values())
    found = []
    for need in needs:
        word = kit_types.unknown_type(need, [t.name for t in types], "the catalog of Google Cloud")
        found += [word] if word else kit_types.problems(
            need, [t for t in types if need.instance_type in ("", t.name) and (t.gpus or not need.accelerator)],
            "Google Cloud")
    return "; ".join(dict.fromkeys(found))
