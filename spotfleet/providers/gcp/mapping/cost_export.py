"""Google Cloud's billing export to BigQuery as lines of any cloud's. Pure.

Two tables: the standard usage cost export, and the detailed one, which also names each resource. Columns may be those
of a query (`sku_description`), dotted, or nested JSON. A machine is several lines: its vCPUs, its memory, its GPUs.
They are matched by label, or in the detailed export by the name of the machine. Machines of a gang share their labels,
so that only the detailed export tells them apart.
Source: Cloud Billing, "Structure of Standard data export", "Structure of Detailed data export".
"""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from spotfleet.cost_export import BilledLine
from spotfleet.errors import UsageError
from spotfleet.providers.gcp.mapping import names

NEEDED = ("usage_start_time", "usage_end_time", "cost", "labels")
COMPUTE = "Compute Engine"
KINDS = (("disk", r"PD Capacity|Hyperdisk|Local Storage|Snapshot"), ("address", r"External IP|Static Ip"),
         ("traffic", r"Data Transfer|Egress|Ingress"), ("machine", r"Instance (Core|Ram)|Core running|Ram running|GPU"))
UNCOUNTED = r"Snapshot|Ingress"
MOST_DIGITS = 15  # digits of dollars on one line, before the point
HOW = ("in Google Cloud: Billing, Billing export, BigQuery export, Detailed usage cost; then the query of "
       "docs/clouds/gcp.md, which writes CSV")


class GcpCostExport:
    """Reader of both tables (`CostExport`)."""

    name = "Google Cloud"
    how = HOW
    lag = "exports lag behind by up to a day"
    untagged = f"its label {names.FLEET} is missing"

    def reads(self, header: Sequence[str]) -> bool:
        return "usage_start_time" in header and any(name.startswith(("sku", "service")) for name in header)

    def lines(self, header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[BilledLine]:
        for column in NEEDED:
            if column not in header:
                raise UsageError(f"the billing export lacks the column {column}", hint=HOW)
        for number, row in enumerate(rows, 2):
            if None in row or None in row.values():
                raise UsageError(f"line {number} of the billing export has not as many fields as its first line",
                                 hint=HOW)
            yield from _lines(row, number)


def _lines(row: Mapping[str, str], number: int) -> Iterator[BilledLine]:
    labels = {str(e.get("key")): str(e.get("value")) for e in _list(row.get("labels")) if isinstance(e, dict)}
    global_name = _field(row, "resource", "global_name")
    machine = _field(row, "resource", "name") or global_name
    host = labels.get(names.HOST) or (names.host_of(names.last(machine)) if "/instances/" in machine else "")
    sku, kind = _field(row, "sku", "description"), ""
    if _field(row, "service", "description") in ("", COMPUTE):
        kind = kind_of(sku)
    regular = _field(row, "cost_type") in ("", "regular")
    left_out = "" if regular and kind else _field(row, "cost_type") if not regular else sku or "other usage"
    begun = _instant(row["usage_start_time"], number, "usage_start_time")
    ended = _instant(row["usage_end_time"], number, "usage_end_time")
    resource = names.last(global_name) if kind == "machine" else ""

    def line(out: str, text: str, column: str) -> BilledLine:
        return BilledLine(resource, kind, out, begun, max(ended, begun), labels.get(names.FLEET, ""), host,
                          lambda: _dollars(row, text, number, column))

    yield line(left_out, row["cost"], "cost")
    for credit in _list(row.get("credits")):
        if isinstance(credit, dict):
            yield line(f"credit: {credit.get('name') or credit.get('type') or 'of no name'}",
                       str(credit.get("amount", "0")), "credits")


def kind_of(sku: str) -> str:
    """Return "machine", "disk", "address", "traffic", or "" for a kind that no ledger counts, such as snapshots."""
    if re.search(UNCOUNTED, sku):
        return ""
    return next((kind for kind, words in KINDS if re.search(words, sku)), "")


def _field(row: Mapping[str, str], first: str, second: str = "") -> str:
    """Return a column by any of its names, or a field of a nested one."""
    if not second:
        return row.get(first) or ""
    for name in (f"{first}.{second}", f"{first}_{second}"):
        if row.get(name):
            return row[name]
    found = _json(row.get(first))
    return str(found.get(second) or "") if isinstance(found, dict) else ""


def _list(text: str | None) -> list[Any]:
    found = _json(text)
    return found if isinstance(found, list) else []


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None


def _dollars(row: Mapping[str, str], text: str, number: int, column: str) -> Decimal:
    currency = _field(row, "currency")
    if currency not in ("", "USD"):
        raise UsageError(f"line {number} of the billing export is in {currency}",
                         hint="the ledger is in US dollars: divide by currency_conversion_rate in the query")
    with suppress(InvalidOperation):
        found = Decimal(text or "0")
        if found.is_finite() and (not found or found.adjusted() < MOST_DIGITS):
            return found
    raise UsageError(f"line {number} of the billing export: {column} is {text!r}, no number of dollars", hint=HOW)


def _instant(text: str, number: int, column: str) -> float:
    found = re.match(r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d))?)?", text or "")
    year, month, day, hour, minute, second = (int(part or 0) for part in found.groups()) if found else [0] * 6
    if year and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1] and (
            hour < 24 and minute < 60 and second < 60):
        return float(calendar.timegm((year, month, day, hour, minute, second)))
    raise UsageError(f"line {number} of the billing export: {column} is {text!r}, no time", hint=HOW)
