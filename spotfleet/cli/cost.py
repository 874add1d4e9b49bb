"""`spotfleet cost`: what fleets have cost, in every form, and beside the cloud's own bill."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotfleet.api import costs as books
from spotfleet.cli import bill
from spotfleet.cli.talk import say
from spotfleet.errors import UsageError
from spotfleet.fleet import cost_rows
from spotfleet.fleet.cost_groups import WAYS, Books, costs, grouped
from spotfleet.fleet.cost_series import series
from spotfleet.report.cost import cost_page
from spotfleet.report.cost_view import interruptions, view


@dataclass(frozen=True)
class Ask:
    """What was asked for, as it was typed."""

    fleets: tuple[str, ...] = ()
    everything: bool = False
    since: str = ""
    until: str = ""
    by: str = ""
    output: str = "table"
    file: str = ""
    reconcile: str = ""


def cost_of(fleets: Sequence[str], **options: Any) -> None:
    cost(Ask(tuple(fleets), **options))


def cost(ask: Ask) -> None:
    if ask.everything and ask.fleets:
        raise UsageError("--all is every fleet: name none beside it", hint="spotfleet cost --all")
    if ask.by and ask.by not in WAYS:
        raise UsageError(f"--by: '{ask.by}' is none", hint=f"use one of: {', '.join(WAYS)}")
    if ask.reconcile:
        _reconcile(ask)
        return
    since, until = window(ask.since, ask.until, time.time())
    found = _books(ask)
    for each in found:
        if each.missing:
            say(f"incomplete: {each.fleet}: {each.missing}")
    match ask.output:
        case "json":
            _json(ask, found, since, until)
        case "csv":
            way = _way(ask, found)
            rows = cost_rows.group_rows(grouped(found, way, since, until)) if way else \
                cost_rows.csv_rows(found[0].report(since, until))
            _write(ask, bill.csv_text(rows))
        case "html":
            _page(ask, found, since, until)
        case _:
            _write(ask, _text(ask, found, since, until) + "\n")


def window(since: str, until: str, now: float) -> tuple[float | None, float | None]:
    """What --since and --until mean. Raises UsageError where that is no stretch of time."""
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
        return books.instant(text, now)
    except UsageError as error:
        raise UsageError(f"{option}: {error}", hint=error.hint) from None


def _books(ask: Ask) -> list[Books]:
    """One fleet's must be whole; of many, those that cannot be had are named."""
    if ask.everything:
        return books.costs()
    if len(ask.fleets) > 1:
        return books.costs(ask.fleets)
    return [books.whole(ask.fleets[0] if ask.fleets else "")]


def _way(ask: Ask, found: Sequence[Books]) -> str:
    """How it is cut; "" is each run of one fleet's machines."""
    return ask.by or ("" if len(found) == 1 and not ask.everything else "fleet")


def _text(ask: Ask, found: Sequence[Books], since: float | None, until: float | None) -> str:
    if not found:
        return "no fleet has been here: nothing has been spent"
    way = _way(ask, found)
    times = sum(len(interruptions(series(b.events, b.now, since, until, points=2).marks)) for b in found)
    if not way:
        return bill.report(found[0].report(since, until), times, found[0].rated)
    return bill.costs(costs(found, since, until), grouped(found, way, since, until), way, times)


def _json(ask: Ask, found: Sequence[Books], since: float | None, until: float | None) -> None:
    """Of one fleet its report; of many the totals and each report. With --by also the rows, as `groups`."""
    one = len(found) == 1 and not ask.everything
    data = cost_rows.to_json(found[0].report(since, until)) | {"rated": found[0].rated} if one else \
        cost_rows.costs_json(costs(found, since, until))
    if ask.by:
        data["groups"] = cost_rows.groups_json(grouped(found, ask.by, since, until))
    _write(ask, json.dumps(data, indent=1) + "\n")


def _page(ask: Ask, found: Sequence[Books], since: float | None, until: float | None) -> None:
    """To a file where nobody could read it."""
    text = cost_page(view(found, time.time(), since, until))
    if not ask.file and sys.stdout.isatty():
        ask = Ask(file=f"{found[0].fleet if len(found) == 1 else 'fleets'}-cost.html")
    _write(ask, text)


def _write(ask: Ask, text: str) -> None:
    if not ask.file:
        sys.stdout.write(text)
        return
    Path(ask.file).write_text(text, encoding="utf-8")
    say(f"written: {ask.file}")


def _reconcile(ask: Ask) -> None:
    if ask.output in ("csv", "html"):
        raise UsageError(f"--reconcile has no form {ask.output}", hint="use -o table or -o json")
    if ask.since or ask.until or ask.by:
        raise UsageError("--reconcile compares all that the file covers: leave --since, --until and --by out")
    names = () if ask.everything else ask.fleets
    found = books.reconcile(Path(ask.reconcile), names)
    if ask.output == "json":
        _write(ask, json.dumps(cost_rows.reconciliation_json(found), indent=1) + "\n")
        return
    _write(ask, bill.reconciled(found) + "\n")
