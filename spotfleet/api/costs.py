"""What fleets have cost, of one or of all of this home, living or down; and beside the cloud's own bill."""

from __future__ import annotations

import csv
import gzip
import io
import re
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from spotfleet.api import reports
from spotfleet.api.fleet import Fleet
from spotfleet.api.house import Folder, House
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.fleet import cost_reconcile
from spotfleet.fleet.cost_groups import Books
from spotfleet.fleet.cost_reconcile import HOW, Reconciliation

UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
PARQUET = b"PAR1"


def costs(names: Sequence[str] = (), home: Path | str | None = None) -> list[Books]:
    """The ledgers of the fleets of these names, or of all that this home remembers, those that are down and those whose
    name is used again too, under the names that they have here; [] when there is none. A fleet whose ledgers cannot be
    had, or not whole, says so in `missing`. Cut them with `fleet.cost_groups`. Raises NoSuchFleet for an unknown name.
    """
    house = House(home)
    if names:
        return [_old(old) if (old := _ended(house, name)) else Fleet(house.find(name).name, home).books()
                for name in dict.fromkeys(names)]
    house.sweep()
    return [*(_books(folder, home) for folder in house.fleets()), *(_old(folder) for folder in house.old())]


def whole(name: str = "", home: Path | str | None = None) -> Books:
    """As `costs` of one fleet, or of the only one there is; raises SpotfleetError where its ledgers cannot be had."""
    old = _ended(House(home), name)
    return reports.ended_books(old) if old else Fleet(name, home).books(whole=True)


def reconcile(file: Path, names: Sequence[str] = (), home: Path | str | None = None) -> Reconciliation:
    """Compare the ledgers with a billing export of AWS, CSV or CSV in gzip: those of the fleets of these names, or of
    all. Raises UsageError for a file that is no such export."""
    books = costs(names, home)
    try:
        with _opened(file) as text:
            lines = csv.DictReader(text, strict=True)
            header = list(lines.fieldnames or [])
            if not header:
                raise UsageError(f"{file} is empty", hint=HOW)
            return cost_reconcile.compare(books, header, lines, everything=not names)
    except (OSError, EOFError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{file} cannot be read: {said}", hint=HOW) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no CSV file: {error}", hint=HOW) from None


def instant(text: str, now: float | None = None) -> float:
    """Unix seconds of "2026-11-22", "2026-11-22T14:30" (UTC, unless it says otherwise) or "36h", "7d" before `now`."""
    now = time.time() if now is None else now
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw])", text.strip()):
        return now - float(found[1]) * UNITS_S[found[2]]
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(f"'{text}' is no time", hint="use 2026-11-22, 2026-11-22T14:30 (UTC), 36h, 7d") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _opened(file: Path) -> IO[str]:
    """The text of a plain or a compressed file, by what it begins with."""
    raw = file.open("rb")
    begins = raw.read(4)
    raw.seek(0)
    if begins == PARQUET:
        raw.close()
        raise UsageError(f"{file} is a Parquet file", hint=HOW)
    data = gzip.GzipFile(fileobj=raw) if begins[:2] == b"\x1f\x8b" else raw
    return io.TextIOWrapper(data, encoding="utf-8-sig", newline="")  # type: ignore[arg-type]


def _books(folder: Folder, home: Path | str | None) -> Books:
    try:
        return Fleet(folder.name, home).books()
    except (SpotfleetError, OSError, sqlite3.Error) as error:
        return Books(folder.name, (), time.time(), missing=str(error))


def _ended(house: House, name: str) -> Folder | None:
    """The fleet of an earlier life, by the name that `cost --all` shows."""
    return next((folder for folder in house.old() if folder.name == name), None)


def _old(folder: Folder) -> Books:
    """Of a fleet whose name is used again."""
    try:
        return reports.ended_books(folder)
    except (SpotfleetError, OSError, sqlite3.Error) as error:
        return Books(folder.name, (), time.time(), missing=str(error))
