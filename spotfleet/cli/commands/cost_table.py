"""Cost of fleets as text for a terminal and as CSV."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Iterable, Sequence

from spotfleet.cli.render import full, span, unpriced
from spotfleet.cli.tables import flow, table
from spotfleet.fleet.cost.boots import BootLine, boots_by_pool, median_s
from spotfleet.fleet.cost.compare import Difference, Reconciliation
from spotfleet.fleet.cost.groups import Breakdown, CostGroup, Costs, breakdown
from spotfleet.fleet.cost.meter import CostReport, HostLine
from spotfleet.model import Role
from spotfleet.words import counted, dollars

NAMES = {"useful": "training", "boot": "starting machines", "repeated": "repeated steps", "pause": "pauses",
         "unknown": "work of unknown kind", "disks": "disks", "addresses": "public addresses",
         "traffic": "traffic between zones (estimated)"}
SHOWN = 40  # differences of a reconciliation, trials of a job
UNRATED = "disks, public addresses and traffic{of} are not counted: their prices are not known"


def report(found: CostReport, interrupted: Sequence[str], rated: bool = True) -> str:
    """Format one fleet's report: each run of each machine, savings, breakdown, each job. `interrupted`: the host of
    each interruption."""
    rows = [(line.host, line.role, line.pool, span(line.seconds),
             "interrupted" if line.taken or line.host in interrupted else "", dollars(line.micros, 6),
             full(line.micros, line.on_demand_micros, 6)) for line in sorted(found.lines, key=_by_name)]
    rows += [(name, "", "", "", "", dollars(micros, 6), dollars(micros, 6)) for name, micros in (
        ("disks", found.disk_micros), ("addresses", found.address_micros), ("traffic", found.traffic_micros)) if micros]
    rows.append(("total", "", "", "", "", dollars(found.micros, 6), _on_demand(found)))
    lines = [table(["host", "role", "pool", "billed", "note", "cost", "on demand"], rows,
                   ["billed", "cost", "on demand"], drop=["role", "pool"], words="note"),
             "", *summary(found.micros, breakdown(found), _saved(found), len(interrupted), found.micros_per_1000_steps,
                          found.boots, uncounted=any(j.uncounted for j in found.jobs)),
             *_lost((found,)), *_reserved((found,)), *([UNRATED.format(of="")] if found.lines and not rated else [])]
    legend = "repeated: steps computed again after a loss; lost: the cost of these and of pauses"
    return flow("\n".join([*lines, "", jobs(found), legend, *trials(found)] if found.jobs else lines))


def _by_name(line: HostLine) -> tuple[bool, list[tuple[str, int]], float]:
    """Return a sort key: dispatchers first, then hosts by name, with host-2 before host-10."""
    parts = [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", line.host)]
    return line.role != Role.DISPATCHER.value, parts, line.started_at


def costs(found: Costs, groups: Sequence[CostGroup], by: str, times: int) -> str:
    """Format the cost of one fleet or many, grouped by host, pool, day, job or fleet."""
    detail = any(g.detail for g in groups)
    rows = [(g.key, *([g.detail] if detail else []), span(g.seconds) if g.seconds else "-", dollars(g.micros, 6),
             full(g.micros, g.on_demand_micros, 6)) for g in groups]
    sums = 0 if any(g.seconds is None for g in groups) else sum(g.seconds or 0 for g in groups)
    rows.append(("total", *([""] if detail else []), span(sums) if sums else "-", dollars(found.micros, 6),
                 _on_demand(found)))
    steps = sum(f.report.useful_steps for f in found.fleets)
    lines = [table([by, *(["what"] if detail else []), "machine time", "cost", "on demand"], rows,
                   ["machine time", "cost", "on demand"], drop=["what"]), "",
             *summary(found.micros, found.breakdown, _saved(found), times,
                      round(found.micros * 1000 / steps) if steps else None, found.boots,
                      uncounted=any(job.uncounted for f in found.fleets for job in f.report.jobs)),
             *_lost(f.report for f in found.fleets), *_reserved(f.report for f in found.fleets)]
    if unrated := found.unrated:
        lines.append(UNRATED.format(of="" if len(unrated) == len(found.fleets) else f" of {', '.join(unrated)}"))
    return flow("\n".join([*lines, *(f"incomplete: {line}" for line in found.missing)]))


def summary(micros: int, parts: Breakdown, saved: str, times: int, per_1000: int | None,
            boots: Sequence[BootLine], *, uncounted: bool = False) -> list[str]:
    """Format savings, breakdown, and the cost of boots and of interruptions. `uncounted`: nobody counts the steps of
    some jobs."""
    lines = [saved]
    if micros:
        rows = [(NAMES.get(name, name), dollars(part, 6), f"{100 * part / micros:.1f} %")
                for name, part in parts.parts() if part]
        lines += ["", table(["where the money went", "cost", "share"], rows, ["cost", "share"]), "",
                  *_boots(parts.boot, boots)]
    interruptions = counted(times, "interruption") if times else "no interruptions"
    without = ", without the jobs whose steps nobody counts" if uncounted and times else ""
    lines.append(f"{interruptions}; repeated steps and pauses cost {dollars(parts.repeated + parts.pause, 6)}{without}"
                 + (f"; {dollars(per_1000, 6)} per 1000 steps, all included" if per_1000 is not None else ""))
    return lines


def _boots(micros: int, boots: Sequence[BootLine]) -> list[str]:
    """Format the cost of boots; pool by pool where there are several."""
    if not boots:
        return []
    half = median_s(boots)
    took = f"; half of them took {span(half)} or less" if half is not None else ""
    lines = [f"{counted(len(boots), 'boot')} of hosts cost {dollars(micros, 6)} until their agents joined{took}"]
    pools = boots_by_pool(boots)
    if len(pools) > 1:
        rows = [(row.pool, row.boots, "-" if row.median_s is None else span(row.median_s), dollars(row.micros, 6))
                for row in pools]
        lines += ["", table(["boots in", "boots", "median", "cost"], rows, ["boots", "median", "cost"]), ""]
    return lines


def jobs(found: CostReport) -> str:
    rows = [(j.job, j.name, dollars(j.micros, 6), full(j.micros, j.on_demand_micros, 6),
             *(("-", "-", "-") if j.uncounted else
               (j.useful_steps, j.repeated_steps, dollars(j.repeated_micros + j.pause_micros, 6))),
             _per_1000(j.micros_per_1000_steps)) for j in found.jobs]
    rows.append(("all", "with dispatcher and idle time", dollars(found.micros, 6), _on_demand(found),
                 found.useful_steps, sum(j.repeated_steps for j in found.jobs),
                 dollars(found.repeated_micros + found.pause_micros, 6), _per_1000(found.micros_per_1000_steps)))
    right = ["cost", "on demand", "steps", "repeated", "lost", "per 1000 steps"]
    return table(["job", "name", *right], rows, right, drop=["name", "lost", "repeated", "on demand"])


def trials(found: CostReport) -> list[str]:
    """Format the trials of Ray Tune, the most expensive first, each job's with what none of its trials has used."""
    lines: list[str] = []
    for job in found.jobs:
        of = sorted((t for t in found.trials if t.job == job.job), key=lambda t: -t.micros)
        if job.no_trial_micros is None:
            continue
        rows = [(t.name or t.trial, f"{t.slot_s / 3600:.3f}", dollars(t.micros, 6)) for t in of[:SHOWN]]
        if len(of) > SHOWN:
            more = of[SHOWN:]
            rows.append((f"{len(more)} more (-o json has them all)", f"{sum(t.slot_s for t in more) / 3600:.3f}",
                         dollars(sum(t.micros for t in more), 6)))
        rows.append(("in no trial", "", dollars(job.no_trial_micros, 6)))
        rows.append((f"all of {job.job}", "", dollars(job.micros, 6)))
        lines += ["", table([f"trial in {job.job}", "slot-hours", "cost"], rows, ["slot-hours", "cost"])]
    return lines


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Format rows as CSV. The first row is the head; there is no total."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def reconciled(found: Reconciliation) -> str:
    """Format the comparison of our bill with the cloud's."""
    if found.since is None or found.until is None:
        return "the billing export has no line that bills usage: there is nothing to compare"
    lines = [f"the export covers {_when(found.since)} to {_when(found.until)} UTC", ""]
    for title, rows in (("billed by both", found.rows),
                        ("billed only by the cloud", found.unknown), ("only in our estimate", found.missing)):
        if rows:
            lines += [f"{title}:", _differences(rows), ""]
    lines.append(f"here {dollars(found.micros, 6)}, the cloud {dollars(found.their_micros, 6)}: a difference of "
                 f"{dollars(found.their_micros - found.micros, 6)}"
                 + (f" ({100 * (found.their_micros - found.micros) / found.micros:+.2f} %)" if found.micros else ""))
    lines += [f"not compared: {dollars(micros, 6)} reckoned here {when} what the export covers"
              for micros, when in ((found.earlier_micros, "before"), (found.later_micros, "after")) if micros]
    lines += [f"not compared: {dollars(micros, 6)} of {name}" for name, micros in found.left_out]
    lines += [f"not compared: {', '.join(found.elsewhere)}, not on {found.cloud}"] if found.elsewhere else []
    return flow("\n".join([*lines, *(f"incomplete: {line}" for line in found.incomplete)]))


def _differences(rows: Sequence[Difference]) -> str:
    shown = [(d.fleet, d.host or "-", d.kind, d.resource, dollars(d.micros, 6), dollars(d.their_micros, 6),
              dollars(d.difference, 6), "-" if d.percent is None else f"{d.percent:+.1f} %", d.note)
             for d in rows[:SHOWN]]
    right = ["here", "cloud", "difference", "percent"]
    text = table(["fleet", "host", "kind", "resource", *right, "note"], shown, right,
                 drop=["kind", "percent", "fleet"], words="note")
    return text + (f"\n... and {len(rows) - SHOWN} more; -o json has them all" if len(rows) > SHOWN else "")


def _saved(found: CostReport | Costs) -> str:
    if found.unpriced:
        return unpriced(found.unpriced)
    if not found.micros and not found.on_demand_micros:
        return "nothing was spent" + (" in this time" if (found.since, found.until) != (None, None) else "")
    return f"saved {found.savings_percent:.1f} % against on-demand machines of the same types and seconds"


def _on_demand(found: CostReport | Costs) -> str:
    return "unknown" if found.unpriced else dollars(found.on_demand_micros, 6)


def _lost(reports: Iterable[CostReport]) -> list[str]:
    return [f"records were lost at {_when(r.missing_before)} UTC: machines and jobs that had ended before may be "
            "missing here" for r in reports if r.missing_before is not None]


def _reserved(reports: Iterable[CostReport]) -> list[str]:
    pools = dict.fromkeys(line.pool for r in reports for line in r.lines if line.market == "reserved")
    return [f"reserved capacity costs whether it is used or not: what {', '.join(pools)} cost without these hosts, and "
            "what was paid in advance, is not counted"] if pools else []


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


def _per_1000(micros: int | None) -> str:
    return "-" if micros is None else dollars(micros, 6)
