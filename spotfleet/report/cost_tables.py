"""Tables of a cost report: the same money by fleet, job, pool, day and host."""

from __future__ import annotations

from collections.abc import Sequence

from spotfleet.fleet.cost.groups import CostGroup
from spotfleet.report.cost_view import CostView
from spotfleet.report.html import SafeHtml
from spotfleet.report.page import Column, digits, table
from spotfleet.words import instant, money, percent, span

MONEY = (Column("cost", True), Column("on demand", True), Column("saved", True))


def tables(view: CostView) -> list[SafeHtml]:
    """Return all tables. Each but the jobs' and the interruptions' adds up to the whole bill."""
    found = []
    if len(view.costs.fleets) > 1:
        found.append(_groups(view, "By fleet", "What each fleet cost.", "fleet", view.by_fleet, time=True))
    if any(f.report.jobs for f in view.costs.fleets):
        found.append(_jobs(view))
    found.append(_groups(view, "By pool", "What the machines of each pool cost, their disks and addresses with them.",
                         "pool", _dearest(view.by_pool), time=True))
    if len(view.by_day) > 1:
        found.append(_groups(view, "By day", "What fell due on each day of UTC.", "day", view.by_day, time=True))
    found.append(_groups(view, "By host", "What each machine cost, dearest first.", "host", _dearest(view.by_host),
                         time=True, detail="what it was"))
    if view.series.marks:
        found.append(_events(view))
    return found


def _dearest(groups: Sequence[CostGroup]) -> list[CostGroup]:
    return sorted(groups, key=lambda g: -g.micros)


def _groups(view: CostView, title: str, says: str, head: str, groups: Sequence[CostGroup], *, time: bool = False,
            detail: str = "") -> SafeHtml:
    columns = [Column(head), *([Column(detail)] if detail else []), *([Column("billed", True)] if time else []), *MONEY]
    places = digits(view.costs.micros)
    rows = [[g.key, *([g.detail] if detail else []), *([span(g.seconds) if g.seconds else "-"] if time else []),
             *_amounts(g.micros, g.on_demand_micros, places)] for g in groups]
    known = not view.costs.unpriced
    total = ["in all", *([""] if detail else []), *([span(sum(g.seconds or 0 for g in groups))] if time else []),
             *_amounts(sum(g.micros for g in groups), sum(g.on_demand_micros for g in groups) if known else 0, places)]
    return table(title, says, columns, rows, total)


def _amounts(micros: int, full: int, places: int) -> list[str]:
    """Return cost, on-demand cost and saving; the last two are unknown without an on-demand price."""
    if micros and not full:
        return [money(micros, places), "unknown", "unknown"]
    return [money(micros, places), money(full, places), percent(full - micros, full) if full else "-"]


def _jobs(view: CostView) -> SafeHtml:
    many = len(view.costs.fleets) > 1
    columns = [*([Column("fleet")] if many else []), Column("job"), Column("name"), *MONEY, Column("steps", True),
               Column("per 1,000 steps", True), Column("repeated", True), Column("lost", True)]
    places = digits(view.costs.micros)
    rows = [[*([f.fleet] if many else []), j.job, j.name or "-",
             *_amounts(j.micros + j.traffic_micros, j.on_demand_micros + j.traffic_micros, places),
             "-" if j.uncounted else f"{j.useful_steps:,}",
             "-" if j.micros_per_1000_steps is None else money(j.micros_per_1000_steps),
             *(("-", "-") if j.uncounted else
               (f"{j.repeated_steps:,}", money(j.repeated_micros + j.pause_micros)))]
            for f in view.costs.fleets for j in f.report.jobs]
    says = ("What each job's share of the machines cost, with its traffic. Lost is what repeated steps and pauses "
            "cost. The dispatcher, disks, addresses and machines that no job held are no job's.")
    return table("By job", says, columns, rows)


def _events(view: CostView) -> SafeHtml:
    heads = ("when (UTC)", "what", "host or job", "pool", "words")
    rows = [[instant(m.at), m.kind, m.host, m.pool or "-", m.why] for m in view.series.marks]
    return table("What happened", "Machines that the cloud took or announced to take, what jobs came to, and limits on "
                 "money that were reached.", [Column(head) for head in heads], rows)
