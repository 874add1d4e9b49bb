"""A cost report as JSON values and as CSV rows, dollars as exact decimal strings. Pure: the CLI only prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spotfleet.fleet.cost import CostReport

CSV_HEADER = ("host", "role", "pool", "market", "started_at", "ended_at", "taken", "seconds", "micros",
              "on_demand_micros", "dollars", "on_demand_dollars")


def dollars(micros: int) -> str:
    """Exactly `micros` millionths of a dollar: "0.000123", always six decimals."""
    sign, whole = ("-", -micros) if micros < 0 else ("", micros)
    return f"{sign}{whole // 1_000_000}.{whole % 1_000_000:06d}"


def to_json(report: CostReport) -> dict[str, Any]:
    """Every `..._micros` figure appears twice: as the whole number, and as `..._dollars`, an exact string."""
    data = _with_dollars(asdict(report))
    data["savings_percent"] = round(report.savings_percent, 2)
    data["lines"] = [_with_dollars(asdict(line)) for line in report.lines]
    data["jobs"] = [_with_dollars(asdict(job)) for job in report.jobs]
    return data


def csv_rows(report: CostReport) -> list[tuple[str, ...]]:
    """The header, and a row for each run of a host: no total, which would double the sum of a column."""
    rows = [CSV_HEADER]
    for line in report.lines:
        ended = "" if line.ended_at is None else f"{line.ended_at:.3f}"
        rows.append((line.host, line.role, line.pool, line.market, f"{line.started_at:.3f}", ended,
                     "yes" if line.taken else "no", str(line.seconds), str(line.micros), str(line.on_demand_micros),
                     dollars(line.micros), dollars(line.on_demand_micros)))
    return rows


def _with_dollars(data: dict[str, Any]) -> dict[str, Any]:
    texts = {key.replace("micros", "dollars"): None if value is None else dollars(value)
             for key, value in data.items() if "micros" in key}
    return {**data, **texts}
