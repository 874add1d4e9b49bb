"""The command `simulate`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spotfleet import config, providers
from spotfleet.api.home import Home
from spotfleet.api.lifecycle.boots import measured_boots
from spotfleet.cli.console import print_message
from spotfleet.cli.render import span
from spotfleet.cli.tables import flow, table
from spotfleet.codec import to_json
from spotfleet.config.values import duration_s
from spotfleet.errors import UsageError
from spotfleet.fleet.policy.lifetimes import BootTime, boot_time
from spotfleet.model import BillingRules, FleetSpec
from spotfleet.simulate.request import PreparedSimulation, SimulationRequest, prepare
from spotfleet.simulate.run import simulate
from spotfleet.simulate.tariff import PriceOverrides
from spotfleet.simulate.values.result import PARTS, SimulationReport, Story, StrategyOutcome
from spotfleet.words import dollars

SHOWN = 12  # decisions of the window that is shown
REDRAW_S = 0.2
FIRST_LINE_S, LINE_S = 10.0, 30.0  # times of progress lines where the line cannot be redrawn
LONG_S = 30 * 86400.0  # a longer window is announced


def run(file: str, *, traces: list[str], output: str, polarity: str, work: str, deadline: str, every: str, boot: str,
        notice: str, windows: int, hosts: int, each: bool, price: str, on_demand_price: str) -> None:
    spec = config.load(Path(file)).spec
    between = _some("--every", every, "windows begin at least a minute apart")
    request = SimulationRequest(
        tuple(dict.fromkeys(traces)), polarity, _some("--work", work), _some("--deadline", deadline), between,
        windows, hosts, _seconds("--boot", boot) if boot else None, None if boot else _measured(spec),
        _seconds("--notice", notice), each,
        PriceOverrides(_micros("--price", price), _micros("--on-demand-price", on_demand_price)),
        _billing(spec.provider))
    asked = prepare(spec, request, print_message)
    _warn_of_long(asked)
    report = simulate(asked.fleet, asked.plan, asked.records, asked.notes, _progress())
    if output == "json":
        print(json.dumps(to_json(report), indent=1))
    elif output == "html":
        from spotfleet.report.simulation import simulation_page

        sys.stdout.write(simulation_page(report))
    else:
        print(flow(text(report)))


def _measured(spec: FleetSpec) -> BootTime:
    """Return the boot time of the fleet of this name, or of the one before."""
    return boot_time(measured_boots(Home().folder(spec.name), spec))


def _billing(provider: str) -> BillingRules:
    """Return the rules of a cloud that has accounts; the default for machines of one's own and clouds without a plugin.
    """
    if provider not in providers.names():
        return BillingRules()
    loaded = providers.load(provider, {})
    return loaded.billing() if isinstance(loaded, providers.ManagedResources) else BillingRules()


def _warn_of_long(asked: PreparedSimulation) -> None:
    """Warn that without a deadline a window is as long as the records, which may take minutes."""
    plan, pools = asked.plan, asked.records
    length_s = max(r.trace.length_s for r in pools) if plan.each else min(r.trace.length_s for r in pools)
    if math.isinf(plan.deadline_s) and length_s >= LONG_S:
        work = "" if math.isinf(plan.work_s) else ", or until the work is done"
        print_message(f"no deadline is given, so a window is as long as the records{work}: up to {span(length_s)} of "
                      f"{_count(len(pools), 'pool')}, which may take minutes; --work 48h --deadline 60h tries many "
                      "short windows")


def _progress() -> Callable[[float, int], None]:
    """Return a printer of progress: on a terminal one line that is redrawn; else a line every LINE_S after
    FIRST_LINE_S."""
    redraws, began = sys.stderr.isatty(), time.monotonic()
    due = began if redraws else began + FIRST_LINE_S

    def show(done: float, of: int) -> None:
        nonlocal due
        now = time.monotonic()
        if redraws and done >= of:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if now < due or done >= of:
            return
        due = now + (REDRAW_S if redraws else LINE_S)
        left = f", {span((now - began) / done * (of - done))} left" if done else ""
        line = f"simulating: {100 * done / of:.0f}%, {int(done)} of {of} runs{left}"
        print(f"\r\x1b[K{line}" if redraws else line, end="" if redraws else "\n", file=sys.stderr, flush=True)

    return show


def _seconds(option: str, text: str) -> float:
    try:
        return duration_s(text) if text else 0.0
    except ValueError as error:
        raise UsageError(f"{option}: {error}", hint="such as 48h, 2h30m, 3d") from None


def _some(option: str, text: str, hint: str = "leave it out, or give more than nothing: 48h, 2h30m, 3d") -> float:
    """Return the seconds; 0 only if the option was left out."""
    seconds = _seconds(option, text)
    if text and not seconds:
        raise UsageError(f"{option}: {text}", hint=hint)
    return seconds


def _micros(option: str, text: str) -> int:
    try:
        micros = round(float(text.removeprefix("$")) * 1e6) if text else 0
    except (ValueError, OverflowError):
        micros = -1
    if not 0 <= micros <= 10**10 or (text and not micros):
        raise UsageError(f"{option}: {text!r} is no price", hint="dollars per hour and host, such as 0.97")
    return micros


# ---- as text


def text(report: SimulationReport) -> str:
    ours = report.ours
    asked = f"{span(report.work_s)} of work" if report.work_s else "as much work as there is time for"
    within = f" within {span(report.deadline_s)}" if report.deadline_s else ""
    many = f"{_count(len(ours.windows), 'window')} of {span(report.window_s)}"
    how = "pools of one fleet" if report.together else "each a market of its own"
    named = f"{len(report.pools)} records, {how}" if len(report.pools) > 1 else report.pools[0].name
    hosts = _count(report.hosts, "host")
    lines = [f"fleet {report.fleet}: {hosts}, {asked}{within}; {many} in {named}", "", _costs(report), "",
             f"what the money of a window went for, dollars (mean of {len(ours.windows)}):", _parts(report.outcomes),
             "", _story(report.stories[0])]
    lines += ["", *(f"note: {note}" for note in _pool_notes(report)), *(f"note: {note}" for note in report.notes)]
    return "\n".join(lines)


def _costs(report: SimulationReport) -> str:
    of = "% of on demand"
    head = ["strategy", of, "mean $", "least $", "most $", "misses", "goodput", "spot h", "on-demand h", "lost hosts"]
    rows = []
    for o in report.outcomes:
        n = max(1, len(o.windows))
        rows.append([o.strategy, f"{o.percent:.1f}", _usd(o.mean_micros), _usd(o.least_micros), _usd(o.most_micros),
                     o.misses if report.work_s else "-", f"{o.goodput:.3f}",
                     f"{sum(w.spot_s for w in o.windows) / n / 3600:.1f}",
                     f"{sum(w.on_demand_s for w in o.windows) / n / 3600:.1f}",
                     f"{sum(w.losses for w in o.windows) / n:.1f}"])
    return table(head, rows, right=head[1:],
                 drop=["lost hosts", "goodput", "least $", "most $", "on-demand h", "spot h", of])


def _parts(outcomes: tuple[StrategyOutcome, ...]) -> str:
    head = ["strategy", *PARTS]
    return table(head, [[o.strategy, *(_usd(m) for _, m in o.parts)] for o in outcomes], right=head[1:])


def _story(story: Story) -> str:
    w = story.window
    came = f"done after {span(w.finished_s)}" if w.finished_s is not None else f"{span(w.lasted_s)} long"
    title = (f"one window of {story.strategy}, from {span(w.start_s)} on: {dollars(w.micros, 2)}, {came}, "
             f"{_count(w.launches, 'host')} launched, {w.losses} lost, "
             f"{_count(w.refusals, 'launch', 'launches')} refused")
    shown = story.decisions[:SHOWN]
    rows = [[span(d.at_s), d.spot, d.on_demand, d.why] for d in shown]
    if not rows:
        return f"{title}\nnothing was to be decided: hosts are of the market that the fleet file names"
    more = len(story.decisions) - len(shown)
    tail = f"\n... and {more} more {'decision' if more == 1 else 'decisions'} (-o json has all)" if more else ""
    decided = table(["after", "spot", "on demand", "why"], rows, right=["after", "spot", "on demand"], words="why")
    return f"{title}\n{decided}{tail}"


def _pool_notes(report: SimulationReport) -> list[str]:
    notes = dict.fromkeys(
        f"{p.instance_type or 'a host'} costs {dollars(p.spot_micros_h)}/h on spot (mean) and "
        f"{dollars(p.on_demand_micros_h)}/h on demand, by {p.priced_by}" for p in report.pools)
    boots = f"hosts boot for {span(report.boot_s)}" + (f" ({report.boot_from})" if report.boot_from else "")
    times = f"{boots} and are warned {span(report.notice_s)} before they are taken; "
    pauses = ", ".join(f"{seconds:g} s when {name.partition(' when ')[2]}" for name, seconds, _ in report.measured[:3])
    return [*list(notes)[:6], f"{times}all pause {pauses} ({report.measured[0][2].partition(':')[0]})"]


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _usd(micros: int) -> str:
    return f"{micros / 1e6:,.2f}"
