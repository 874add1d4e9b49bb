"""Values -> tables and lines. No input or output here, but for the width of the terminal."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterable, Sequence
from typing import Any

from spotfleet.api.preview import Change, UpPlan
from spotfleet.fleet.cost import CostReport
from spotfleet.fleet.cost_rows import csv_rows
from spotfleet.messages import FleetStatus, HostStatus, JobStatus
from spotfleet.model import HostState, JobState, Offer

SHOWN_OFFERS = 6


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> str:
    """Columns with two spaces between them; the last one is as long as it likes."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for line in lines:
        cells = [c.rjust(w) if h in right else c.ljust(w) for c, w, h in zip(line, widths, head, strict=True)]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def dollars(micros: int, digits: int = 4) -> str:
    return f"${micros / 1e6:,.{digits}f}"


def span(seconds: float) -> str:
    """45s, 12m03s, 3h07m, 2d04h"""
    s = int(seconds)
    for unit, size, below in (("d", 86400, "h"), ("h", 3600, "m"), ("m", 60, "s")):
        if s >= size:
            return f"{s // size}{unit}{s % size // {'h': 3600, 'm': 60, 's': 1}[below]:02d}{below}"
    return f"{s}s"


def up_plan(plan: UpPlan) -> str:
    nodes, was = plan.nodes, plan.was
    title = {
        Change.NEW: "to be made", Change.CONTINUE: "started before, to be continued", Change.SAME: "up already",
        Change.NODES: f"to be resized from {was.min}..{was.max}, target {was.target}" if was else "",
    }[plan.change]
    lines = [f"fleet {plan.fleet} on {plan.provider}: {title}; {nodes.min}..{nodes.max} hosts, target {nodes.target}"]
    if plan.kept:
        lines.append(f"changed for the next job: {', '.join(plan.kept)}")
    if plan.change is Change.SAME:
        return "\n".join(lines)
    if plan.change is not Change.NODES:  # then the dispatcher alone knows which hosts it has
        rows = [("dispatcher", *_launch(plan.dispatcher.offer), plan.dispatcher.why)] if plan.dispatcher else []
        rows += [("host", *_launch(launch.offer), launch.why) for launch in plan.workers]
        lines.append(table(["what", "type", "market", "zone", "slots", "$/h", "why"], rows, right=["slots", "$/h"]))
    if plan.offers:
        lines += ["", f"offers considered, cheapest first{_more(plan.offers)}:", offers(plan.offers[:SHOWN_OFFERS])]
    if plan.why:
        lines += ["", f"in the way: {plan.why}"]
    if plan.on_demand_micros_h:
        saved = 100 * (1 - plan.micros_h / plan.on_demand_micros_h)
        lines += ["", f"about {dollars(plan.micros_h)}/h in all, instead of {dollars(plan.on_demand_micros_h)}/h on "
                      f"demand ({saved:.0f} % less)"]
    if plan.change is not Change.NODES:
        lines += [ends(plan), *([plan.left_out] if plan.left_out else [])]
    return "\n".join(lines)


def ends(plan: UpPlan) -> str:
    """What ends the machines when nobody does."""
    orphans = (f"hosts end themselves {span(plan.orphan_after_s)} after they last heard of a dispatcher"
               if plan.orphan_after_s else "hosts never end themselves (orphan_after: 0)")
    return orphans + (f"; the fleet ends after {span(plan.max_lifetime_s)}" if plan.max_lifetime_s else "")


def offers(found: Sequence[Offer]) -> str:
    rows = [(o.pool, o.slots, o.accelerator or "-", dollars(o.price_micros_h), dollars(o.on_demand_micros_h))
            for o in found]
    return table(["pool", "slots", "accelerator", "$/h", "on demand"], rows, right=["slots", "$/h", "on demand"])


def _more(found: Sequence[Offer]) -> str:
    return f" ({SHOWN_OFFERS} of {len(found)})" if len(found) > SHOWN_OFFERS else ""


def _launch(offer: Offer) -> tuple[str, str, str, str, str]:
    return (offer.instance_type, offer.market.value, offer.zone, str(offer.slots), dollars(offer.price_micros_h))


def fleet_status(status: FleetStatus) -> str:
    lines = [f"fleet {status.fleet}: {status.state}{f', {status.why}' if status.why else ''}", _sizes(status)]
    if status.hosts:
        lines += ["", hosts(status.hosts)]
    if status.jobs:
        lines += ["", jobs(status.jobs)]
    return "\n".join(lines)


def _sizes(status: FleetStatus) -> str:
    nodes = f"{status.min}..{status.max} hosts, target {status.target}"
    if status.state == "down" and not status.hosts:
        return f"{nodes}; it lived {span(status.age_s)}"
    on_demand = status.on_demand_burn_micros_h
    saved = f" ({100 * (1 - status.burn_micros_h / on_demand):.0f} % less)" if on_demand else ""
    ends = f", max_lifetime ends it in {span(status.ends_in_s)}" if status.ends_in_s is not None else ""
    return (f"{nodes}; {span(status.age_s)} old{ends}; burn {dollars(status.burn_micros_h)}/h, on demand "
            f"{dollars(on_demand)}/h{saved}")


def fleets(found: Sequence[FleetStatus]) -> str:
    rows = [(f.fleet, f.state, f"{f.min}..{f.max}", sum(h.role == "worker" and h.state == "up" for h in f.hosts),
             len(f.jobs), f"{dollars(f.burn_micros_h)}", f.why) for f in found]
    return table(["fleet", "state", "nodes", "hosts up", "jobs", "$/h", "why"], rows, right=["hosts up", "jobs", "$/h"])


def hosts(found: Sequence[HostStatus]) -> str:
    rows = [(h.host, h.role, h.state, span(h.since_s), h.address or "-", h.slots, _place(h.pool),
             "-" if h.state == HostState.STOPPED.value else dollars(h.price_micros_h), ",".join(h.jobs) or "-",
             _host_why(h)) for h in found]
    return table(["host", "role", "state", "for", "address", "slots", "pool", "$/h", "jobs", "why"], rows,
                 right=["slots", "$/h", "for"])


def _place(pool: str) -> str:
    """Without the provider, which is the same for all hosts of a fleet."""
    return pool.partition("/")[2] or pool


def _host_why(host: HostStatus) -> str:
    notice = f"the cloud takes it in {host.seconds_left:.0f} s" if host.seconds_left is not None else ""
    return "; ".join(dict.fromkeys(t for t in (notice, host.why) if t))


def jobs(found: Sequence[JobStatus]) -> str:
    rows = [(j.job, j.name, j.state, _workers(j), j.generation, j.version,
             j.repeated, f"{j.step_s * 1e3:.1f} ms" if j.step_s else "-", span(j.age_s), j.why) for j in found]
    return table(["job", "name", "state", "workers", "generation", "steps", "repeated", "per step", "age", "why"], rows,
                 right=["generation", "steps", "repeated", "per step", "age"])


def _workers(job: JobStatus) -> str:
    """2 (1..3): how many train, and between how many may."""
    now = "-" if JobState(job.state).ended else str(job.world_size)
    return f"{now} ({job.min_workers}..{job.max_workers})"


def cost(report: CostReport) -> str:
    rows = [(line.host, line.role, line.pool, span(line.seconds), "taken" if line.taken else "",
             dollars(line.micros, 6), dollars(line.on_demand_micros, 6)) for line in report.lines]
    rows.append(("total", "", "", "", "", dollars(report.micros, 6), dollars(report.on_demand_micros, 6)))
    right = ["billed", "cost", "on demand"]
    lines = [table(["host", "role", "pool", "billed", "", "cost", "on demand"], rows, right), ""]
    lines.append(f"saved {report.savings_percent:.1f} % against on-demand machines of the same types and seconds")
    lines.append(f"of it: dispatcher {dollars(report.dispatcher_micros, 6)}, idle {dollars(report.idle_micros, 6)} "
                 f"(boots {dollars(report.boot_micros, 6)}), repeated steps {dollars(report.repeated_micros, 6)}, "
                 f"pauses {dollars(report.pause_micros, 6)}")
    if report.missing_before is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(report.missing_before))
        lines.append(f"a ledger was lost at {at} UTC: machines and jobs that had ended before may be missing here")
    if report.jobs:
        lines += ["", cost_jobs(report)]
    return "\n".join(lines)


def cost_jobs(report: CostReport) -> str:
    rows = [(j.job, j.name, dollars(j.micros, 6), dollars(j.on_demand_micros, 6), j.useful_steps, j.repeated_steps,
             _per_1000(j.micros_per_1000_steps)) for j in report.jobs]
    rows.append(("all", "with dispatcher and idle time", dollars(report.micros, 6),
                 dollars(report.on_demand_micros, 6), report.useful_steps, sum(j.repeated_steps for j in report.jobs),
                 _per_1000(report.micros_per_1000_steps)))
    right = ["cost", "on demand", "steps", "repeated", "per 1000 steps"]
    return table(["job", "name", "cost", "on demand", "steps", "repeated", "per 1000 steps"], rows, right)


def _per_1000(micros: int | None) -> str:
    return "-" if micros is None else dollars(micros, 6)


def cost_csv(report: CostReport) -> str:
    """The host lines, as CSV with a head."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(csv_rows(report))
    return out.getvalue()
