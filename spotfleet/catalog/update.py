"""Update of prices in the user's folder, from the clouds' own APIs. A provider's failure leaves its old prices in
place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any

from spotfleet.catalog.pricing.table import parsed
from spotfleet.catalog.pricing.values import Catalog, CatalogPrice, MachineType
from spotfleet.catalog.store import PACKAGED, PRICE_LISTS, Store
from spotfleet.errors import SpotfleetError
from spotfleet.model import Market
from spotfleet.words import dollars

# A price beyond this multiple of the previous one, or below that fraction of it, is a mistake. Lists hardly change.
JUMP = {Market.SPOT: 20, Market.ON_DEMAND: 5}
ABOVE_ON_DEMAND = 5  # so is a spot price so many times the one on demand
CHEAPEST, DEAREST = 1_000, 2_000_000_000  # and one beyond these, micro-dollars per hour: no machine costs that
SHOWN = 5  # refused prices that are shown in full
# A function of this shape fetches what a provider charges: (machines, day, progress, the provider's configuration).
Fetch = Callable[[Iterable[MachineType], str, Callable[[str], None], Mapping[str, Any]], list[CatalogPrice]]


@dataclass(frozen=True)
class Updated:
    provider: str
    prices: int = 0  # fetched and accepted
    changed: int = 0  # accepted prices that differ from the previous ones
    refused: tuple[str, ...] = ()  # a line each
    path: str = ""
    error: SpotfleetError | None = None  # set if nothing has changed


def update(provider: str, store: Store, day: str, progress: Callable[[str], None],
           config: Mapping[str, Any]) -> Updated:
    """Fetch, check and write. `day`: today, YYYY-MM-DD; `config`: of the provider. Raises nothing that a provider
    causes: see `Updated.error`."""
    packaged, own = PACKAGED / f"{provider}.csv", store.part(provider)
    shipped = parsed(packaged.read_text()) if packaged.exists() else Catalog()
    known = own.catalog.over(shipped) if own and own.catalog else shipped
    try:
        fetched = _price_list(provider)(list(known.machines.values()), day, progress, config)
        if not any(fetched):
            raise SpotfleetError(f"{provider}: the answer has no price that we know how to read",
                                 hint="its API may have changed; try a newer spotfleet")
        taken, refused = checked(fetched, known)
        before = own.catalog if own and own.catalog else Catalog()
        path = store.save(provider, Catalog(tuple(taken)).over(before))
    except SpotfleetError as error:
        return Updated(provider, error=error)
    changed = sum(_differs(p, known.by_key.get(p.key)) for p in taken)
    return Updated(provider, len(taken), changed, tuple(refused), str(path))


def _price_list(provider: str) -> Fetch:
    """Import the provider's price list, which may need an SDK."""
    found = {e.name: e for e in entry_points(group=PRICE_LISTS)}
    if provider not in found:
        raise SpotfleetError(f"{provider}: this release cannot fetch its prices",
                             hint=f"it can fetch those of {', '.join(sorted(found))}")
    return found[provider].load()


def checked(fetched: Iterable[CatalogPrice], known: Catalog) -> tuple[list[CatalogPrice], list[str]]:
    """Return the plausible prices, and a line for each refused one; if one market of a price is bad, the other stays.
    """
    taken: list[CatalogPrice] = []
    refused: list[str] = []
    for price in fetched:
        before = known.by_key.get(price.key)
        for market in Market:
            why = _doubt(price, before, market)
            if why:
                refused.append(f"{price.machine.name} {price.region} {market.value} {why}")
                price = _without(price, market)
        if price.on_demand_micros_h or price.spot_micros_h:
            taken.append(price)
    return taken, refused


def _doubt(price: CatalogPrice, before: CatalogPrice | None, market: Market) -> str:
    now, was = price.micros_h(market), before.micros_h(market) if before else 0
    full = price.on_demand_micros_h or (before.on_demand_micros_h if before else 0)
    if not now:
        return ""
    if not CHEAPEST <= now <= DEAREST:
        return f"{dollars(now)}/h: no machine costs that"
    if was and not was / JUMP[market] <= now <= was * JUMP[market]:
        return f"{dollars(now)}/h, which was {dollars(was)}/h"
    if market is Market.SPOT and full and now > ABOVE_ON_DEMAND * full:
        return f"{dollars(now)}/h, on demand {dollars(full)}/h"
    return ""


def _without(price: CatalogPrice, market: Market) -> CatalogPrice:
    if market is Market.SPOT:
        return replace(price, spot_micros_h=0, spot_source=None)
    return replace(price, on_demand_micros_h=0, on_demand_source=None)


def _differs(price: CatalogPrice, before: CatalogPrice | None) -> bool:
    return before is None or any(price.micros_h(m) not in (0, before.micros_h(m)) for m in Market)


def shortened(refused: Sequence[str]) -> list[str]:
    """Return the first lines, and the number of further ones."""
    more = len(refused) - SHOWN
    return [*refused[:SHOWN], *([f"and {more} more"] if more > 0 else [])]
