"""Catalog of machines and prices: the package's data, and newer data from `catalog update`.

    pricing/    pure: values.py (Catalog and its parts), useful.py (cost per hour of useful work),
                ranking.py (offers in order, unknown names), table.py (a catalog as text)
    store.py    reads and writes the files
    update.py   new prices from the clouds' own APIs: entry points of group `spotfleet.catalog`
    web.py      HTTP with retries
    data/       data of the package; SOURCES.md lists the sources, `scripts/build_catalog.py` writes it

A fleet's cost is never computed from the catalog: the ledger has its own prices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from spotfleet.catalog.pricing.values import Catalog


def load(home: Path | str | None = None) -> Catalog:
    """Return the whole catalog: the package's prices, overridden by those that `catalog update` has put into `home`
    (default: SPOTFLEET_HOME). It is read once as long as no file changes."""
    from spotfleet.catalog import store

    return store.Store(home).load()


def names() -> tuple[str, ...]:
    """List the providers with prices in the catalog, sorted."""
    from spotfleet.catalog import store

    return store.names()
