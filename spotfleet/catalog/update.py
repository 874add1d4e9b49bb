"""New prices for the user's folder, by the clouds' own APIs. One provider's failure leaves what there is of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from spotfleet.catalog.store import PACKAGED, Store
from spotfleet.catalog.table import parsed
from spotfleet.catalog.values import Catalog, Price
from spotfleet.errors import SpotfleetError
from spotfleet.model import Market

# A price that is so many times what it was, or less than that part of it, is taken for a mistake. Lists hardly change.
JUMP = {Market.SPOT: 20, Market.ON_DEMAND: 5}
ABOVE_ON_DEMAND = 5  # so is a spot price so many times the one on demand
CHEAPEST, DEAREST = 1_000, 2_000_000_000  # and one beyond these, micro-dollars per hour: no machine costs that
SAID = 5  # refused prices that are told in full


@dataclass(frozen=True)
class Updated:
    provider: str
    prices: int = 0  # that were fetched and taken
    changed: int = 0  # of these, other than before
    refused: tuple[str, ...] = ()  # a line each
    path: str = ""
    error: SpotfleetError | None = None  # then nothing has changed


def update(provider: str, store: Store, day: str, tell: Callable[[str], None], aws: Mapping[str, str]) -> Updated:
    """Fetch, check and write. `day`: today, YYYY-MM-DD; `aws`: configuration of provider aws. Raises nothing that a
    provider causes: see `Updated.error`."""
    shipped = parsed((PACKAGED / f"{provider}.csv").read_text())
    mine = store.part(provider)
    known = mine.catalog.over(shipped) if mine and mine.catalog else shipped
    try:
        fetched = _fetch(provider, known, day, tell, aws)
        if not any(fetched):
            raise SpotfleetError(f"{provider}: the answer has no price that we know how to read",
                                 hint="its API may have changed; `pip install -U spotfleet`")
        taken, refused = checked(fetched, known)
        before = mine.catalog if mine and mine.catalog else Catalog()
        path = store.save(provider, Catalog(tuple(taken)).over(before))
    except SpotfleetError as error:
        return Updated(provider, error=error)
    changed = sum(_differs(p, known.by_key.get(p.key)) for p in taken)
    return Updated(provider, len(taken), changed, tuple(refused), str(path))


def _fetch(provider: str, known: Catalog, day: str, tell: Callable[[str], None],
           aws: Mapping[str, str]) -> list[Price]:
    machines = list(known.machines.values())
    match provider:
        case "aws":
            from spotfleet.catalog import aws_prices

            return aws_prices.fetch(machines, day, tell, aws)
        case "azure":
            from spotfleet.catalog import azure_prices

            return azure_prices.fetch(machines, day, tell)
        case _:
            from spotfleet.catalog import gcp_prices

            return gcp_prices.fetch(machines, day, tell)


def checked(fetched: Iterable[Price], known: Catalog) -> tuple[list[Price], list[str]]:
    """Those that may be true, and a line for each that may not; of a price with one bad market the other stays."""
    taken: list[Price] = []
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


def _doubt(price: Price, before: Price | None, market: Market) -> str:
    now, was = price.micros_h(market), before.micros_h(market) if before else 0
    full = price.on_demand_micros_h or (before.on_demand_micros_h if before else 0)
    if not now:
        return ""
    if not CHEAPEST <= now <= DEAREST:
        return f"{_dollars(now)}: no machine costs that"
    if was and not was / JUMP[market] <= now <= was * JUMP[market]:
        return f"{_dollars(now)}, which was {_dollars(was)}"
    if market is Market.SPOT and full and now > ABOVE_ON_DEMAND * full:
        return f"{_dollars(now)}, on demand {_dollars(full)}"
    return ""


def _without(price: Price, market: Market) -> Price:
    if market is Market.SPOT:
        return replace(price, spot_micros_h=0, spot_source=None)
    return replace(price, on_demand_micros_h=0, on_demand_source=None)


def _differs(price: Price, before: Price | None) -> bool:
    return before is None or any(price.micros_h(m) not in (0, before.micros_h(m)) for m in Market)


def _dollars(micros: int) -> str:
    return f"${micros / 1e6:,.4f}/h"


def told(refused: Sequence[str]) -> list[str]:
    """The first of them, and how many more there are."""
    more = len(refused) - SAID
    return [*refused[:SAID], *([f"and {more} more"] if more > 0 else [])]
