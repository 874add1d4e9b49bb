"""Where machines are sold and at which price: what comes with the package, and what `catalog update` has fetched since.

    values.py   Catalog and what it is made of (pure)       useful.py   cost per hour of useful work (pure)
    ranking.py  offers in order, wrong words (pure)         table.py    a catalog as text (pure)
    store.py    reads and writes the files                  update.py   new prices by the clouds' own APIs:
    web.py      HTTP that is tried again                    aws_prices.py, azure_prices.py, gcp_prices.py
    data/       what the package carries; SOURCES.md says whose word it is, `scripts/build_catalog.py` writes it

Nothing that a fleet has cost is ever computed from here: the ledger has its own prices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from spotfleet.catalog.values import Catalog


def load(home: Path | str | None = None) -> Catalog:
    """All that is known: the package's prices under those that `catalog update` has put into `home` (of
    SPOTFLEET_HOME). Read once as long as no file changes."""
    from spotfleet.catalog import store

    return store.Store(home).load()
