"""The command `offers`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any

from spotfleet import providers
from spotfleet.api.home import Home
from spotfleet.api.offers import OffersQuery, offers, place
from spotfleet.catalog.pricing.ranking import BOTH, OfferRow, best
from spotfleet.catalog.pricing.useful import BANDS, BOOT_S, REPEATED_S
from spotfleet.catalog.pricing.values import Source
from spotfleet.cli.console import print_message
from spotfleet.cli.tables import columns, table
from spotfleet.config.values import accelerators
from spotfleet.errors import UsageError
from spotfleet.model import Market, Need

SHOWN = 20
HEAD = ["provider", "region", "zone", "type", "GPUs", "spot $/h", "on-demand $/h", "savings", "taken/month",
        "useful $/GPU-h", "age"]
RIGHT = ["spot $/h", "on-demand $/h", "savings", "useful $/GPU-h"]
SHORT = {"on-demand $/h": "on-demand", "useful $/GPU-h": "useful"}  # where the terminal is too narrow for the table
DROP = ["zone", "age", "taken/month", "savings", "GPUs", "region"]


def show(*, gpus: str, instance_type: str, infra: str, spot: bool | None, everything: bool, live: bool | None,
         as_json: bool) -> None:
    kind, count = _gpus(gpus)
    provider, region, zone = place(infra)
    markets = BOTH if spot is None else (Market.SPOT,) if spot else (Market.ON_DEMAND,)
    need = Need(region=region, zone=zone, instance_type=instance_type, accelerator=kind, accelerator_count=count)
    rows = offers(Home(), OffersQuery(need, provider, markets, live, cpus=everything), print_message)
    chosen = rows if everything else best(rows)
    if as_json:
        print(json.dumps([_json(r) for r in (chosen if everything else chosen[:SHOWN])], indent=1))
        return
    usable = providers.names()
    chosen = sorted(chosen, key=lambda r: r.price.machine.provider not in usable)  # else in the same order
    shown = chosen if everything else chosen[:SHOWN]
    print(_table([_cells(r) for r in shown]))
    if others := sorted({r.price.machine.provider for r in shown} - set(usable)):
        print_message(f"{' and '.join(others)}, listed last: prices for comparison; spotfleet cannot launch there yet")
    _notes(rows, shown)


def _table(cells: list[list[str]]) -> str:
    width = columns()
    whole = table(HEAD, cells, right=RIGHT, width=0)
    if not width or max(map(len, whole.splitlines())) <= width:
        return whole
    return table([SHORT.get(name, name) for name in HEAD], cells, right=[SHORT.get(name, name) for name in RIGHT],
                 drop=DROP, width=width)


def _gpus(text: str) -> tuple[str, int]:
    if not text:
        return "", 0
    try:
        (name, count), *more = accelerators(text)
    except ValueError as error:
        raise UsageError(f"--gpus {text}: {error}", hint="such as A100:8, or A100 for any number") from None
    if more:
        raise UsageError(f"--gpus {text}: one kind at a time", hint="such as A100:8")
    return name, count if ":" in text else 0


def _cells(row: OfferRow) -> list[str]:
    price, savings = row.price, row.savings
    machine = price.machine
    band = BANDS[price.band] if price.band is not None else "?"
    return [machine.provider, price.region, _zones(price.zones, price.region), machine.name,
            f"{machine.accelerator}:{machine.count}" if machine.count else "-",
            _price(price.spot_micros_h, price.spot_source), _price(price.on_demand_micros_h, price.on_demand_source),
            "-" if savings is None else f"{100 * savings:.0f} %", band, _dollars(row.useful_micros_h), _ages(row)]


def _zones(zones: Sequence[str], region: str) -> str:
    return ",".join(z.removeprefix(region).lstrip("-") for z in zones) or "-"


def _dollars(micros: int) -> str:
    return f"{micros / 1e6:.4f}" if micros < 10_000_000 else f"{micros / 1e6:.3f}"


def _price(micros: int, source: Source | None) -> str:
    return ("~" if source and source.estimate else "") + _dollars(micros) if micros else "-"


def _ages(row: OfferRow) -> str:
    """Format the ages of the spot price and of the on-demand price; one if they are equal."""
    ages = [age(s) for s in (row.price.spot_source, row.price.on_demand_source) if s]
    return " / ".join(dict.fromkeys(ages))


def age(source: Source, today: float | None = None) -> str:
    """Format a source's age: live, today, 3 d, 5 mo, 2 y."""
    if source.live:
        return "live"
    days = days_old(source, today)
    if days < 1:
        return "today"
    if days < 60:
        return f"{days} d"
    return f"{days // 30} mo" if days < 730 else f"{days // 365} y"


def days_old(source: Source, today: float | None = None) -> int:
    day = datetime.fromtimestamp(time.time() if today is None else today, UTC).date()  # sources have UTC dates
    return max(0, (day - date.fromisoformat(source.as_of)).days)


def _json(row: OfferRow) -> dict[str, Any]:
    price, machine = row.price, row.price.machine
    return {
        "provider": machine.provider, "region": price.region, "zones": list(price.zones), "type": machine.name,
        "accelerator": machine.accelerator, "gpus": machine.count, "vcpus": machine.vcpus,
        "memory_gib": machine.memory_gib, "spot": _figure(price.spot_micros_h, price.spot_source),
        "on_demand": _figure(price.on_demand_micros_h, price.on_demand_source),
        "savings": None if row.savings is None else round(row.savings, 4),
        "interruption_band": None if price.band is None else BANDS[price.band],
        "interruption_band_as_of": price.band_source.as_of if price.band_source else None,
        "market": row.market.value,
        "expected_lifetime_s": None if row.market is Market.ON_DEMAND else round(row.lifetime_s),
        "boot_s": BOOT_S, "repeated_s": REPEATED_S, "useful_micros_per_gpu_h": row.useful_micros_h,
        "useful_usd_per_gpu_h": row.useful_micros_h / 1e6,
    }


def _figure(micros: int, source: Source | None) -> dict[str, Any] | None:
    if not micros or source is None:
        return None
    return {"usd_h": micros / 1e6, "micros_h": micros, "source": source.name, "url": source.url, "as_of": source.as_of,
            "live": source.live, "estimate": source.estimate, "age_days": 0 if source.live else days_old(source)}


def _notes(rows: Sequence[OfferRow], shown: Sequence[OfferRow]) -> None:
    if len(shown) < len(rows):
        print_message(f"{len(shown)} of {len(rows)}, the best of each type and region; --all shows the others")
    if any(r.price.spot_source and r.price.spot_source.estimate for r in shown):
        print_message("~ estimated from an average saving; `spotfleet catalog update` fetches real prices")
    print_message("useful $/GPU-h: price x (1 + (boot + repeated) / expected lifetime) / GPUs; docs/offers.md")
