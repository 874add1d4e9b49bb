"""The commands `catalog` and `catalog update`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

import typer

from spotfleet.api.house import House
from spotfleet.api.machine import provider_config
from spotfleet.catalog.store import Part, Store
from spotfleet.catalog.update import Updated, told
from spotfleet.catalog.update import update as fetch
from spotfleet.catalog.values import PROVIDERS, sources
from spotfleet.cli.offers import age, days_old
from spotfleet.cli.render import table
from spotfleet.cli.talk import say
from spotfleet.config.values import did_you_mean
from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.model import FleetSpec


def show(*, as_json: bool) -> None:
    store = Store(House().path)
    found = [part for provider in PROVIDERS for packaged in (True, False)
             if (part := store.part(provider, packaged)) is not None]
    for trouble in store.troubles():
        say(f"{trouble}; what the package carries counts instead. `spotfleet catalog update` writes it anew")
    if as_json:
        print(json.dumps([_json(p, store) for p in found], indent=1))
        return
    rows = [(p.provider, _where(p, store), len(p.catalog.prices), s.name, s.as_of, age(s), count)
            for p in found if p.catalog for s, count in sources(p.catalog.prices).items()]
    print(table(["provider", "where", "rows", "source", "as of", "age", "figures"], rows, right=["rows", "figures"]))


def _where(part: Part, store: Store) -> str:
    return "updated" if part.path.parent == store.folder else "package"


def _json(part: Part, store: Store) -> dict[str, object]:
    said = sources(part.catalog.prices) if part.catalog else {}
    rates = part.catalog.region_rates if part.catalog else {}
    return {"provider": part.provider, "where": _where(part, store), "path": str(part.path),
            "rows": len(part.catalog.prices) if part.catalog else 0, "trouble": part.why,
            "sources": [{"name": s.name, "as_of": s.as_of, "age_days": days_old(s), "licence": s.licence,
                         "url": s.url, "estimate": s.estimate, "figures": n} for s, n in said.items()],
            "rates": [{"region": region, "source": r.source, "as_of": r.as_of} for (_, region), r in rates.items()]}


def update(wanted: Sequence[str], *, as_json: bool) -> None:
    """Exit code of the worst that happened to a provider that was named; of all that could be asked if none was."""
    for name in wanted:
        if name not in PROVIDERS:
            raise UsageError(f"unknown provider '{name}'{did_you_mean(name, list(PROVIDERS))}",
                             hint=f"one of {', '.join(PROVIDERS)}")
    house = House()
    day, tell = time.strftime("%Y-%m-%d", time.gmtime()), _progress()
    aws = provider_config(house, FleetSpec("", provider="aws"))
    done: list[Updated] = []
    for provider in dict.fromkeys(wanted or PROVIDERS):
        one = fetch(provider, Store(house.path), day, tell, aws)
        tell("")
        done.append(one)
        if not as_json:
            _say(one)
    if as_json:
        print(json.dumps([{"provider": u.provider, "prices": u.prices, "changed": u.changed, "refused": u.refused,
                           "path": u.path, "error": str(u.error or ""), "hint": u.error.hint if u.error else ""}
                          for u in done], indent=1))
    failed = [u.error for u in done if u.error and (wanted or not isinstance(u.error, NeedsPerson))]
    if failed or all(u.error for u in done):
        raise typer.Exit(failed[0].exit_code if failed else NeedsPerson.exit_code)


def _say(one: Updated) -> None:
    if one.error is not None:
        say(f"{one.provider}: not updated, what there was counts on: {one.error}")
        if one.error.hint:
            say(f"  do this: {one.error.hint}")
        return
    print(f"{one.provider}: {one.prices} prices, {one.changed} of them new or changed, in {one.path}")
    for line in told(one.refused):
        say(f"  refused as out of reason: {line}")


def _progress() -> Callable[[str], None]:
    """On a terminal the newest line stands alone; what ends with a newline stays, everywhere."""
    tty = sys.stderr.isatty()

    def tell(line: str) -> None:
        if tty:
            print("\r\033[K", end="", file=sys.stderr)
        if line.endswith("\n"):
            say(line.rstrip("\n"))
        elif tty:
            print(line[:100], end="", file=sys.stderr, flush=True)

    return tell
