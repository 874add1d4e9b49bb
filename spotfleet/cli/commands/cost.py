"""The command `cost`: cost of fleets as table, JSON, CSV or page, and comparison with the cloud's bill."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.api import costs as fleet_costs
from spotfleet.cli.commands import cost_table
from spotfleet.cli.console import print_message
from spotfleet.errors import UsageError
from spotfleet.fleet.cost import rows as cost_rows
from spotfleet.fleet.cost.groups import WAYS, FleetLedgers, costs, grouped
from spotfleet.fleet.cost.series import series
from spotfleet.report.cost import cost_page
from spotfleet.report.cost_view import interruptions, view
from spotfleet.words import harmless_lines


@dataclass(frozen=True)
class CostQuery:
    """Options of `cost` as typed."""

    fleets: tuple[str, ...] = ()
    everything: bool = False
    since: str = ""
    until: str = ""
    by: str = ""
    output: str = "table"
    file: str = ""
    reconcile: str = ""


def cost_of(fleets: Sequence[str], **options: Any) -> None:
    cost(CostQuery(tuple(fleets), **options))


def cost(query: CostQuery) -> None:
    if query.everything and query.fleets:
        raise UsageError("--all is every fleet: name none beside it", hint="spotfleet cost --all")
    if query.by and query.by not in WAYS:
        raise UsageError(f"--by: '{query.by}' is none", hint=f"use one of: {', '.join(WAYS)}")
    if query.reconcile:
        _reconcile(query)
        return
    since, until = window(query.since, query.until, time.time())
    found = _ledgers(query)
    for each in found:
        if each.missing:
            print_message(f"incomplete: {each.fleet}: {each.missing}")
    match query.output:
        case "json":
            _json(query, found, since, until)
        case "csv":
            grouping = _grouping(query, found)
            rows = cost_rows.group_rows(grouped(found, grouping, since, until)) if grouping else \
                cost_rows.csv_rows(found[0].report(since, until))
            _write(query, cost_table.csv_text(rows))
        case "html":
            _page(query, found, since, until)
        case _:
            _write(query, _text(query, found, since, until) + "\n")


def window(since: str, until: str, now: float) -> tuple[float | None, float | None]:
    """Convert --since and --until to Unix seconds. Raises UsageError for an empty time window."""
    first, last = (_instant(name, text, now) if text else None for name, text in (("--since", since),
                                                                                   ("--until", until)))
    if first is not None and first >= now:
        raise UsageError(f"--since {since}: that has not come yet",
                         hint="use 2026-11-22, 2026-11-22T14:30 (UTC), 36h, 7d")
    if first is not None and last is not None and first >= last:
        raise UsageError(f"--since {since} is not before --until {until}", hint="both are UTC; 7d is that long ago")
    return first, last


def _instant(option: str, text: str, now: float) -> float:
    try:
        return fleet_costs.instant(text, now)
    except UsageError as error:
        raise UsageError(f"{option}: {error}", hint=error.hint) from None


def _ledgers(query: CostQuery) -> list[FleetLedgers]:
    """Return the ledgers. For one fleet they must be complete; among many, `missing` names those that cannot be read.
    """
    if query.everything:
        return fleet_costs.costs()
    if len(query.fleets) > 1:
        return fleet_costs.costs(query.fleets)
    return [fleet_costs.whole(query.fleets[0] if query.fleets else "")]


def _grouping(query: CostQuery, found: Sequence[FleetLedgers]) -> str:
    """Return the grouping; "" is each run of one fleet's machines."""
    return query.by or ("" if len(found) == 1 and not query.everything else "fleet")


def _text(query: CostQuery, found: Sequence[FleetLedgers], since: float | None, until: float | None) -> str:
    if not found:
        return "no fleet has been here: nothing has been spent"
    grouping = _grouping(query, found)
    interrupted = [m.host for b in found for m in interruptions(series(b.events, b.now, since, until, points=2).marks)]
    if not grouping:
        return cost_table.report(found[0].report(since, until), interrupted, found[0].rated)
    groups = grouped(found, grouping, since, until)
    return cost_table.costs(costs(found, since, until), groups, grouping, len(interrupted))


def _json(query: CostQuery, found: Sequence[FleetLedgers], since: float | None, until: float | None) -> None:
    """Write JSON: for one fleet its report; for many the totals and each report. With --by also the rows, as `groups`.
    """
    one = len(found) == 1 and not query.everything
    data = cost_rows.to_json(found[0].report(since, until)) | {"rated": found[0].rated} if one else \
        cost_rows.costs_json(costs(found, since, until))
    if query.by:
        data["groups"] = cost_rows.groups_json(grouped(found, query.by, since, until))
    _write(query, json.dumps(data, indent=1) + "\n")


def _page(query: CostQuery, found: Sequence[FleetLedgers], since: float | None, until: float | None) -> None:
    """Write the HTML page; to a file if stdout is a terminal."""
    text = cost_page(view(found, time.time(), since, until))
    if not query.file and sys.stdout.isatty():
        query = CostQuery(file=f"{found[0].fleet if len(found) == 1 else 'fleets'}-cost.html")
        _write(query, text)
        print_message("note: it is in this directory; if that is a fleet's workdir, `spotfleet train` ships it too "
                      "(--output-file FILE writes it elsewhere)")
        return
    _write(query, text)


def _write(query: CostQuery, text: str) -> None:
    if not query.file:
        is_text = query.output in ("table", "csv") and sys.stdout.isatty()
        sys.stdout.write(harmless_lines(text) if is_text else text)
        return
    Path(query.file).write_text(text, encoding="utf-8")
    print_message(f"written: {query.file}")


def _reconcile(query: CostQuery) -> None:
    if query.output in ("csv", "html"):
        raise UsageError(f"--reconcile has no form {query.output}", hint="use -o table or -o json")
    if query.since or query.until or query.by:
        raise UsageError("--reconcile compares all that the file covers: leave --since, --until and --by out")
    names = () if query.everything else query.fleets
    found = fleet_costs.reconcile(Path(query.reconcile), names)
    if query.output == "json":
        _write(query, json.dumps(cost_rows.reconciliation_json(found), indent=1) + "\n")
        return
    _write(query, cost_table.reconciled(found) + "\n")
