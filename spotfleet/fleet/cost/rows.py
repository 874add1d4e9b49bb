"""Cost reports as JSON values and as CSV rows, dollars as exact decimal strings. Pure: the CLI only prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from spotfleet.fleet.cost.boots import BootLine, boots_by_pool
from spotfleet.fleet.cost.compare import Difference, Reconciliation
from spotfleet.fleet.cost.groups import CostGroup, Costs, breakdown
from spotfleet.fleet.cost.meter import CostReport
from spotfleet.words import exact_dollars

CSV_HEADER = ("host", "role", "pool", "market", "started_at", "ended_at", "taken", "seconds", "micros",
              "on_demand_micros", "dollars", "on_demand_dollars", "kind", "quantity", "unit",
              "group")


def to_json(report: CostReport) -> dict[str, Any]:
    """Return the report; each `..._micros` figure appears as a whole number and as `..._dollars`, an exact string."""
    data = _with_dollars(asdict(report))
    data["savings_percent"] = None if report.unpriced else round(report.savings_percent, 2)
    data["lines"] = [_with_dollars(asdict(line)) for line in report.lines]
    data["jobs"] = [_with_dollars(asdict(job)) for job in report.jobs]
    data["trials"] = [_with_dollars(asdict(trial)) for trial in report.trials]
    data["extras"] = [_with_dollars(asdict(line)) for line in report.extras]
    data["breakdown"] = dict(breakdown(report).parts())
    data["boots"] = [_with_dollars(asdict(boot) | {"took_s": boot.took_s}) for boot in report.boots]
    data["boots_by_pool"] = _boots_json(report.boots)
    return data


def costs_json(costs: Costs) -> dict[str, Any]:
    """Return totals of one fleet or many, and the report of each."""
    totals = {"micros": costs.micros, "on_demand_micros": costs.on_demand_micros}
    return {**_with_dollars(totals), "since": costs.since, "until": costs.until,
            "savings_percent": None if costs.unpriced else round(costs.savings_percent, 2),
            "breakdown": dict(costs.breakdown.parts()), "boots_by_pool": _boots_json(costs.boots),
            "missing": list(costs.missing),
            "fleets": [{"fleet": f.fleet, "living": f.living, "missing": f.missing, "rated": f.rated,
                        "report": to_json(f.report)}
                       for f in costs.fleets]}


def reconciliation_json(found: Reconciliation) -> dict[str, Any]:
    """Return the comparison; each row has `difference_micros` (theirs less ours) and `percent` of ours."""
    def rows(of: Iterable[Difference]) -> list[dict[str, Any]]:
        return [_with_dollars({**asdict(d), "difference_micros": d.difference,
                               "percent": None if d.percent is None else round(d.percent, 2)}) for d in of]

    return _with_dollars({
        "since": found.since, "until": found.until, "micros": found.micros, "their_micros": found.their_micros,
        "later_micros": found.later_micros, "earlier_micros": found.earlier_micros, "rows": rows(found.rows),
        "unknown": rows(found.unknown), "missing": rows(found.missing), "left_out": dict(found.left_out),
        "incomplete": list(found.incomplete), "elsewhere": list(found.elsewhere)})


def _boots_json(boots: Iterable[BootLine]) -> list[dict[str, Any]]:
    return [_with_dollars(asdict(row)) for row in boots_by_pool(boots)]


def groups_json(groups: Iterable[CostGroup]) -> list[dict[str, Any]]:
    return [_with_dollars(asdict(group)) for group in groups]


def csv_rows(report: CostReport) -> list[tuple[str, ...]]:
    """Return the header, a row for each run of a host, then those of disks, addresses and traffic.

    For traffic, `host` is a job. There is no total, which would double the sum of a column.
    """
    rows = [CSV_HEADER]
    for line in report.lines:
        ended = "" if line.ended_at is None else f"{line.ended_at:.3f}"
        rows.append((line.host, line.role, line.pool, line.market, f"{line.started_at:.3f}", ended,
                     "yes" if line.taken else "no", str(line.seconds), str(line.micros), str(line.on_demand_micros),
                     exact_dollars(line.micros), exact_dollars(line.on_demand_micros), "machine", str(line.seconds),
                     "second", line.group))
    groups = {line.host: line.group for line in report.lines}
    for extra in report.extras:
        rows.append((extra.name, extra.role, extra.pool, "", "", "", "", "", str(extra.micros), str(extra.micros),
                     *(exact_dollars(extra.micros),) * 2, extra.kind, f"{extra.quantity:.6f}", extra.unit,
                     "" if extra.kind == "traffic" else groups.get(extra.name, "")))
    return rows


def group_rows(groups: Iterable[CostGroup]) -> list[tuple[str, ...]]:
    """Return a grouping as CSV, its header first, without a total. Uncounted values are empty."""
    return [("key", "micros", "on_demand_micros", "spot_micros", "seconds", "dollars", "on_demand_dollars", "detail"),
            *((g.key, str(g.micros), str(g.on_demand_micros), _count(g.spot_micros), _count(g.seconds),
               exact_dollars(g.micros), exact_dollars(g.on_demand_micros), g.detail) for g in groups)]


def _count(n: int | None) -> str:
    return "" if n is None else str(n)


def _with_dollars(data: dict[str, Any]) -> dict[str, Any]:
    texts = {key.replace("micros", "dollars"): None if value is None else exact_dollars(value)
             for key, value in data.items() if "micros" in key}
    return {**data, **texts}
