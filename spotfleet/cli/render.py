"""Conversion of values to tables and lines, as wide as the terminal. Prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spotfleet.api.lifecycle.preview import Estimate, PlanKind, UpPlan
from spotfleet.cli.tables import columns, flow, shown, table
from spotfleet.fleet.planner.plan import Launch
from spotfleet.fleet.planner.pool_choice import at
from spotfleet.model import HostState, JobState, Market, Nodes, Offer
from spotfleet.protocol.libraries import nccl_of
from spotfleet.protocol.messages import FleetStatus, HostStatus, JobStatus
from spotfleet.providers.plugin import RegionRow
from spotfleet.words import counted, dollars

SHOWN_OFFERS = 6


def span(seconds: float) -> str:
    """Format a duration: 45s, 12m03s, 3h07m, 2d04h."""
    s = int(seconds)
    for unit, size, below in (("d", 86400, "h"), ("h", 3600, "m"), ("m", 60, "s")):
        if s >= size:
            return f"{s // size}{unit}{s % size // {'h': 3600, 'm': 60, 's': 1}[below]:02d}{below}"
    return f"{s}s"


def up_plan(plan: UpPlan, width: int | None = None) -> str:
    """Format the plan of `up` for a terminal of `width`; None: that of stdout."""
    width = columns() if width is None else width
    nodes, was = plan.nodes, plan.was
    title = {
        PlanKind.NEW: "to be made; ", PlanKind.CONTINUE: "started before, to be continued; ",
        PlanKind.SAME: "up already; ", PlanKind.NODES: f"to be resized from {_sized(was)} to " if was else "",
        PlanKind.POLICY: "up already, its policy is to change; ",
    }[plan.change]
    where = f"{plan.provider}{f' in {plan.region}' if plan.region else ''}"
    lines = [f"fleet {plan.fleet} on {where}: {title}{_sized(nodes)}", *_on_demand_hosts(plan)]
    if plan.kept:
        lines.append(f"changed for the next job: {', '.join(plan.kept)}")
    if plan.notify_changed:
        lines.append("changed at once: notify")
    if plan.change in (PlanKind.SAME, PlanKind.POLICY):
        return flow("\n".join([*lines, *limits(plan)]), width)
    if plan.change is not PlanKind.NODES:  # for NODES only the dispatcher knows the hosts that exist
        lines += ["", _launches(plan, width)]
    if plan.regions[1:]:
        lines += ["", "regions considered, for all machines at target:", regions(plan.regions, width)]
    if plan.offers:
        lines += ["", f"offers considered, cheapest first{_more(plan.offers)}:",
                  offers(plan.offers[:SHOWN_OFFERS], width)]
    if plan.why:
        lines += ["", f"problem: {plan.why}"]
    if plan.unpriced:
        lines += ["", f"about {dollars(plan.micros_h)}/h in all; {unpriced(plan.unpriced)}"]
    elif plan.on_demand_micros_h:
        saved = 100 * (1 - plan.micros_h / plan.on_demand_micros_h)
        lines += ["", f"about {dollars(plan.micros_h)}/h in all, instead of {dollars(plan.on_demand_micros_h)}/h on "
                      f"demand ({saved:.0f} % less)"]
    lines += limits(plan)
    if plan.change is not PlanKind.NODES:
        lines += [*([plan.beside] if plan.beside else []), ends(plan), *([plan.left_out] if plan.left_out else [])]
    if plan.priced_by:
        lines.append(plan.priced_by)
    if plan.before_up:
        lines += ["", "before `up`:", *(f"  {line}" for line in plan.before_up)]
    return flow("\n".join(lines), width)


def _sized(nodes: Nodes) -> str:
    """Format numbers of hosts: "2..4 hosts, target 3" or "1 host"."""
    if nodes.min == nodes.target == nodes.max:
        return counted(nodes.min, "host")
    return f"{nodes.min}..{nodes.max} hosts, target {nodes.target}"


def _on_demand_hosts(plan: UpPlan) -> list[str]:
    """Format the groups, and when hosts come and go where jobs decide."""
    lines = [f"group {g.name}: {_sized(g.nodes)}" for g in plan.groups]
    ranges = [g.nodes for g in plan.groups] or [plan.nodes]
    idle = " or ".join(span(s) for s in sorted({n.idle_s for n in ranges if not n.min}))
    when = f"with a min of 0 hosts come when a job needs them, and go when idle for {idle}" if idle else ""
    return [*lines, when] if when else lines


def _launches(plan: UpPlan, width: int) -> str:
    """Format a row for each kind of machine, with its place, its price and why it was chosen."""
    rows = [("dispatcher", *_launch(plan.dispatcher.offer), _reason(plan.dispatcher))] if plan.dispatcher else []
    hosts = Counter((*_launch(launch.offer), _reason(launch)) for launch in plan.workers)
    rows += [(counted(count, "host"), *row) for row, count in hosts.items()]
    return table(["what", "type", "market", "zone", "slots", "$/h", "why"], rows, right=["slots", "$/h"],
                 drop=["slots"], words="why", width=width)


def _reason(launch: Launch) -> str:
    """Return the launch's `why` without the parts that its row shows."""
    missing, shown, reason = launch.why.partition(at(launch.offer))
    before = "" if shown and missing.endswith(" missing; ") else missing.removesuffix("; ")
    return "; ".join(filter(None, [before, reason.lstrip(", ;")])) or "-"


def unpriced(pools: Sequence[str]) -> str:
    return f"the saving is unknown: {', '.join(pools)} {'has' if len(pools) == 1 else 'have'} no known on-demand price"


def full(micros: int, on_demand: int, digits: int = 4) -> str:
    """Format the on-demand price of machines that cost `micros`; it is unknown if it is 0 and `micros` is not."""
    return "unknown" if micros and not on_demand else dollars(on_demand, digits)


def limits(plan: UpPlan) -> list[str]:
    """Format the policy's reason, the estimated cost of the work, and the limits of cost."""
    spot, full = plan.micros_h_of(Market.SPOT), plan.micros_h_of(Market.ON_DEMAND)
    lines = [f"of it spot {dollars(spot)}/h, on demand {dollars(full)}/h"] if plan.policy_why and spot + full else []
    lines += [f"policy: {plan.policy_why}"] if plan.policy_why else []
    if plan.estimate:
        lines += _estimate(plan.estimate, plan.policy.max_micros)
    if plan.policy.max_micros:
        digits = 4 if plan.policy.max_micros % 10_000 else 2  # rounding must not show more than the file's limit
        lines.append(f"it shuts down cleanly before {dollars(plan.policy.max_micros, digits)} are spent (max_cost)")
    if plan.policy.max_micros_h:
        lines.append(f"never more hosts than fit in {dollars(plan.policy.max_micros_h)}/h (max_hourly_cost)")
    if plan.sure_micros_h:
        lines.append("the deadline is certain only while spot hosts are available: "
                     f"{plan.nodes.target} hosts on demand and the dispatcher cost {dollars(plan.sure_micros_h)}/h, "
                     "more than max_hourly_cost")
    return lines


def _estimate(e: Estimate, max_micros: int) -> list[str]:
    """Format the estimated cost of the work, with a warning if max_cost ends the fleet before it is done."""
    between = ", or between the two as the policy takes on-demand hosts where it must" if e.mixed else ""
    spot = "spot hosts" if not e.base else f"spot hosts beside {e.base} on demand"
    costs = f"{dollars(e.spot_micros, 2)} on {spot}, " if e.base < e.hosts else ""
    lines = [f"{span(e.work_s)} of work will cost about {costs}{dollars(e.on_demand_micros, 2)} on demand{between}"]
    if costs:
        lines.append(f"in this a boot takes {span(e.boot.seconds)}, " + (
            f"the median of {counted(e.boot.boots, 'boot')} of this fleet" if e.boot.boots else
            "which is assumed: no boot of this fleet has been measured"))
    if max_micros and (least := min(e.spot_micros, e.on_demand_micros)) > max_micros:
        lines.append(f"max_cost is too little for it: about {100 * max_micros / least:.0f} % of the work is done by "
                     "then")
    return lines


def ends(plan: UpPlan) -> str:
    """Format the rules by which machines end without a command."""
    orphans = (f"hosts end themselves {span(plan.orphan_after_s)} after losing contact with the dispatcher"
               if plan.orphan_after_s else "hosts never end themselves (orphan_after: 0)")
    ended = f"; the fleet ends after {span(plan.max_lifetime_s)}" if plan.max_lifetime_s else ""
    kept = (f"\nif it ends by itself, its dispatcher keeps the results for {plan.keep_s / 3600:g} h: `spotfleet down` "
            "copies them here") if plan.keep_s else ""
    return orphans + ended + kept


def regions(found: Sequence[RegionRow], width: int | None = None) -> str:
    rows = [(r.region, *(dollars(p) if p else "-" for p in (r.host_micros_h, r.dispatcher_micros_h, r.total_micros_h)),
             r.why) for r in found]
    return table(["region", "host $/h", "dispatcher $/h", "all $/h", "why"], rows,
                 right=["host $/h", "dispatcher $/h", "all $/h"], drop=["dispatcher $/h"], words="why", width=width)


def offers(found: Sequence[Offer], width: int | None = None) -> str:
    rows = [(o.pool, o.slots, o.accelerator or "-", dollars(o.price_micros_h),
             full(o.price_micros_h, o.on_demand_micros_h)) for o in found]
    return table(["pool", "slots", "accelerator", "$/h", "on demand"], rows, right=["slots", "$/h", "on demand"],
                 drop=["accelerator", "slots", "on demand"], width=width)


def _more(found: Sequence[Offer]) -> str:
    return f" ({SHOWN_OFFERS} of {len(found)})" if len(found) > SHOWN_OFFERS else ""


def _launch(offer: Offer) -> tuple[str, str, str, str, str]:
    return (offer.instance_type, offer.sold, offer.zone, str(offer.slots), dollars(offer.price_micros_h))


def fleet_status(status: FleetStatus) -> str:
    status = shown(status)
    lines = [f"fleet {status.fleet}: {status.state}{f', {status.why}' if status.why else ''}", _sizes(status),
             *(f"group {g.group}: {_sized(Nodes(g.min, g.target, g.max))}; {g.wanted} wanted now"
               for g in status.groups), *policy_lines(status)]
    if status.hosts:
        lines += ["", hosts(status.hosts)]
    if status.jobs:
        lines += ["", jobs(status.jobs), *(f"{j.job}: {j.step_why}" for j in status.jobs if j.step_why),
                  *(line for j in status.jobs for line in slow_workers(j)),
                  *(f"{j.job}: {line}" for j in status.jobs if (line := nccl_of(j)))]
    return flow("\n".join(lines))


def policy_lines(status: FleetStatus) -> list[str]:
    """Format the policy's targets and reason, spending against the limits, and each job's deadline."""
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
    """Format a job's expected end and its deadline; "" if neither is known."""
    parts = []
    if job.deadline_in_s is not None:
        parts.append(f"due in {span(job.deadline_in_s)}" if job.deadline_in_s >= 0 else
                    f"{span(-job.deadline_in_s)} past its deadline")
    if job.work_left_s is not None:
        parts.append(f"{span(job.work_left_s)} of work left at full target")
    if job.finish_in_s is not None:
        parts.append(f"done in {span(job.finish_in_s)} at this pace")
    return f"{job.job}: {', '.join(parts)}" if parts else ""


def slow_workers(job: JobStatus) -> list[str]:
    """Format a line for each worker that holds the others up."""
    return [f"{job.job}: rank {w.rank} ({w.worker}) is slow: it computes {w.compute_s * 1e3:.1f} ms in a step, the "
            f"median {w.median_s * 1e3:.1f} ms, for {w.steps} steps; `spotfleet drain {w.worker.partition('/')[0]}` "
            "replaces its host" for w in job.slow]


def _sizes(status: FleetStatus) -> str:
    nodes = _sized(Nodes(status.min, status.target, status.max))
    if status.state == "down" and not status.hosts:
        return f"{nodes}; it lived {span(status.age_s)}"
    on_demand = "unknown"
    if all(h.on_demand_micros_h for h in status.hosts if h.price_micros_h):
        full_burn = status.on_demand_burn_micros_h
        saved = f" ({100 * (1 - status.burn_micros_h / full_burn):.0f} % less)" if full_burn else ""
        on_demand = f"{dollars(full_burn)}/h{saved}"
    ends = f", max_lifetime ends it in {span(status.ends_in_s)}" if status.ends_in_s is not None else ""
    spent = f"; {dollars(status.spent_micros)} spent so far" if status.spent_micros is not None else ""
    now = ("" if status.hosts and not any(h.price_micros_h for h in status.hosts) else
           f"; costs {dollars(status.burn_micros_h)}/h now, on demand {on_demand}")
    return f"{nodes}; {span(status.age_s)} old{ends}{now}{spent}"


def fleets(found: Sequence[FleetStatus]) -> str:
    rows = [(f.fleet, f.state, f"{f.min}..{f.max}", sum(h.role == "worker" and h.state == "up" for h in f.hosts),
             len(f.jobs), dollars(f.burn_micros_h), "-" if f.spent_micros is None else dollars(f.spent_micros), f.why)
            for f in found]
    return table(["fleet", "state", "nodes", "hosts up", "jobs", "$/h", "spent", "why"], rows,
                 right=["hosts up", "jobs", "$/h", "spent"], drop=["nodes", "jobs", "$/h"], words="why")


def hosts(found: Sequence[HostStatus]) -> str:
    grouped = any(h.group for h in found)
    rows = [(h.host, h.role, *([h.group or "-"] if grouped else []), h.state, span(h.since_s), h.address or "-",
             h.slots, _place(h.pool), "-" if h.state == HostState.STOPPED.value else dollars(h.price_micros_h),
             ",".join(h.jobs) or "-", _host_why(h)) for h in found]
    return table(["host", "role", *(["group"] if grouped else []), "state", "for", "address", "slots", "pool", "$/h",
                  "jobs", "why"], rows, right=["slots", "$/h", "for"],
                 drop=["address", "slots", "pool", "jobs", "for", "role"], words="why")


def _place(pool: str) -> str:
    """Return the pool without the provider, which is the same for all hosts of a fleet."""
    return pool.partition("/")[2] or pool


def _host_why(host: HostStatus) -> str:
    notice = f"interruption notice: ends in {host.seconds_left:.0f} s" if host.seconds_left is not None else ""
    rest = (part for part in host.why.split("; ") if not (notice and part.startswith("interruption notice")))
    return "; ".join(dict.fromkeys(t for t in (notice, *rest) if t))


def jobs(found: Sequence[JobStatus]) -> str:
    rows = [(j.job, j.name, j.kind or "-", j.state, _workers(j), j.generation, _steps(j),
             "-" if _steps(j) == "-" else j.repeated, f"{j.step_s * 1e3:.1f} ms" if j.step_s else "-", span(j.age_s),
             _outputs(j), _job_why(j))
            for j in found]
    return table(["job", "name", "kind", "state", "workers", "generation", "steps", "repeated", "per step", "age",
                  "outputs", "why"], rows, right=["generation", "steps", "repeated", "per step", "age"], words="why",
                 drop=["generation", "outputs", "name", "kind", "repeated", "age", "per step"])


def queue(found: Sequence[JobStatus]) -> str:
    """Format jobs in the order in which they get hosts."""
    rows = [(j.job, j.name, j.state, j.priority, _workers(j), j.hosts, span(j.age_s), j.why) for j in found]
    return table(["job", "name", "state", "priority", "workers", "hosts", "age", "why"], rows,
                 right=["priority", "hosts", "age"], words="why", drop=["name", "age", "hosts"])


def _steps(job: JobStatus) -> int | str:
    """Return the steps; "-" where nobody counts them."""
    counted_here = job.kind not in ("restart", "command") and not job.outside and not job.hint
    return job.version or (0 if counted_here else "-")


def _job_why(job: JobStatus) -> str:
    """Return the job's reason; for one that starts anew as a whole also how often, and the age of its checkpoints."""
    parts = [job.why]
    if job.restarts:
        parts.append(f"started anew {counted(job.restarts, 'time')}")
    if job.folder_age_s is not None and not JobState(job.state).ended:
        parts.append(f"checkpoint folder copied {span(job.folder_age_s)} ago")
    return "; ".join(filter(None, parts))


def _outputs(job: JobStatus) -> str:
    """Format "1.2 MB, 4s ago": size of the collected output files, and age of the newest."""
    if job.output_age_s is None:
        return "-"
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if job.output_bytes >= u), (1e3, "kB"))
    return f"{job.output_bytes / unit:.1f} {name}, {span(job.output_age_s)} ago"


def _workers(job: JobStatus) -> str:
    """Format "2 (1..3)": number of training workers, and its limits."""
    now = "-" if JobState(job.state).ended else str(job.world_size)
    return f"{now} ({job.min_workers}..{job.max_workers})"
