"""Ledgers of one fleet or of all fleets of this home, running or down, and their comparison with the cloud's bill."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from spotfleet.api import reports
from spotfleet.api.fleet import Fleet
from spotfleet.api.home import FleetDir, Home
from spotfleet.cost_export import CostExport
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.fleet.cost import compare
from spotfleet.fleet.cost.compare import Reconciliation
from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.providers.plugin import usable

UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
PARQUET = b"PAR1"


def costs(names: Sequence[str] = (), home: Path | str | None = None) -> list[FleetLedgers]:
    """Return the ledgers of the fleets of these names, or of all in this home; [] when there is none.

    All includes fleets that are down and those whose name is used again, under their names here. `missing` explains
    which ledgers of a fleet could not be read, wholly or in part. `fleet.cost.groups` groups them. Raises NoSuchFleet
    for an unknown name.
    """
    folders = Home(home)
    if names:
        return [_ended_ledgers(ended) if (ended := _find_ended(folders, name)) else
                Fleet(folders.find(name).name, home).books() for name in dict.fromkeys(names)]
    folders.sweep()
    return [*(_ledgers(folder, home) for folder in folders.fleets()),
            *(_ended_ledgers(folder) for folder in folders.old_fleets())]


def whole(name: str = "", home: Path | str | None = None) -> FleetLedgers:
    """Return the complete ledgers of one fleet, or of the only one there is. Raises SpotfleetError if one cannot be
    read."""
    ended = _find_ended(Home(home), name)
    return reports.ended_ledgers(ended) if ended else Fleet(name, home).books(whole=True)


def reconcile(file: Path, names: Sequence[str] = (), home: Path | str | None = None) -> Reconciliation:
    """Compare the ledgers of the fleets of these names, or of all, with a cloud's billing export: CSV or lines of JSON,
    plain or in gzip.

    Raises UsageError for a file that is no such export.
    """
    ledgers = costs(names, home)
    how = how_to_export()
    try:
        with _opened(file) as text:
            header, lines = _table(text)
            if not header:
                raise UsageError(f"{file} is empty", hint=how)
            provider, export = _export_of(header)
            return compare.compare(ledgers, export, export.lines(header, lines), not names, provider)
    except (OSError, EOFError) as error:
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{file} cannot be read: {message}", hint=how) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no CSV file: {error}", hint=how) from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{file} has a line that is no JSON object: {error}", hint=how) from None


def _table(text: IO[str]) -> tuple[list[str], Iterable[Mapping[str, str]]]:
    """Return the names of columns, and the rows. A file that begins with "{" has an object in each line."""
    first = text.readline()
    lines = itertools.chain([first], text)
    if not first.startswith("{"):
        rows = csv.DictReader(lines, strict=True)
        return list(rows.fieldnames or []), rows
    objects = (_row(line) for line in lines if line.strip())
    begin = next(objects)
    return list(begin), itertools.chain([begin], objects)


def _row(line: str) -> dict[str, str]:
    """Return a JSON object with its values as texts; those that are no texts stay JSON."""
    found = json.loads(line)
    if not isinstance(found, dict):
        raise json.JSONDecodeError("expected an object", line[:80], 0)
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in found.items()}


def how_to_export() -> str:
    """Explain how to make a billing export, for each cloud that has one."""
    return "; ".join(export.how for _, export in _exports())


def _exports() -> list[tuple[str, CostExport]]:
    return [(plugin.name, plugin.cost_export) for plugin in usable() if plugin.cost_export is not None]


def _export_of(header: Sequence[str]) -> tuple[str, CostExport]:
    """Return the provider whose export has this first line, and its reader. The only reader explains what is missing.
    """
    exports = _exports()
    found = [one for one in exports if one[1].reads(header)] or exports
    if len(found) != 1:
        raise UsageError(f"the file is no billing export of {' or '.join(export.name for _, export in exports)}",
                         hint=how_to_export())
    return found[0]


def instant(text: str, now: float | None = None) -> float:
    """Return Unix seconds for "2026-11-22", "2026-11-22T14:30" (UTC unless it has a zone) or "36h", "7d" before `now`.
    """
    now = time.time() if now is None else now
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw])", text.strip()):
        return now - float(found[1]) * UNITS_S[found[2]]
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(f"'{text}' is no time", hint="use 2026-11-22, 2026-11-22T14:30 (UTC), 36h, 7d") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _opened(file: Path) -> IO[str]:
    """Open the text of a plain or a gzip file; its first bytes decide."""
    raw = file.open("rb")
    begins = raw.read(4)
    raw.seek(0)
    if begins == PARQUET:
        raw.close()
        raise UsageError(f"{file} is a Parquet file", hint=how_to_export())
    data = gzip.GzipFile(fileobj=raw) if begins[:2] == b"\x1f\x8b" else raw
    return io.TextIOWrapper(data, encoding="utf-8-sig", newline="")  # type: ignore[arg-type]


def _ledgers(folder: FleetDir, home: Path | str | None) -> FleetLedgers:
    try:
        return Fleet(folder.name, home).books()
    except (SpotfleetError, OSError, sqlite3.Error) as error:
        return FleetLedgers(folder.name, (), time.time(), missing=str(error))


def _find_ended(folders: Home, name: str) -> FleetDir | None:
    """Find an ended fleet whose name is used again, by the name that `cost --all` shows."""
    return next((folder for folder in folders.old_fleets() if folder.name == name), None)


def _ended_ledgers(folder: FleetDir) -> FleetLedgers:
    """Return the ledgers of a fleet whose name is used again."""
    try:
        return reports.ended_ledgers(folder)
    except (SpotfleetError, OSError, sqlite3.Error) as error:
        return FleetLedgers(folder.name, (), time.time(), missing=str(error))
