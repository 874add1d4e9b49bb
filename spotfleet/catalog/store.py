"""Catalog files: the package's, and over them those in the user's folder, SPOTFLEET_HOME/catalog/PROVIDER.csv."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from spotfleet.catalog.table import Unreadable, parsed, written
from spotfleet.catalog.values import PROVIDERS, Catalog

PACKAGED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Part:
    """What is there of one provider, in one place."""

    provider: str
    path: Path
    catalog: Catalog | None  # None: it cannot be read
    why: str = ""


class Store:
    def __init__(self, home: Path | str | None = None) -> None:
        chosen = home or os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet"
        self.folder = Path(chosen).expanduser().absolute() / "catalog"

    def load(self) -> Catalog:
        """A file of the user's that cannot be read is passed over; `troubles` names it."""
        return _loaded(tuple((str(p), _stamp(p)) for provider in PROVIDERS
                             for p in (PACKAGED / f"{provider}.csv", self.path(provider))))

    def path(self, provider: str) -> Path:
        return self.folder / f"{provider}.csv"

    def part(self, provider: str, packaged: bool = False) -> Part | None:
        """What the user's folder, or the package, has of `provider`; None for nothing."""
        path = PACKAGED / f"{provider}.csv" if packaged else self.path(provider)
        try:
            return Part(provider, path, parsed(path.read_text()))
        except FileNotFoundError:
            return None
        except (Unreadable, OSError, UnicodeDecodeError) as error:
            return Part(provider, path, None, f"{path} cannot be read: {error}")

    def troubles(self) -> list[str]:
        return [part.why for provider in PROVIDERS if (part := self.part(provider)) and part.why]

    def save(self, provider: str, catalog: Catalog) -> Path:
        """Replace what the user's folder has of `provider`, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path, text = self.path(provider), written(provider, catalog)
        parsed(text)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with fresh.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
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
        except (Unreadable, OSError, UnicodeDecodeError):
            if Path(path).parent == PACKAGED:
                raise
    return whole
