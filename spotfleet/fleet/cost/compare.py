"""Comparison of our bill with the cloud's: a billing export, line by line against the ledgers. Pure.

Machines are matched by their id in the ledger; disks and addresses by the tags of their host. Only the time that the
export covers is compared. The cloud's plugin reads the export (`CloudPlugin.cost_export`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from spotfleet.cost_export import BilledLine, CostExport
from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.cost.meter import Meter
from spotfleet.plugins import JOINED


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
    elsewhere: tuple[str, ...] = ()  # fleets on other clouds, which are not compared
    cloud: str = ""  # whose export it is

    @property
    def micros(self) -> int:
        return sum(d.micros for d in (*self.rows, *self.missing))

    @property
    def their_micros(self) -> int:
        return sum(d.their_micros for d in (*self.rows, *self.unknown))


class BilledByCloud:
    """Costs in an export for the hosts of these ledgers, and for other resources with our tag."""

    def __init__(self, ledgers: Sequence[FleetLedgers], everything: bool) -> None:
        self._everything = everything
        self.meters = {b.fleet: Meter(b.events, b.now) for b in ledgers}
        self._hosts = {host: (fleet, host) for fleet, meter in self.meters.items() for host in meter.hosts}
        self._ids = {machine: (fleet, name) for fleet, meter in self.meters.items()
                     for name, host in meter.hosts.items() for machine in host.provider_ids}
        self._names = {m.created.fleet: fleet for fleet, m in self.meters.items() if m.created}
        self.since, self.until = math.inf, -math.inf
        self.found: dict[tuple[str, str, str], Decimal] = {}  # fleet, host, kind -> dollars
        self.resources: dict[tuple[str, str, str], dict[str, None]] = {}
        self.left_out: dict[str, Decimal] = {}

    def take(self, line: BilledLine) -> None:
        """Add one line of the export. Raises UsageError if its amount cannot be understood."""
        if not line.left_out:
            self.since, self.until = min(self.since, line.since), max(self.until, line.until)
        known = self._ids.get(line.resource) or self._hosts.get(line.host)
        if known is None and (not line.fleet or (not self._everything and line.fleet not in self._names)):
            return
        dollars = line.dollars()
        if line.left_out:
            self.left_out[line.left_out] = self.left_out.get(line.left_out, Decimal(0)) + dollars
            return
        fleet, host = known or (self._names.get(line.fleet, line.fleet), "")
        key = (fleet, host or line.resource, line.kind)
        self.found[key] = self.found.get(key, Decimal(0)) + dollars
        self.resources.setdefault(key, {})[line.resource] = None


def compare(ledgers: Sequence[FleetLedgers], export: CostExport, lines: Iterable[BilledLine],
            everything: bool = True, provider: str = "") -> Reconciliation:
    """Compare the ledgers with an export's lines.

    Without `everything`, a resource with our tag that is no host of these ledgers counts only if the tag names one of
    their fleets. `provider`: the one that sends such exports; "": all hosts are compared.
    """
    billed = BilledByCloud(ledgers, everything)
    for line in lines:
        billed.take(line)
    if billed.since > billed.until:
        return Reconciliation(None, None, incomplete=_incomplete(ledgers))
    elsewhere = _elsewhere(billed, provider) if provider else ()
    compared = {fleet: meter for fleet, meter in billed.meters.items() if fleet not in elsewhere}
    own = {key: micros for fleet, meter in compared.items()
            for key, micros in _own_bill(fleet, meter, billed.since, billed.until, provider).items()}
    found = _with_traffic(billed)
    rows_, unknown, missing = [], [], []
    for key in dict.fromkeys((*found, *own)):
        fleet, host, kind = key
        ids = ", ".join(billed.resources.get(key, ())) or host
        known = host in billed.meters[fleet].hosts or kind == "traffic" if fleet in billed.meters else False
        difference = Difference(ids, kind, fleet, host if known else "", own.get(key, 0),
                                _micros(found.get(key, Decimal(0))), _note(export, kind, key in found, known))
        if not known:
            unknown.append(difference)
        elif key in found:
            rows_.append(difference)
        elif difference.micros:
            missing.append(difference)
    meters = compared.values()
    return Reconciliation(
        billed.since, billed.until, tuple(sorted(rows_, key=lambda d: -abs(d.difference))),
        tuple(sorted(unknown, key=lambda d: -d.their_micros)), tuple(sorted(missing, key=lambda d: -d.micros)),
        sum(m.micros(billed.until) for m in meters), sum(m.micros(until=billed.since) for m in meters),
        tuple((name, _micros(dollars)) for name, dollars in sorted(billed.left_out.items())), _incomplete(ledgers),
        elsewhere, export.name)


def _own_bill(fleet: str, meter: Meter, since: float, until: float, provider: str) -> dict[tuple[str, str, str], int]:
    """Return our bill by host and kind; of a fleet on several clouds, that of hosts on `provider`."""
    found: dict[tuple[str, str, str], int] = {}
    several = provider and meter.created is not None and JOINED in meter.created.provider
    lines = [(line.host, "machine", line.micros) for line in meter.lines(since, until)]
    lines += [("" if e.kind == "traffic" else e.name, e.kind, e.micros) for e in meter.extras(since, until)]
    for host, kind, micros in lines:
        there = meter.hosts.get(host) if several else None
        if there is None or there.offer.provider == provider:
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


def _note(export: CostExport, kind: str, billed: bool, known: bool) -> str:
    if not known:
        return "has our tag, but is in no record here"
    if not billed:
        untagged = f"; or {export.untagged}" if kind in ("disk", "address") else ""
        return f"not in the export: perhaps not billed yet ({export.lag}){untagged}"
    return "ours is an estimate, of the steps between zones alone" if kind == "traffic" else ""


def _incomplete(ledgers: Sequence[FleetLedgers]) -> tuple[str, ...]:
    return tuple(f"{b.fleet}: {b.missing}" for b in ledgers if b.missing)


def _elsewhere(billed: BilledByCloud, provider: str) -> tuple[str, ...]:
    """Return the fleets that the export does not concern: on other clouds alone, without any item in it."""
    fleets = {fleet for fleet, _, _ in billed.found}
    return tuple(fleet for fleet, meter in billed.meters.items()
                 if meter.created and provider not in meter.created.provider.split(JOINED) and fleet not in fleets)


def _micros(dollars: Decimal) -> int:
    """Convert to micro-dollars, rounded half up."""
    return math.floor(dollars * 1_000_000 + Decimal("0.5"))
