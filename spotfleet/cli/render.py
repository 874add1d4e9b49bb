"""Values -> tables and lines. No input or output here, but for the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from spotfleet.api.cloud import RegionRow
from spotfleet.api.preview import Change, Estimate, UpPlan
from spotfleet.messages import FleetStatus, HostStatus, JobStatus
from spotfleet.model import HostState, JobState, Market, Offer

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
    return f"{'-' if micros < 0 else ''}${abs(micros) / 1e6:,.{digits}f}"


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
        Change.POLICY: "up already, its policy is to change",
    }[plan.change]
    where = f"{plan.provider}{f' in {plan.region}' if plan.region else ''}"
    lines = [f"fleet {plan.fleet} on {where}: {title}; {nodes.min}..{nodes.max} hosts, target {nodes.target}"]
    if plan.kept:
        lines.append(f"changed for the next job: {', '.join(plan.kept)}")
    if plan.change in (Change.SAME, Change.POLICY):
        return "\n".join([*lines, *limits(plan)])
    if plan.change is not Change.NODES:  # then the dispatcher alone knows which hosts it has
        rows = [("dispatcher", *_launch(plan.dispatcher.offer), plan.dispatcher.why)] if plan.dispatcher else []
        rows += [("host", *_launch(launch.offer), launch.why) for launch in plan.workers]
        lines.append(table(["what", "type", "market", "zone", "slots", "$/h", "why"], rows, right=["slots", "$/h"]))
    if plan.regions[1:]:
        lines += ["", "regions considered, for all machines at target:", regions(plan.regions)]
    if plan.offers:
        lines += ["", f"offers considered, cheapest first{_more(plan.offers)}:", offers(plan.offers[:SHOWN_OFFERS])]
    if plan.why:
        lines += ["", f"in the way: {plan.why}"]
    if plan.unpriced:
        lines += ["", f"about {dollars(plan.micros_h)}/h in all; {unpriced(plan.unpriced)}"]
    elif plan.on_demand_micros_h:
        saved = 100 * (1 - plan.micros_h / plan.on_demand_micros_h)
        lines += ["", f"about {dollars(plan.micros_h)}/h in all, instead of {dollars(plan.on_demand_micros_h)}/h on "
                      f"demand ({saved:.0f} % less)"]
    lines += limits(plan)
    if plan.change is not Change.NODES:
        lines += [*([plan.beside] if plan.beside else []), ends(plan), *([plan.left_out] if plan.left_out else [])]
    return "\n".join(lines)


def unpriced(pools: Sequence[str]) -> str:
    return f"what that saves is not known, for want of the on-demand price of {', '.join(pools)}"


def full(micros: int, on_demand: int, digits: int = 4) -> str:
    """A price on demand, beside the one that is paid; nobody knows it where it is 0 and the other is not."""
    return "unknown" if micros and not on_demand else dollars(on_demand, digits)


def limits(plan: UpPlan) -> list[str]:
    """What the policy does, what the work will cost, and what it may cost."""
    spot, full = plan.micros_h_of(Market.SPOT), plan.micros_h_of(Market.ON_DEMAND)
    lines = [f"of it spot {dollars(spot)}/h, on demand {dollars(full)}/h"] if plan.policy_why and spot + full else []
    lines += [f"policy: {plan.policy_why}"] if plan.policy_why else []
    if plan.estimate:
        lines += _estimate(plan.estimate, plan.policy.max_micros)
    if plan.policy.max_micros:
        digits = 4 if plan.policy.max_micros % 10_000 else 2  # never more than what the file says
        lines.append(f"it ends in good order before {dollars(plan.policy.max_micros, digits)} are spent (max_cost)")
    if plan.policy.max_micros_h:
        lines.append(f"never more hosts than fit in {dollars(plan.policy.max_micros_h)}/h (max_hourly_cost)")
    if plan.sure_micros_h:
        lines.append("the deadline is sure only while spot hosts are to be had: "
                     f"{plan.nodes.target} hosts on demand and the dispatcher cost {dollars(plan.sure_micros_h)}/h, "
                     "more than max_hourly_cost")
    return lines


def _estimate(e: Estimate, max_micros: int) -> list[str]:
    """What the work will cost, and that a limit ends the fleet before it is done."""
    between = ", or between the two as the policy takes on-demand hosts where it must" if e.mixed else ""
    spot = "spot hosts" if not e.base else f"spot hosts beside {e.base} on demand"
    costs = f"{dollars(e.spot_micros, 2)} on {spot}, " if e.base < e.hosts else ""
    lines = [f"{span(e.work_s)} of work will cost about {costs}{dollars(e.on_demand_micros, 2)} on demand{between}"]
    if max_micros and (least := min(e.spot_micros, e.on_demand_micros)) > max_micros:
        lines.append(f"max_cost is too little for it: about {100 * max_micros / least:.0f} % of the work is done by "
                     "then")
    return lines


def ends(plan: UpPlan) -> str:
    """What ends the machines when nobody does."""
    orphans = (f"hosts end themselves {span(plan.orphan_after_s)} after they last heard of a dispatcher"
               if plan.orphan_after_s else "hosts never end themselves (orphan_after: 0)")
    ended = f"; the fleet ends after {span(plan.max_lifetime_s)}" if plan.max_lifetime_s else ""
    kept = (f"\nif it ends by itself, its dispatcher keeps the results for {plan.keep_s / 3600:g} h: `spotfleet down` "
            "brings them home") if plan.keep_s else ""
    return orphans + ended + kept


def regions(found: Sequence[RegionRow]) -> str:
    rows = [(r.region, *(dollars(p) if p else "-" for p in (r.host_micros_h, r.dispatcher_micros_h, r.total_micros_h)),
             r.why) for r in found]
    return table(["region", "host $/h", "dispatcher $/h", "all $/h", "why"], rows,
                 right=["host $/h", "dispatcher $/h", "all $/h"])


def offers(found: Sequence[Offer]) -> str:
    rows = [(o.pool, o.slots, o.accelerator or "-", dollars(o.price_micros_h),
             full(o.price_micros_h, o.on_demand_micros_h)) for o in found]
    return table(["pool", "slots", "accelerator", "$/h", "on demand"], rows, right=["slots", "$/h", "on demand"])


def _more(found: Sequence[Offer]) -> str:
    return f" ({SHOWN_OFFERS} of {len(found)})" if len(found) > SHOWN_OFFERS else ""


def _launch(offer: Offer) -> tuple[str, str, str, str, str]:
    return (offer.instance_type, offer.market.value, offer.zone, str(offer.slots), dollars(offer.price_micros_h))


def fleet_status(status: FleetStatus) -> str:
    lines = [f"fleet {status.fleet}: {status.state}{f', {status.why}' if status.why else ''}", _sizes(status),
             *policy_lines(status)]
    if status.hosts:
        lines += ["", hosts(status.hosts)]
    if status.jobs:
        lines += ["", jobs(status.jobs), *(f"{j.job}: {j.step_why}" for j in status.jobs if j.step_why)]
    return "\n".join(lines)


def policy_lines(status: FleetStatus) -> list[str]:
    """What the policy wants and why, what of the limits is left, and whether deadlines will be kept."""
    policy, lines = status.policy, []
    if policy and policy.why:
        lines.append(f"policy {policy.rule}: {policy.spot} spot and {policy.on_demand} on-demand hosts, {policy.why}")
    if policy and policy.max_micros and status.spent_micros is not None:
        part = 100 * status.spent_micros / policy.max_micros
        lines.append(f"budget: {dollars(status.spent_micros)} of {dollars(policy.max_micros)} spent ({part:.0f} %)")
    if policy and policy.max_micros_h:
        lines.append(f"budget: {dollars(status.burn_micros_h)}/h of {dollars(policy.max_micros_h)}/h")
    return lines + [line for j in status.jobs if (line := due(j))]


def due(job: JobStatus) -> str:
    """When a job will be done, beside when it must be; "" where neither is known."""
    said = []
    if job.deadline_in_s is not None:
        said.append(f"due in {span(job.deadline_in_s)}" if job.deadline_in_s >= 0 else
                    f"{span(-job.deadline_in_s)} past its deadline")
    if job.work_left_s is not None:
        said.append(f"{span(job.work_left_s)} of work left at full target")
    if job.finish_in_s is not None:
        said.append(f"done in {span(job.finish_in_s)} at this pace")
    return f"{job.job}: {', '.join(said)}" if said else ""


def _sizes(status: FleetStatus) -> str:
    nodes = f"{status.min}..{status.max} hosts, target {status.target}"
    if status.state == "down" and not status.hosts:
        return f"{nodes}; it lived {span(status.age_s)}"
    on_demand = "unknown"
    if all(h.on_demand_micros_h for h in status.hosts if h.price_micros_h):
        full_burn = status.on_demand_burn_micros_h
        saved = f" ({100 * (1 - status.burn_micros_h / full_burn):.0f} % less)" if full_burn else ""
        on_demand = f"{dollars(full_burn)}/h{saved}"
    ends = f", max_lifetime ends it in {span(status.ends_in_s)}" if status.ends_in_s is not None else ""
    spent = f"; {dollars(status.spent_micros)} spent so far" if status.spent_micros is not None else ""
    return (f"{nodes}; {span(status.age_s)} old{ends}; burn {dollars(status.burn_micros_h)}/h, on demand "
            f"{on_demand}{spent}")


def fleets(found: Sequence[FleetStatus]) -> str:
    rows = [(f.fleet, f.state, f"{f.min}..{f.max}", sum(h.role == "worker" and h.state == "up" for h in f.hosts),
             len(f.jobs), dollars(f.burn_micros_h), "-" if f.spent_micros is None else dollars(f.spent_micros), f.why)
            for f in found]
    return table(["fleet", "state", "nodes", "hosts up", "jobs", "$/h", "spent", "why"], rows,
                 right=["hosts up", "jobs", "$/h", "spent"])


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
             j.repeated, f"{j.step_s * 1e3:.1f} ms" if j.step_s else "-", span(j.age_s), _outputs(j), j.why)
            for j in found]
    return table(["job", "name", "state", "workers", "generation", "steps", "repeated", "per step", "age", "outputs",
                  "why"], rows, right=["generation", "steps", "repeated", "per step", "age"])


def _outputs(job: JobStatus) -> str:
    """1.2 MB, 4s ago: what has been collected, and when the newest came."""
    if job.output_age_s is None:
        return "-"
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if job.output_bytes >= u), (1e3, "kB"))
    return f"{job.output_bytes / unit:.1f} {name}, {span(job.output_age_s)} ago"


def _workers(job: JobStatus) -> str:
    """2 (1..3): how many train, and between how many may."""
    now = "-" if JobState(job.state).ended else str(job.world_size)
    return f"{now} ({job.min_workers}..{job.max_workers})"
