"""AWS's billing exports as lines of any cloud's. Pure.

Two formats: the legacy Cost and Usage Report (`lineItem/ResourceId`, tags as columns `resourceTags/user:KEY`) and
CUR 2.0 of Data Exports (`line_item_resource_id`, tags as one JSON map in `resource_tags`). Disks and addresses are
matched by the tags of their host, which an account must have activated as cost allocation tags. Sources: AWS Data
Exports User Guide, "Line item details", "Line item columns", "Resource tags columns".
"""

from __future__ import annotations

import calendar
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from spotfleet.cost_export import BilledLine
from spotfleet.errors import UsageError
from spotfleet.providers.aws.mapping import names

FLEET_TAG, HOST_TAG = names.FLEET, names.HOST
NEEDED = ("ResourceId", "UsageStartDate", "UsageType", "UnblendedCost")
USEFUL = ("UsageEndDate", "LineItemType", "CurrencyCode")
USAGE = ("", "Usage", "DiscountedUsage", "SavingsPlanCoveredUsage")  # other types are taxes, credits, fees
KINDS = (("machine", "BoxUsage|SpotUsage|HeavyUsage|DedicatedUsage"), ("disk", "EBS:Volume"),
         ("address", "PublicIPv4|ElasticIP"), ("traffic", "DataTransfer|-Bytes"))
HOUR_S = 3600.0
MOST_DIGITS = 15  # digits of dollars on one line, before the point
HOW = ("in AWS: Billing and Cost Management, Data Exports, Create: CUR 2.0, with resource IDs, by the hour, as "
       f"text/csv; under Cost allocation tags activate {FLEET_TAG} and {HOST_TAG}")


@dataclass(frozen=True)
class Columns:
    """Column names of an export."""

    at: Mapping[str, str]  # our name -> its column
    tags: Mapping[str, str] = field(default_factory=dict)  # tag -> its column
    tag_map: str = ""  # the column that has all tags

    def tag(self, row: Mapping[str, str], key: str) -> str:
        if self.tag_map:
            return _tags(row.get(self.tag_map) or "").get(_plain(key), "")
        return row.get(self.tags.get(key, ""), "") or ""


def columns(header: Sequence[str]) -> Columns:
    """Return the columns of an export with this first line. Raises UsageError, naming the missing column."""
    plain = {_plain(name): name for name in header}
    found = {word: plain[key] for word in (*NEEDED, *USEFUL) if (key := "lineitem" + _plain(word)) in plain}
    missing_columns = [word for word in NEEDED if word not in found]
    if missing_columns:
        first = missing_columns[0]
        legacy = any("/" in name for name in header)
        name = f"lineItem/{first}" if legacy else f"line_item_{_snake(first)}"
        known = "; it has no column of a Cost and Usage Report" if not found else ""
        raise UsageError(f"the billing export lacks the column {name}{known}", hint=HOW)
    tags = {key: plain[p] for key in (FLEET_TAG, HOST_TAG) if (p := "resourcetagsuser" + _plain(key)) in plain}
    return Columns(found, tags, plain.get("resourcetags", ""))


class AwsCostExport:
    """Reader of both formats (`CostExport`)."""

    name = "AWS"
    how = HOW
    lag = "exports lag behind by up to 24 hours"
    untagged = f"{FLEET_TAG} and {HOST_TAG} are no cost allocation tags"

    def reads(self, header: Sequence[str]) -> bool:
        return any(_plain(name).startswith("lineitem") for name in header)

    def lines(self, header: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Iterator[BilledLine]:
        found = columns(header)
        for number, row in enumerate(rows, 2):
            if None in row or None in row.values():
                raise UsageError(f"line {number} of the billing export has not as many fields as its first line",
                                 hint=HOW)
            yield _line(found, row, number)


def _line(found: Columns, row: Mapping[str, str], number: int) -> BilledLine:
    at = found.at
    usage_type = row[at["UsageType"]] or ""
    kind = kind_of(usage_type)
    what = row[at["LineItemType"]] or "" if "LineItemType" in at else ""
    begun = ended = 0.0
    if kind and what in USAGE:
        begun = _instant(row[at["UsageStartDate"]], number, at["UsageStartDate"])
        ended = _instant(row[at["UsageEndDate"]], number, at["UsageEndDate"]) if "UsageEndDate" in at else 0.0
    left_out = what if what not in USAGE else "" if kind else usage_type or "other usage"

    def dollars() -> Decimal:
        currency = row[at["CurrencyCode"]] if "CurrencyCode" in at else "USD"
        if currency not in ("", "USD"):
            raise UsageError(f"line {number} of the billing export is in {currency}",
                             hint="the ledger is in US dollars: compare an export that is, too")
        return _dollars(row[at["UnblendedCost"]], number, at["UnblendedCost"])

    return BilledLine((row[at["ResourceId"]] or "").rpartition("/")[2], kind, left_out, begun, ended or begun + HOUR_S,
                      found.tag(row, FLEET_TAG), found.tag(row, HOST_TAG), dollars)


def kind_of(usage_type: str) -> str:
    """Return "machine", "disk", "address", "traffic", or "" for a kind that no ledger counts, such as snapshots."""
    return next((kind for kind, words in KINDS if re.search(words, usage_type)), "")


def _tags(text: str) -> dict[str, str]:
    """Parse a map column: JSON, its keys with or without the prefix "user:"."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}
    if not isinstance(data, dict):
        return {}
    return {_plain(str(k)).removeprefix("user"): str(v) for k, v in data.items()}


def _plain(name: str) -> str:
    """Return a column's name as it is in both formats: letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _dollars(text: str, number: int, column: str) -> Decimal:
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
