"""Table B5 of policy.py: the ledger's bill of hosts whose price moves, beside the integral of the prices.

It measures the bill's arithmetic: the ledger has each change at its instant. Delayed price news is not part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from statistics import fmean
from typing import Any

from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import Event, FleetCreated, HostListed, LaunchIntended, PriceChanged
from spotfleet.model import BillingRules, CloudState, Market, Nodes, Offer, Role, Run
from spotfleet.simulate.values.trace import Trace

Each = Callable[[Callable[..., Any], Sequence[tuple], str], list[Any]]
HOUR_S = 3600
WINDOWS_H = ((180 * 24, 720), (168, 168))  # minimum length of a log in hours -> length of its windows in hours


def window_h(trace: Trace) -> int:
    """Return the hours of a window for a log; 0 if the log is too short."""
    return next((hours for least, hours in WINDOWS_H if trace.length_s >= least * HOUR_S), 0)


def bill_cell(trace: Trace, hours: int) -> list[tuple[float, float, float]]:
    """Return for adjacent windows: errors in % of the bill and of a fixed launch price, and savings in %."""
    found, length = [], hours * HOUR_S
    for begin in range(0, int(trace.length_s) - length + 1, length):
        truth = integral(trace, begin, begin + length)
        if truth <= 0:
            continue
        bill = report(ledger(trace, begin, begin + length), float(begin + length))
        held = Fraction(trace.price_at(begin) * length, HOUR_S)
        savings = 100.0 * (1 - bill.micros / bill.on_demand_micros) if bill.on_demand_micros else 0.0
        found.append((float(abs(bill.micros - truth) / truth * 100), float(abs(held - truth) / truth * 100), savings))
    return found


def integral(trace: Trace, begin: int, end: int) -> Fraction:
    """Return micro-dollars of a host from `begin` to `end`: a second costs the price in force when it begins."""
    total = 0
    ends = [*(at for at, _ in trace.prices[1:]), trace.length_s]
    for (at, micros_h), until in zip(trace.prices, ends, strict=True):
        first, last = max(begin, -int(-at // 1)), min(end, -int(-until // 1))
        total += micros_h * max(0, last - first)
    return Fraction(total, HOUR_S)


def ledger(trace: Trace, begin: int, end: int) -> list[Event]:
    """Return the dispatcher's events: the offer at the launch, the host, each change of price at its instant."""
    full = trace.on_demand_micros_h
    offer = Offer("recorded", trace.region or "r", trace.zone or "z", trace.instance_type or "host", Market.SPOT, 1,
                  trace.price_at(begin), full)
    changes = [PriceChanged(float(at), offer.pool, micros_h, full) for at, micros_h in trace.prices if begin < at < end]
    return [FleetCreated(0.0, "f", "recorded", Nodes(), BillingRules(minimum_s=1)),
            LaunchIntended(float(begin), "f-0", Role.WORKER, offer, ""),
            HostListed(float(begin), "f-0", "i", CloudState.RUNNING, (Run(float(begin), float(end)),)), *changes]


def bills(traces: Sequence[Trace], every_s: float, each: Each) -> dict[str, Any]:
    used, skipped = [], {}
    for trace in traces:
        why = ("without prices" if not trace.prices else "with a single price" if len(trace.prices) < 2 else
               f"of prices for less than {WINDOWS_H[-1][0]} h" if not window_h(trace) else "")
        if why:
            skipped[trace.name] = why
        else:
            used.append(trace)
    tasks = [(trace, window_h(trace)) for trace in used]
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for (trace, hours), cell in zip(tasks, each(bill_cell, tasks, "B5"), strict=True):
        groups.setdefault(f"{trace.provider or 'unknown'}, {hours} h windows", []).extend(cell)
    rows = [["prices of", "windows", "bill: mean error %", "worst", "launch price held: mean error %", "worst",
             "savings %"]]
    for name, cell in sorted(groups.items()):
        ours, held, savings = zip(*cell, strict=True) if cell else ((0.0,), (0.0,), (0.0,))
        rows.append([name, str(len(cell)), f"{fmean(ours):.6f}", f"{max(ours):.6f}", f"{fmean(held):.2f}",
                     f"{max(held):.1f}", f"{fmean(savings):.1f}"])
    return {"title": "Cost accounting", "rows": rows, "used": [t.name for t in used], "skipped": skipped,
            "notes": ["One host for each window; the bill is that of fleet.cost over a ledger with the log's prices."]}
