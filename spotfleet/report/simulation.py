"""Simulation report as a page: each strategy's cost over all windows, and one window in detail."""

from __future__ import annotations

from spotfleet.report.axes import TimeAxis, Unit
from spotfleet.report.charts import Bar, Chart, ChartMark, Curve, Points, SeriesStyle, thinned
from spotfleet.report.cost import thin_stack
from spotfleet.report.html import SafeHtml, tag
from spotfleet.report.page import (
    Column,
    Tile,
    bars,
    chart,
    definitions,
    document,
    header,
    note,
    section,
    table,
)
from spotfleet.report.ranges import Range, ranges
from spotfleet.simulate.values.result import PoolResult, SimulationReport, Story, StrategyOutcome
from spotfleet.words import count, hours, money, percent, span

STYLES = (SeriesStyle.FIRST, SeriesStyle.SECOND, SeriesStyle.THIRD, SeriesStyle.FOURTH, SeriesStyle.PLAIN)
PARTS = {"useful": ("work that counts", SeriesStyle.USEFUL, "machines while they did work of the result"),
         "boot": ("starting machines", SeriesStyle.WASTED, "from when a machine is billed until it can work"),
         "pause": ("pauses", SeriesStyle.WASTED, "machines that waited while the group changed"),
         "repeated": ("work made again", SeriesStyle.WASTED, "that a loss had undone"),
         "idle": ("idle", SeriesStyle.WASTED, "machines that had nothing to do")}
DEFINITIONS = (
    ("window", "The same work begun at another moment of the record: what would have happened to somebody who started "
     "then. Windows overlap."),
    ("on demand, 100 %", "The work on on-demand machines, without any start or pause. Every real run costs more than "
     "its useful hours, so even on-demand machines come out a little above."),
    ("missed", "The work was not done by the deadline, or not by the end of the window where there is no deadline."),
    ("spot and on demand", "A cloud sells idle machines cheaply as spot machines and may take them back at any moment. "
     "An on-demand machine costs more and stays."),
    ("what stands in for what", "The record says when how many spot machines could be had, and at what price. "
     "Decisions are those of the product's own code; starts and recoveries take as long as measured."),
)


def simulation_page(report: SimulationReport) -> str:
    title = f"Simulation of {report.fleet}"
    if not report.outcomes or not report.ours.windows:
        nothing = "Nothing was simulated: the records hold no window of that length."
        return document(title, header("Simulation", report.fleet, [nothing]), note(*report.notes))
    ends = "Made by spotfleet. All amounts are US dollars. This file is complete in itself and loads nothing."
    return document(
        title, header(_kicker(report), report.fleet, _summary(report), _tiles(report)), note(*report.notes),
        _costs(report), _windows(report), _where(report.ours), *(_story(report) if report.stories else ()),
        _records(report), _times(report), definitions(DEFINITIONS), tag("footer", ends))


def _kicker(report: SimulationReport) -> str:
    work = f"{hours(report.work_s)} of work" if report.work_s else "as much work as there is time for"
    within = f" within {hours(report.deadline_s)}" if report.deadline_s else ""
    return (f"Simulation, {count(len(report.ours.windows), 'window')} of {hours(report.window_s)}: "
            f"{count(report.hosts, 'host')}, {work}{within}")


def _summary(report: SimulationReport) -> list[str]:
    ours, many = report.ours, len(report.ours.windows)
    full = f", {ours.percent:.1f}\u00a0% of on demand" if report.full_micros else ""
    lines = [f"Our policy would have cost {money(ours.mean_micros)} on average{full}"
            + (f", and {_missed(ours.misses, many)}." if report.work_s else ".")]
    rivals = [o for o in report.outcomes if not o.ours and o.misses <= ours.misses]
    if rivals and ours.mean_micros:
        best = min(rivals, key=lambda o: o.mean_micros)
        apart = best.mean_micros - ours.mean_micros
        words = "cheaper than" if apart > 0 else "dearer than"
        lines.append(f"That is {percent(abs(apart), best.mean_micros)} {words} the cheapest other strategy that missed "
                    f"no more often, {best.strategy} ({money(best.mean_micros)})." if apart else
                    f"The cheapest other strategy that missed no more often, {best.strategy}, costs the same.")
    return lines


def _missed(misses: int, many: int) -> str:
    if not misses:
        return "would have been in time in every window" if many > 1 else "would have been in time"
    return f"would have been late in {misses:,} of {many:,} windows"


def _tiles(report: SimulationReport) -> list[Tile]:
    ours = report.ours
    tiles = [Tile("mean cost", money(ours.mean_micros), f"{money(ours.least_micros)} to {money(ours.most_micros)}")]
    if report.full_micros:
        tiles.append(Tile("of on demand", f"{ours.percent:.1f}\u00a0%", f"{money(report.full_micros)} is 100 %"))
    if report.work_s:
        tiles.append(Tile("missed", f"{ours.misses:,}", f"of {count(len(ours.windows), 'window')}"))
    tiles.append(Tile("goodput", f"{100 * ours.goodput:.1f}\u00a0%", "of the hosts' time was work that counts"))
    return tiles


def _costs(report: SimulationReport) -> SafeHtml:
    rows = [Range(o.strategy, STYLES[0] if o.ours else SeriesStyle.AROUND, o.least_micros, o.mean_micros, o.most_micros,
                  f"{o.percent:.1f}\u00a0%" if report.full_micros else "-",
                  f"{o.misses:,}" if report.work_s else "-") for o in report.outcomes]
    return section("What each strategy would have cost", "The bar is the mean over all windows, the thin line reaches "
                   "from the cheapest to the dearest. A strategy that misses often is cheap for the wrong reason.",
                   ranges(rows, ("of on demand", "missed")))


def _windows(report: SimulationReport) -> SafeHtml:
    curves = []
    for place, outcome in enumerate(report.outcomes):
        costs = sorted(w.micros for w in outcome.windows)
        points: Points = tuple((100 * i / max(1, len(costs) - 1), float(c)) for i, c in enumerate(costs))
        curves.append(Curve(outcome.strategy, STYLES[place % len(STYLES)], thinned(points, 200),
                            value=money(outcome.mean_micros)))
    drawn = Chart("windows", "Cost of each window", "For each strategy the costs of all windows, in ascending order.",
                  Unit.DOLLARS, 0.0, 100.0, tuple(curves), clock=TimeAxis.SHARE)
    return section("Cost of each window", "Every line holds all windows of one strategy, the cheapest on the left and "
                   "the dearest on the right: the lower it lies the better, the flatter the more predictable.",
                   chart(drawn))


def _where(outcome: StrategyOutcome) -> SafeHtml:
    parts = [(*PARTS[key], micros) for key, micros in outcome.parts]
    rows = [Bar(name, style, micros, text) for name, style, text, micros in parts]
    return section(f"Where the money of {outcome.strategy} went",
                   "Of a window, on average. Each bar begins where the one above it ends.",
                   bars(rows, sum(r.micros for r in rows), "what it was for"))


def _story(report: SimulationReport) -> list[SafeHtml]:
    story = report.stories[0]
    return [_timeline(story, report), _progress(report), _decisions(story), _actions(story)]


def _timeline(story: Story, report: SimulationReport) -> SafeHtml:
    window = story.window
    end = max(window.lasted_s, 1.0)
    spot: Points = tuple((at, float(n)) for at, n, _, _ in story.hosts)
    full: Points = tuple((at, float(n)) for at, _, n, _ in story.hosts)
    offered = thinned(tuple((at, float(n)) for at, n in story.offered))
    gone = {a.host: a for a in reversed(story.actions) if a.what in ("notice", "lost")}  # the first action on each
    marks = tuple(ChartMark(a.at_s, f"after {hours(a.at_s)}: {a.host}") for a in gone.values())
    ended = (f"done after {hours(window.finished_s)}" if window.finished_s is not None else
             f"not done after {hours(window.lasted_s)}") if report.work_s else f"{hours(window.lasted_s)} long"
    lost = count(len(marks), "interruption")
    drawn = Chart("timeline", "Hosts in one window", f"Spot and on-demand hosts over time; {lost}, {ended}.",
                  Unit.HOSTS, 0.0, end, (Curve("available spot hosts", SeriesStyle.PLAIN, offered, steps=True),),
                  thin_stack(spot, full, 0.0, end), marks, lost, TimeAxis.ELAPSED)
    return section(f"One window as it went: {story.strategy}", f"The window that cost most like the mean: "
                   f"{money(window.micros)}, {ended}. Solid is spot, hatched is on demand; the dotted line is how many "
                   "spot hosts could be had, up to the number wanted. Each triangle is a host that the cloud took.",
                   chart(drawn))


def _progress(report: SimulationReport) -> SafeHtml:
    """Return a chart of all strategies in the same window: money and, if there is an amount of work, the share that is
    done."""
    end = max(max(s.window.lasted_s for s in report.stories), 1.0)
    curves = tuple(Curve(s.strategy, STYLES[i % len(STYLES)], thinned(tuple((a, float(m)) for a, m in s.spent)),
                         value=money(s.window.micros)) for i, s in enumerate(report.stories))
    spent = Chart("spent", "Money spent in this window", "Dollars spent by each strategy over time.", Unit.DOLLARS, 0.0,
                  end, curves, clock=TimeAxis.ELAPSED)
    content = [chart(spent, "Money spent")]
    if report.work_s:
        late = (ChartMark(report.deadline_s, f"deadline after {hours(report.deadline_s)}"),
                ) if report.deadline_s else ()
        done = Chart("work", "Work done in this window", "Share of the work that is done, by each strategy over time.",
                     Unit.PERCENT, 0.0, max(end, report.deadline_s or 0.0),
                     tuple(Curve(s.strategy, STYLES[i % len(STYLES)], thinned(tuple((a, 100 * d) for a, d in s.work)),
                                 value="" if s.window.done else "missed") for i, s in enumerate(report.stories)),
                     marks=late, marked="the deadline", clock=TimeAxis.ELAPSED)
        content.append(chart(done, "Work done"))
    return section("The same window under each strategy", "Above what each had spent, below how far the work was." if
                   report.work_s else "What each had spent.", *content)


def _decisions(story: Story) -> SafeHtml:
    rows = [[hours(d.at_s), str(d.spot), str(d.on_demand), d.rule or "-", d.why] for d in story.decisions]
    heads = [Column("after"), Column("spot", True), Column("on demand", True), Column("rule"), Column("why")]
    text = "How many hosts of either kind the policy wanted from then on, and why."
    return table("What was decided in that window", text, heads, rows, whole="-o json")


def _actions(story: Story) -> SafeHtml:
    rows = [[hours(a.at_s), a.what, a.host, a.market or "-", a.why] for a in story.actions if a.what != "refused"]
    refused = f"; {count(story.window.refusals, 'launch', 'launches')} that were refused are left out"
    return table("What was done in that window",
                 f"Launches, losses, and what became of each host{refused if story.window.refusals else ''}.",
                 [Column(head) for head in ("after", "what", "host", "market", "why")], rows, whole="-o json")


def _records(report: SimulationReport) -> SafeHtml:
    together = "They are pools of one fleet." if report.together else "Each is a market of its own; windows are pooled."
    rows = [[p.name, p.zone or p.provider or "-", p.instance_type or "-", span(p.length_s), _available(p),
             money(p.spot_micros_h, 4), money(p.on_demand_micros_h, 4), p.priced_by] for p in report.pools]
    heads = (Column("record"), Column("zone"), Column("type"), Column("length", True), Column("spot available", True),
             Column("spot $/h", True), Column("on demand $/h", True), Column("priced by"))
    text = f"What the market did, as it was recorded. {together if len(rows) > 1 else ''}"
    return table("The records", text, heads, rows)


def _available(pool: PoolResult) -> str:
    return "-" if pool.available is None else f"{percent(pool.available, 1.0)} of the time"


def _times(report: SimulationReport) -> SafeHtml:
    rows = [["start of a host", span(report.boot_s), report.boot_from or "as asked for"],
            ["warning before a loss", span(report.notice_s), "as asked for"],
            *([what, span(seconds), source] for what, seconds, source in report.measured)]
    return table("How long things take", "The times that the simulation reckons with, and where they are from.",
                 [Column("what"), Column("time", True), Column("source")], rows)

