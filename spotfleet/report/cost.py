"""Cost report of fleets, as a page for people who have never seen the tool."""

from __future__ import annotations

from spotfleet.fleet.cost.boots import median_s
from spotfleet.report import cost_tables
from spotfleet.report.axes import Unit
from spotfleet.report.charts import Bar, Chart, ChartMark, Curve, Points, SeriesStyle, stacked, step_at, thinned
from spotfleet.report.cost_view import CostView, PoolPrices
from spotfleet.report.html import SafeHtml, tag
from spotfleet.report.page import Tile, bars, chart, definitions, document, header, note, section
from spotfleet.words import clock, count, day, instant, money, percent, span

POOLS = 6  # pools with a chart of their own
PARTS = {
    "useful": ("training", SeriesStyle.USEFUL, "machines while a job made steps that count"),
    "unknown": ("work of unknown kind", SeriesStyle.AROUND, "scripts and commands without hvd.elastic.run"),
    "boot": ("starting machines", SeriesStyle.WASTED, "from when a machine is billed until it can work"),
    "repeated": ("repeated steps", SeriesStyle.WASTED, "steps since the last checkpoint, when no worker was left"),
    "pause": ("pauses", SeriesStyle.WASTED, "machines while the group changed, up to its first step"),
    "idle": ("idle", SeriesStyle.WASTED, "machines that no job held"),
    "dispatcher": ("dispatcher", SeriesStyle.AROUND, "the small machine that watches over the others"),
    "disks": ("disks", SeriesStyle.AROUND, "of all machines"),
    "addresses": ("public addresses", SeriesStyle.AROUND, "of all machines"),
    "traffic": ("traffic between zones", SeriesStyle.AROUND, "estimated from the size of a step"),
}
AROUND = ("disks", "addresses", "traffic", "unknown")
DEFINITIONS = (
    ("spot and on demand", "A cloud sells idle machines cheaply as spot machines and may take them back at any moment. "
     "An on-demand machine costs more and stays."),
    ("on-demand comparison", "The same machines for the same seconds at the on-demand price of that time. Disks, "
     "addresses and traffic cost the same in both, and so does a machine that ran on demand anyway."),
    ("interruption", "The cloud took a spot machine back, or announced it and the machine left in time. What it cost "
     "is what repeated steps and pauses cost, whatever caused them."),
    ("host, pool, slot", "A host is one machine. A pool is a type of machine in one zone and market. A slot is room "
     "for one worker, usually a GPU."),
    ("job, step", "A job is one training run. A step is one update of the model; steps that count are those in the "
     "result, each once."),
    ("dispatcher", "A small on-demand machine that launches hosts, replaces lost ones and keeps the ledger."),
    ("how it is reckoned", "From the fleet's own records: when each machine ran, by the cloud's clock, and the price "
     "of each second as it was then. Each begun second counts. Later changes of prices change nothing. Taxes, "
     "discounts and credits of an account are not known here, and traffic is an estimate; “spotfleet cost "
     "--reconcile FILE” compares with the cloud's own bill."),
)


def cost_page(view: CostView) -> str:
    """Return the whole document. An empty ledger gives an honest empty page."""
    names = [f.fleet for f in view.costs.fleets]
    title = names[0] if len(names) == 1 else count(len(names), "fleet")
    top = header(_kicker(view), title, _summary(view), () if view.empty else _tiles(view))
    if view.empty:
        return document(f"Cost of {title}", top, _notes(view), _definitions(), _footer(view))
    return document(f"Cost of {title}", top, _notes(view), _spend(view), _where(view), _hosts(view), _prices(view),
                    *cost_tables.tables(view), _definitions(), _footer(view))


def _kicker(view: CostView) -> str:
    since, until = view.costs.since, view.costs.until
    if view.empty or view.series.since >= view.series.until:
        window = [f"since {instant(since)}" if since is not None else "", f"until {instant(until)}" if until else ""]
        return " ".join(["Cost report", *filter(None, window)])
    length = span(view.series.until - view.series.since)
    so_far = ", still running" if view.living else ""
    first, last = view.series.since, view.series.until
    end = clock(last) if day(first) == day(last) else instant(last)
    return f"Cost report, {instant(first)} to {end} UTC ({length}{so_far})"


def _summary(view: CostView) -> list[str]:
    """Return the result in a sentence or two."""
    fleets, many = view.costs.fleets, len(view.costs.fleets) != 1
    if view.empty:
        what = "These fleets have" if many else "This fleet has"
        when = " in this time" if view.costs.since is not None or view.costs.until is not None else ""
        return [f"{what} cost nothing{when}: none of {'their' if many else 'its'} machines has run."
                if fleets else "There is no fleet to report on."]
    who = f"These {len(fleets)} fleets" if many else "This fleet"
    verb = f"{'have' if many else 'has'} cost" if view.living else "cost"
    first = f"{who} {verb} {money(view.costs.micros)}{' so far' if view.living else ''}{_against(view)}."
    return [first, _interrupted(view)]


def _against(view: CostView) -> str:
    full, paid = view.costs.on_demand_micros, view.costs.micros
    if view.costs.unpriced or not full:
        return "; the saving is unknown, as there is no on-demand price"
    if paid == full:
        return ", as much as on demand"
    return f", {percent(abs(full - paid), full)} {'less' if paid < full else 'more'} than on demand ({money(full)})"


def _interrupted(view: CostView) -> str:
    lost = view.costs.breakdown.repeated + view.costs.breakdown.pause
    times = len(view.interruptions)
    uncounted = any(job.uncounted for f in view.costs.fleets for job in f.report.jobs)
    if times and not lost:
        return (f"{count(times, 'interruption').capitalize()}, which cost no job "
                + ("whose steps are counted " if uncounted else "") + "a step or a pause.")
    if times:
        return (f"{count(times, 'interruption').capitalize()} cost {money(lost)} in repeated steps and pauses, "
                f"{percent(lost, view.costs.micros)} of the bill"
                + (", without the jobs whose steps nobody counts." if uncounted else "."))
    if lost:
        return f"It was never interrupted; {money(lost)} went into pauses and repeated steps when the group changed."
    return "The cloud took no machine away."


def _tiles(view: CostView) -> list[Tile]:
    paid, full = view.costs.micros, view.costs.on_demand_micros
    known = full and not view.costs.unpriced
    steps = sum(f.report.useful_steps for f in view.costs.fleets)
    tiles = [Tile("cost so far" if view.living else "cost", money(paid), _counted(view)),
             Tile("on demand", money(full) if known else "unknown", "the same machines and seconds"),
             Tile("saved", percent(full - paid, full) if known else "unknown", money(full - paid) if known else ""),
             Tile("interruptions", f"{len(view.interruptions):,}", "machines that the cloud took")]
    if steps:
        tiles.append(Tile("per 1,000 steps", money(round(paid * 1000 / steps)), f"{steps:,} steps that count"))
    return tiles


def _counted(view: CostView) -> str:
    """Return the parts of the total. Where a fleet's other prices are unknown, a note says so."""
    if len(view.costs.unrated) == len(view.costs.fleets):
        return "machines only"
    return "machines, disks, addresses, traffic" + (" where known" if view.costs.unrated else "")


def _notes(view: CostView) -> SafeHtml | None:
    lines = [f"Not everything could be read: {line}" for line in view.costs.missing]
    for fleet in view.costs.fleets:
        if fleet.report.missing_before is not None:
            lines.append(f"Records of {fleet.fleet} were lost at {instant(fleet.report.missing_before)}: machines and "
                        "jobs that had ended before may be missing here.")
    if unrated := view.costs.unrated:
        some = len(unrated) < len(view.costs.fleets)
        of = f" of {', '.join(unrated)}" if some else ""
        lines.append(f"Disks, public addresses and traffic{of} are not counted: "
                    f"{'their' if some else 'the'} prices are not known.")
    if view.costs.unpriced:
        lines.append(f"No on-demand price is known for {', '.join(view.costs.unpriced)}.")
    return note(*lines)


def _spend(view: CostView) -> SafeHtml:
    spend, known = view.series.spend, not view.costs.unpriced
    text = f"The solid line is what had been spent by each moment{', so far' if view.living else ''}."
    curves = [Curve("spent", SeriesStyle.SPOT, tuple((s.at, s.micros) for s in spend), filled=True,
                    value=money(view.costs.micros))]
    if known:
        text += (" The dashed one is what the same machines would have cost on demand; the gap between them is what "
                 "was saved.")
        curves.append(Curve("the same on demand", SeriesStyle.ON_DEMAND,
                            tuple((s.at, s.all_on_demand_micros) for s in spend),
                            value=money(view.costs.on_demand_micros)))
    drawn = Chart("spend", "Spend over time", f"Dollars spent in all, rising from nothing to {money(view.costs.micros)}"
                  + (f", and to {money(view.costs.on_demand_micros)} on demand." if known else "."),
                  Unit.DOLLARS, view.series.since, view.series.until, tuple(curves))
    return section("Spend over time", text, chart(drawn))


def _hosts(view: CostView) -> SafeHtml:
    spot: Points = tuple((p.at, float(p.spot)) for p in view.series.hosts)
    full: Points = tuple((p.at, float(p.on_demand)) for p in view.series.hosts)
    marks = tuple(ChartMark(m.at, f"{instant(m.at)}: {m.host} in {m.pool}") for m in view.interruptions)
    most = int(max((p.spot + p.on_demand for p in view.series.hosts), default=0))
    text = "How many machines ran for training, the dispatcher left out: spot at the bottom, on demand on top of it."
    if marks:
        text += " Each triangle is a machine that the cloud took away."
    times = count(len(marks), "interruption")
    drawn = Chart("hosts", "Hosts over time", f"Up to {count(most, 'host')} at a time; {times}.", Unit.HOSTS,
                  view.series.since, view.series.until,
                  bands=thin_stack(spot, full, view.series.since, view.series.until), marks=marks,
                  marked=times)
    return section("Hosts over time", text, chart(drawn))


def thin_stack(spot: Points, full: Points, since: float, until: float) -> tuple:
    """Return both layers at the same instants; a long history is thinned to instants that keep highs and lows."""
    both = tuple((at, n + step_at(full, at)) for at, n in spot)
    kept = {at for at, _ in thinned(both)} | {since}
    layers = [("spot", SeriesStyle.SPOT, spot), ("on demand", SeriesStyle.ON_DEMAND, full)]
    return stacked((name, style, tuple((at, step_at(points, at)) for at in sorted(kept)),
                    _hours(points, until)) for name, style, points in layers if any(n for _, n in points))


def _hours(points: Points, until: float) -> str:
    """Return the machine-hours of a layer."""
    ends = [at for at, _ in points[1:]] + [until]
    hours = sum(n * (end - at) for (at, n), end in zip(points, ends, strict=True)) / 3600
    return f"{hours:,.1f} machine-hours" if hours >= 0.1 else f"{hours * 60:.1f} machine-minutes"


def _prices(view: CostView) -> SafeHtml:
    if not view.prices:
        return section("Prices", "No machine for training ran on spot, so there is no spot price to show.")
    left = len(view.prices) - POOLS
    text = ("What an hour of one machine cost in each pool while machines ran there: the solid line on spot, the "
            "dashed one on demand.")
    if left > 0:
        text += f" Shown are the {POOLS} pools in which the most was spent; {left} more are in the table of pools."
    return section("Spot prices against on-demand prices", text,
                   tag("div", *(_pool(p, i) for i, p in enumerate(view.prices[:POOLS])), class_="pools"))


def _pool(prices: PoolPrices, place: int) -> SafeHtml:
    paid = thinned(tuple((at, p) for at, p, _ in prices.steps))
    full = thinned(tuple((at, p) for at, _, p in prices.steps))
    low, high = min(p for _, p in paid), max(p for _, p in paid)
    price = f"{money(low)}/h" if money(low) == money(high) else f"{money(low)} to {money(high)}/h"
    curves = [Curve("spot", SeriesStyle.SPOT, paid, steps=True, value=price)]
    if all(p for _, p in full):
        curves.append(Curve("on demand", SeriesStyle.ON_DEMAND, full, steps=True, value=f"{money(int(full[-1][1]))}/h"))
    drawn = Chart(f"pool-{place}", f"Prices in {prices.pool}", f"Spot cost {price}.", Unit.DOLLARS_H, prices.since,
                  prices.until, tuple(curves), small=True)
    return chart(drawn, prices.pool)


def _where(view: CostView) -> SafeHtml:
    found = view.costs.breakdown
    rows = [Bar(name, style, micros, text) for key, micros in found.parts() for name, style, text in [PARTS[key]]
            if micros or key not in AROUND]
    wasted = found.boot + found.repeated + found.pause + found.idle
    unknown = (f", and {percent(found.unknown, found.total)} into scripts and commands whose work is not measured"
               if found.unknown else "")
    text = (f"Of each dollar {percent(found.useful, found.total)} went into training and "
            f"{percent(wasted, found.total)} into machines that did nothing useful at the time{unknown}; the rest is "
            "what a fleet needs besides. Each bar begins where the one above it ends, and together they are the whole "
            "bill.") if found.total else ""
    if found.total and view.costs.boots:
        half = median_s(view.costs.boots)
        text += (f" {count(len(view.costs.boots), 'boot')} of machines cost {money(found.boot)}"
                 + (f"; half of them took {span(half)} or less until the machine could work." if half else "."))
    return section("Where the money went", text, bars(rows, found.total, "what it was for"))


def _definitions() -> SafeHtml:
    return definitions(DEFINITIONS)


def _footer(view: CostView) -> SafeHtml:
    return tag("footer", f"Made by spotfleet on {instant(view.at)} UTC from the fleet's own records. All times are "
               "UTC, all amounts US dollars. This file is complete in itself and loads nothing.")
