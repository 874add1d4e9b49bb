"""Catalog files: the package's, overridden by those in the user's folder, SPOTFLEET_HOME/catalog/PROVIDER.csv."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import entry_points
from pathlib import Path

from spotfleet.catalog.pricing.table import CatalogError, parsed, written
from spotfleet.catalog.pricing.values import Catalog
from spotfleet.storage import atomic

PACKAGED = Path(__file__).parent / "data"
PRICE_LISTS = "spotfleet.catalog"  # group of entry points, one for each provider whose prices can be fetched


@cache
def names() -> tuple[str, ...]:
    """List the providers with prices: those of the package, and those whose prices can be fetched. Sorted."""
    fetched = (e.name for e in entry_points(group=PRICE_LISTS))
    return tuple(sorted({*(path.stem for path in PACKAGED.glob("*.csv")), *fetched}))


@dataclass(frozen=True)
class Part:
    """Catalog of one provider from one place."""

    provider: str
    path: Path
    catalog: Catalog | None  # None: it cannot be read
    why: str = ""


class Store:
    def __init__(self, home: Path | str | None = None) -> None:
        chosen = home or os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet"
        self.folder = Path(chosen).expanduser().absolute() / "catalog"

    def load(self) -> Catalog:
        """Load all catalogs. An unreadable file of the user is skipped; `problems` names it."""
        return _loaded(tuple((str(p), _stamp(p)) for provider in names()
                             for p in (PACKAGED / f"{provider}.csv", self.path(provider))))

    def path(self, provider: str) -> Path:
        return self.folder / f"{provider}.csv"

    def part(self, provider: str, packaged: bool = False) -> Part | None:
        """Return the part of `provider` in the user's folder, or in the package; None if there is none."""
        path = PACKAGED / f"{provider}.csv" if packaged else self.path(provider)
        try:
            return Part(provider, path, parsed(path.read_text()))
        except FileNotFoundError:
            return None
        except (CatalogError, OSError, UnicodeDecodeError) as error:
            return Part(provider, path, None, f"{path} cannot be read: {error}")

    def problems(self) -> list[str]:
        return [part.why for provider in names() if (part := self.part(provider)) and part.why]

    def save(self, provider: str, catalog: Catalog) -> Path:
        """Replace the user's part of `provider`, whole or not at all."""
        atomic.make_folder(self.folder)
        path, text = self.path(provider), written(provider, catalog)
        parsed(text)
        atomic.write(path, text)
        return path


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _loaded(files: tuple[tuple[str, tuple[int, int] | None], ...]) -> Catalog:
    whole = Catalog()
    for path, stamp in files:
        if stamp is None:
            continue
        try:
            whole = parsed(Path(path).read_text()).over(whole)
        except (CatalogError, OSError, UnicodeDecodeError):
            if Path(path).parent == PACKAGED:
                raise
    return whole
