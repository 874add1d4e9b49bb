"""Comparison of our bill with the cloud's: a billing export of AWS, line by line against the ledgers. Pure.

Two formats: the legacy Cost and Usage Report (`lineItem/ResourceId`, tags as columns `resourceTags/user:KEY`) and
CUR 2.0 of Data Exports (`line_item_resource_id`, tags as one JSON map in `resource_tags`). Machines are matched by
their id in the ledger; disks and addresses by the tags of their host, which an account must have activated as cost
allocation tags. Only the time that the export covers is compared. Sources: AWS Data Exports User Guide, "Line item
details", "Line item columns", "Resource tags columns".
"""

from __future__ import annotations

import calendar
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from spotfleet.errors import UsageError
from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.cost.meter import Meter

FLEET_TAG, HOST_TAG = "spotfleet", "spotfleet-host"
NEEDED = ("ResourceId", "UsageStartDate", "UsageType", "UnblendedCost")
USEFUL = ("UsageEndDate", "LineItemType", "CurrencyCode")
USAGE = ("", "Usage", "DiscountedUsage", "SavingsPlanCoveredUsage")  # other types are taxes, credits, fees
KINDS = (("machine", "BoxUsage|SpotUsage|HeavyUsage|DedicatedUsage"), ("disk", "EBS:Volume"),
         ("address", "PublicIPv4|ElasticIP"), ("traffic", "DataTransfer|-Bytes"))
HOUR_S = 3600.0
MOST_DIGITS = 15  # digits of dollars on one line, before the point
LAG = "exports lag behind by up to 24 hours"
HOW = ("in AWS: Billing and Cost Management, Data Exports, Create: CUR 2.0, with resource IDs, by the hour, as "
       f"text/csv; under Cost allocation tags activate {FLEET_TAG} and {HOST_TAG}")


@dataclass(frozen=True)
class Difference:
    """Costs of one resource in both bills, in the time that the export covers."""

    resource: str  # the cloud's ids; the host's name if there is none
    kind: str  # "machine", "disk", "address" or "traffic"
    fleet: str
    host: str
    micros: int  # ours
    their_micros: int
    note: str = ""

    @property
    def difference(self) -> int:
        """Micro-dollars of the cloud's bill minus ours."""
        return self.their_micros - self.micros

    @property
    def percent(self) -> float | None:
        """Difference in percent of our amount; None if that is 0."""
        return 100 * self.difference / self.micros if self.micros else None


@dataclass(frozen=True)
class Reconciliation:
    since: float | None  # start of the time that the export covers; None for an empty export
    until: float | None
    rows: tuple[Difference, ...] = ()  # in both bills, the largest difference first
    unknown: tuple[Difference, ...] = ()  # only in the cloud's bill, with our tag
    missing: tuple[Difference, ...] = ()  # only in our bill
    later_micros: int = 0  # in our bill, after the time that the export covers
    earlier_micros: int = 0  # in our bill, before that time
    left_out: tuple[tuple[str, int], ...] = ()  # taxes, credits, fees on our resources: (type, micro-dollars)
    incomplete: tuple[str, ...] = ()  # fleets whose ledgers could not be read
    elsewhere: tuple[str, ...] = ()  # fleets outside AWS, which are not compared

    @property
    def micros(self) -> int:
        return sum(d.micros for d in (*self.rows, *self.missing))

    @property
    def their_micros(self) -> int:
        return sum(d.their_micros for d in (*self.rows, *self.unknown))


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


class BilledByCloud:
    """Costs in an export for the hosts of these ledgers, and for other resources with our tag."""

    def __init__(self, ledgers: Sequence[FleetLedgers], header: Sequence[str], everything: bool) -> None:
        self._columns, self._everything = columns(header), everything
        self.meters = {b.fleet: Meter(b.events, b.now) for b in ledgers}
        self._hosts = {host: (fleet, host) for fleet, meter in self.meters.items() for host in meter.hosts}
        self._ids = {machine: (fleet, name) for fleet, meter in self.meters.items()
                     for name, host in meter.hosts.items() for machine in host.provider_ids}
        self._names = {m.created.fleet: fleet for fleet, m in self.meters.items() if m.created}
        self.since, self.until = math.inf, -math.inf
        self.found: dict[tuple[str, str, str], Decimal] = {}  # fleet, host, kind -> dollars
        self.resources: dict[tuple[str, str, str], dict[str, None]] = {}
        self.left_out: dict[str, Decimal] = {}

    def take(self, row: Mapping[str, str], number: int) -> None:
        """Add one line of the export, the `number`th. Raises UsageError if it cannot be understood."""
        at = self._columns.at
        kind = kind_of(row[at["UsageType"]] or "")
        what = row[at["LineItemType"]] or "" if "LineItemType" in at else ""
        if kind and what in USAGE:
            begun = _instant(row[at["UsageStartDate"]], number, at["UsageStartDate"])
            ended = _instant(row[at["UsageEndDate"]], number, at["UsageEndDate"]) if "UsageEndDate" in at else 0.0
            self.since = min(self.since, begun)
            self.until = max(self.until, ended or begun + HOUR_S)
        resource = (row[at["ResourceId"]] or "").rpartition("/")[2]
        tag = self._columns.tag(row, FLEET_TAG)
        known = self._ids.get(resource) or self._hosts.get(self._columns.tag(row, HOST_TAG))
        if known is None and (not tag or (not self._everything and tag not in self._names)):
            return
        currency = row[at["CurrencyCode"]] if "CurrencyCode" in at else "USD"
        if currency not in ("", "USD"):
            raise UsageError(f"line {number} of the billing export is in {currency}",
                             hint="the ledger is in US dollars: compare an export that is, too")
        dollars = _dollars(row[at["UnblendedCost"]], number, at["UnblendedCost"])
        if not kind or what not in USAGE:
            name = what if what not in USAGE else row[at["UsageType"]]
            self.left_out[name] = self.left_out.get(name, Decimal(0)) + dollars
            return
        fleet, host = known or (self._names.get(tag, tag), "")
        key = (fleet, host or resource, kind)
        self.found[key] = self.found.get(key, Decimal(0)) + dollars
        self.resources.setdefault(key, {})[resource] = None


def compare(ledgers: Sequence[FleetLedgers], header: Sequence[str], rows: Iterable[Mapping[str, str]],
            everything: bool = True, providers: Collection[str] | None = None) -> Reconciliation:
    """Compare the ledgers with `rows`, the export's lines after its header. Raises UsageError for any other file.

    Without `everything`, a resource with our tag that is no host of these ledgers counts only if the tag names one of
    their fleets. `providers`: those that send such exports; None: all.
    """
    billed = BilledByCloud(ledgers, header, everything)
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UsageError(f"line {number} of the billing export has not as many fields as its first line", hint=HOW)
        billed.take(row, number)
    if billed.since > billed.until:
        return Reconciliation(None, None, incomplete=_incomplete(ledgers))
    elsewhere = _elsewhere(billed, providers) if providers is not None else ()
    compared = {fleet: meter for fleet, meter in billed.meters.items() if fleet not in elsewhere}
    own = {key: micros for fleet, meter in compared.items()
            for key, micros in _own_bill(fleet, meter, billed.since, billed.until).items()}
    found = _with_traffic(billed)
    rows_, unknown, missing = [], [], []
    for key in dict.fromkeys((*found, *own)):
        fleet, host, kind = key
        ids = ", ".join(billed.resources.get(key, ())) or host
        known = host in billed.meters[fleet].hosts or kind == "traffic" if fleet in billed.meters else False
        line = Difference(ids, kind, fleet, host if known else "", own.get(key, 0),
                          _micros(found.get(key, Decimal(0))), _note(kind, key in found, known))
        if not known:
            unknown.append(line)
        elif key in found:
            rows_.append(line)
        elif line.micros:
            missing.append(line)
    meters = compared.values()
    return Reconciliation(
        billed.since, billed.until, tuple(sorted(rows_, key=lambda d: -abs(d.difference))),
        tuple(sorted(unknown, key=lambda d: -d.their_micros)), tuple(sorted(missing, key=lambda d: -d.micros)),
        sum(m.micros(billed.until) for m in meters), sum(m.micros(until=billed.since) for m in meters),
        tuple((name, _micros(dollars)) for name, dollars in sorted(billed.left_out.items())), _incomplete(ledgers),
        elsewhere)


def kind_of(usage_type: str) -> str:
    """Return "machine", "disk", "address", "traffic", or "" for a kind that no ledger counts, such as snapshots."""
    return next((kind for kind, words in KINDS if re.search(words, usage_type)), "")


def _own_bill(fleet: str, meter: Meter, since: float, until: float) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    lines = [(line.host, "machine", line.micros) for line in meter.lines(since, until)]
    lines += [("" if e.kind == "traffic" else e.name, e.kind, e.micros) for e in meter.extras(since, until)]
    for host, kind, micros in lines:
        found[fleet, host, kind] = found.get((fleet, host, kind), 0) + micros
    return found


def _with_traffic(billed: BilledByCloud) -> dict[tuple[str, str, str], Decimal]:
    """Return the cloud's bill with the traffic of a fleet's hosts as one item, because ours is known by jobs."""
    found: dict[tuple[str, str, str], Decimal] = {}
    for (fleet, host, kind), dollars in billed.found.items():
        key = (fleet, "", kind) if kind == "traffic" and fleet in billed.meters else (fleet, host, kind)
        found[key] = found.get(key, Decimal(0)) + dollars
        if key != (fleet, host, kind):
            billed.resources.setdefault(key, {"traffic": None})
    return found


def _note(kind: str, billed: bool, known: bool) -> str:
    if not known:
        return "has our tag, but is in no record here"
    if not billed:
        untagged = f"; or {FLEET_TAG} and {HOST_TAG} are no cost allocation tags" if kind in ("disk", "address") else ""
        return f"not in the export: perhaps not billed yet ({LAG}){untagged}"
    return "ours is an estimate, of the steps between zones alone" if kind == "traffic" else ""


def _incomplete(ledgers: Sequence[FleetLedgers]) -> tuple[str, ...]:
    return tuple(f"{b.fleet}: {b.missing}" for b in ledgers if b.missing)


def _elsewhere(billed: BilledByCloud, providers: Collection[str]) -> tuple[str, ...]:
    """Return the fleets that the export does not concern: of other providers, without any item in it."""
    fleets = {fleet for fleet, _, _ in billed.found}
    return tuple(fleet for fleet, meter in billed.meters.items()
                 if meter.created and meter.created.provider not in providers and fleet not in fleets)


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


def _micros(dollars: Decimal) -> int:
    """Convert to micro-dollars, rounded half up."""
    return math.floor(dollars * 1_000_000 + Decimal("0.5"))
