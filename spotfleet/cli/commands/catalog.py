"""The commands `catalog` and `catalog update`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

import typer

from spotfleet import providers
from spotfleet.api.home import Home
from spotfleet.api.machine import provider_config
from spotfleet.catalog.pricing.values import sources
from spotfleet.catalog.store import Part, Store, names
from spotfleet.catalog.update import Updated, shortened
from spotfleet.catalog.update import update as update_provider
from spotfleet.cli.commands.offers import age, days_old
from spotfleet.cli.console import print_message
from spotfleet.cli.tables import table
from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.model import FleetSpec
from spotfleet.words import did_you_mean


def show(*, as_json: bool) -> None:
    store = Store(Home().path)
    found = [part for provider in names() for packaged in (True, False)
             if (part := store.part(provider, packaged)) is not None]
    for trouble in store.problems():
        print_message(f"{trouble}; what the package carries counts instead. `spotfleet catalog update` writes it anew")
    if as_json:
        print(json.dumps([_json(p, store) for p in found], indent=1))
        return
    rows = [(p.provider, _where(p, store), len(p.catalog.prices), s.name, s.as_of, age(s), count)
            for p in found if p.catalog for s, count in sources(p.catalog.prices).items()]
    print(table(["provider", "where", "rows", "source", "as of", "age", "figures"], rows, right=["rows", "figures"],
                drop=["as of", "rows", "where"]))


def _where(part: Part, store: Store) -> str:
    return "updated" if part.path.parent == store.folder else "package"


def _json(part: Part, store: Store) -> dict[str, object]:
    found = sources(part.catalog.prices) if part.catalog else {}
    rates = part.catalog.region_rates if part.catalog else {}
    return {"provider": part.provider, "where": _where(part, store), "path": str(part.path),
            "rows": len(part.catalog.prices) if part.catalog else 0, "trouble": part.why,
            "sources": [{"name": s.name, "as_of": s.as_of, "age_days": days_old(s), "licence": s.licence,
                         "url": s.url, "estimate": s.estimate, "figures": n} for s, n in found.items()],
            "rates": [{"region": region, "source": r.source, "as_of": r.as_of} for (_, region), r in rates.items()]}


def update(wanted: Sequence[str], *, as_json: bool) -> None:
    """Update the catalog of the named providers, or of all. Exits with the first failure's code.

    Missing credentials of a provider that was not named count as a failure only if all providers failed.
    """
    for name in wanted:
        if name not in names():
            raise UsageError(f"unknown provider '{name}'{did_you_mean(name, names())}",
                             hint=f"one of {', '.join(names())}")
    home = Home()
    day, progress = time.strftime("%Y-%m-%d", time.gmtime()), _progress()
    done: list[Updated] = []
    for provider in dict.fromkeys(wanted or names()):
        config = provider_config(home, FleetSpec("", provider=provider)) if provider in providers.names() else {}
        one = update_provider(provider, Store(home.path), day, progress, config)
        progress("")
        done.append(one)
        if not as_json:
            _print_result(one)
    if as_json:
        print(json.dumps([{"provider": u.provider, "prices": u.prices, "changed": u.changed, "refused": u.refused,
                           "path": u.path, "error": str(u.error or ""), "hint": u.error.hint if u.error else ""}
                          for u in done], indent=1))
    failed = [u.error for u in done if u.error and (wanted or not isinstance(u.error, NeedsPerson))]
    if failed or all(u.error for u in done):
        raise typer.Exit(failed[0].exit_code if failed else NeedsPerson.exit_code)


def _print_result(one: Updated) -> None:
    if one.error is not None:
        print_message(f"{one.provider}: not updated, what there was counts on: {one.error}")
        if one.error.hint:
            print_message(f"  do this: {one.error.hint}")
        return
    print(f"{one.provider}: {one.prices} prices, {one.changed} of them new or changed, in {one.path}")
    for line in shortened(one.refused):
        print_message(f"  refused as out of reason: {line}")


def _progress() -> Callable[[str], None]:
    """Return a printer of progress: on a terminal each line replaces the last; a line that ends with a newline stays,
    also elsewhere."""
    tty = sys.stderr.isatty()

    def progress(line: str) -> None:
        if tty:
            print("\r\033[K", end="", file=sys.stderr)
        if line.endswith("\n"):
            print_message(line.rstrip("\n"))
        elif tty:
            print(line[:100], end="", file=sys.stderr, flush=True)

    return progress
