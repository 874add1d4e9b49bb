"""Tables B1, UP, B3 and sensitivity of policy.py. Each function returns a `policy.Table`'s fields except its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from statistics import fmean
from typing import Any

import policy_foresight as foresight
from policy_worlds import HOUR_S, Outcome, Task, alone, forget, pieces, together

from spotfleet.fleet.domain.availability import observe
from spotfleet.fleet.policy import deadline
from spotfleet.fleet.policy.values import DecisionInput, MarketTarget
from spotfleet.simulate.constants import BOOT_S, LOSS
from spotfleet.simulate.strategies import baselines
from spotfleet.simulate.strategies.strategy import Choose
from spotfleet.simulate.values.trace import Trace

Each = Callable[[Callable[..., Any], Sequence[tuple], str], list[Any]]
OURS = "spotfleet"
WORK_S = 48 * HOUR_S
CELLS = tuple((r, d) for d in (0.05, 0.2) for r in (52, 60, 70))
LONGEST_H = max(r for r, _ in CELLS)  # a record is used in every column or in none
FORESIGHT, BOUND = "with foresight, exact", "lower bound: one change to on demand is enough"

ALONE: dict[str, Callable[[Task], Choose]] = {
    OURS: lambda task: deadline.choose,
    "on demand": lambda task: baselines.on_demand,
    "greedy": lambda task: baselines.greedy,
    "Uniform Progress": lambda task: baselines.uniform_progress(task.work_s, task.deadline_s),
    "Uniform Progress, waits when ahead":
        lambda task: baselines.uniform_progress(task.work_s, task.deadline_s, idle=True),
}


def elastic_hybrid(task: Task) -> Choose:
    """Return a strategy for N hosts: all available spot hosts, and the rest on demand while progress is behind.

    Behind means below e(t), see `baselines.uniform_progress`, until it is ahead by two changeovers. It uses on demand
    alone once the slack is down to two changes.
    """
    pace = task.work_s / task.deadline_s

    def choose(moment: DecisionInput) -> MarketTarget:
        hosts, change_s = moment.hosts, baselines.change_s(moment)
        slack_s = moment.left_s - moment.work_s / hosts - 2 * change_s - moment.tick_s
        if slack_s < 0:
            return MarketTarget(0 if moment.on_demand_ready >= hosts else moment.spot, hosts, "no slack left",
                                "safety-net")
        ahead_s = task.work_s - moment.work_s / hosts - moment.now * pace
        if ahead_s < 0 or (moment.on_demand and ahead_s < 2 * change_s * pace):
            again_s = min(slack_s, max(0.0, 2 * change_s * pace - ahead_s) / (1 - pace + 1e-9))
            return MarketTarget(hosts, hosts - moment.spot_ready, "behind", "hybrid",
                                again_s=max(moment.tick_s, again_s))
        again_s = max(moment.tick_s, min(slack_s, ahead_s / pace))
        return MarketTarget(hosts, 0, "ahead, so wait for spot", "hybrid", again_s=again_s)

    return choose


TOGETHER: dict[str, Callable[[Task], Choose]] = {
    OURS: lambda task: deadline.choose,
    "elastic hybrid": elastic_hybrid,
}


def _kept(trace: Trace) -> bool:
    """Return whether it records hosts that were held until taken: a log of many pools, or a file named preemption."""
    parts = trace.name.lower().replace("\\", "/").split("/")
    return ": " in trace.name or any(part.startswith("preemption") for part in parts)


def _one_host(traces: Sequence[Trace]) -> tuple[list[Trace], dict[str, str]]:
    used, skipped = [], {}
    for trace in traces:
        why = ("of prices alone" if not trace.capacity else "never available" if not trace.most else
               "of more than one host" if trace.most > 1 else
               "windows cut from a record, in an archive" if ".gz: " in trace.name else
               f"shorter than {LONGEST_H} h" if trace.length_s < LONGEST_H * HOUR_S else "")
        if why:
            skipped[trace.name] = why
        else:
            used.append(trace)
    if any(_kept(t) for t in used) and not all(_kept(t) for t in used):
        skipped |= {t.name: "of hosts kept until taken; the others say what could be had" for t in used if _kept(t)}
        used = [t for t in used if not _kept(t)]
    return used, skipped


def alone_cell(name: str, trace: Trace, task: Task, every_s: float) -> tuple[list[float], int]:
    """Return the cost in % of each window of `trace`, and how many missed the deadline."""
    windows = list(pieces(trace, task.deadline_s, every_s))
    if name == FORESIGHT:
        return [foresight.alone(w, task).cost_percent(task) for w in windows], 0
    if name == BOUND:
        return [foresight.alone_bound_percent(w, task) for w in windows], 0
    choose = ALONE[name](task)
    outcomes = [alone(w, task, choose, observe if name == OURS else forget) for w in windows]
    return [o.cost_percent(task) for o in outcomes], sum(o.missed(task) for o in outcomes)


def one_host(traces: Sequence[Trace], every_s: float, each: Each) -> dict[str, Any]:
    used, skipped = _one_host(traces)
    names = [*ALONE, FORESIGHT, BOUND]
    tasks = [(name, trace, Task(WORK_S, r * HOUR_S, d * HOUR_S), every_s)
             for r, d in CELLS for name in names for trace in used]
    found = iter(each(alone_cell, tasks, "B1"))
    costs: dict[str, list[float | None]] = {name: [] for name in names}
    missed = dict.fromkeys(names, 0)
    windows = []
    for _ in CELLS if used else ():
        for name in names:
            cells = [next(found) for _ in used]
            pooled = [cost for cell, _ in cells for cost in cell]
            costs[name].append(fmean(pooled) if pooled else None)
            missed[name] += sum(n for _, n in cells)
        windows.append(len(pooled))
    head = ["cost %, mean of windows", *(f"R={r}, d={d}" for r, d in CELLS), "misses"]
    rows = [[name, *("-" if cost is None else f"{cost:.1f}" for cost in costs[name]), str(missed[name])]
            for name in names if used]
    note = f"Windows: {', '.join(map(str, windows))}. On demand pays for its one changeover as everybody does."
    return {"title": "Deadline, one host", "rows": [head, *rows], "used": [t.name for t in used], "skipped": skipped,
            "notes": [note], "figures": {"cells": [f"R={r} d={d}" for r, d in CELLS], "cost": costs, "missed": missed}}


# ---- the authors' own figures

PUBLISHED = {"greedy": (30.8, 17.2), "Uniform Progress": (25.1, 22.9), FORESIGHT: (20.7, 27.4)}
CHECKED = Task(WORK_S, 60 * HOUR_S, 0.2 * HOUR_S)


def hours_cell(name: str, trace: Trace) -> tuple[float, float]:
    """Return mean hours of work on demand and on spot, without changeovers; a window from each hour of 13 days."""
    short = replace(trace, length_s=min(trace.length_s, 13 * 24 * HOUR_S))
    windows = pieces(short, CHECKED.deadline_s, HOUR_S)
    if name == FORESIGHT:
        plans = [foresight.alone(w, CHECKED) for w in windows]
        return (fmean(p.on_demand_s - p.on_demand_changes * CHECKED.changeover_s for p in plans) / HOUR_S,
                fmean(p.spot_s - p.spot_changes * CHECKED.changeover_s for p in plans) / HOUR_S)
    outcomes = [alone(w, CHECKED, ALONE[name](CHECKED), observe if name == OURS else forget) for w in windows]
    return fmean(o.useful_on_demand_s for o in outcomes) / HOUR_S, fmean(o.useful_spot_s for o in outcomes) / HOUR_S


def published(traces: Sequence[Trace], every_s: float, each: Each) -> dict[str, Any]:
    """Return the eight records of October 2022: one host, 600 s apart, 649 h; other lengths are not the authors'."""
    used, skipped = _one_host(traces)
    for trace in list(used):
        if round(trace.length_s / 600) != 3895:
            skipped[trace.name] = "not the authors' campaign of October 2022 (3895 probes, 600 s apart)"
            used.remove(trace)
    names = [*PUBLISHED, OURS]
    found = iter(each(hours_cell, [(name, trace) for name in names for trace in used], "UP"))
    rows = [["hours of work", "on demand", "spot", "published: on demand", "spot"]]
    for name in names if used else ():
        cells = [next(found) for _ in used]
        theirs = [f"{h:.1f}" for h in PUBLISHED.get(name, ())] or ["-", "-"]
        rows.append([name, f"{fmean(c[0] for c in cells):.2f}", f"{fmean(c[1] for c in cells):.2f}", *theirs])
    note = "Published: Can't Be Late, NSDI 2024, table 3: C = 48 h, R = 60 h, d = 0.2 h, 300 windows at random of each."
    return {"title": "Uniform Progress check", "rows": rows, "used": [t.name for t in used], "skipped": skipped,
            "notes": [note]}


# ---- many hosts

DEADLINES_H = (53, 60, 70)
STALLS_S = (15.0, 180.0)
GANG, GANG_WAITS, FLUID = "gang, Uniform Progress", "gang, Uniform Progress, waits when ahead", "lower bound, fluid"


def together_cell(name: str, stall_s: float, trace: Trace, hours: float, every_s: float) -> tuple[float, int, int]:
    """Return mean cost in %, misses, windows."""
    task = Task(WORK_S, hours * HOUR_S, BOOT_S, stall_s, trace.most)
    windows = list(pieces(trace, task.deadline_s, every_s))
    if name == FLUID:
        full = task.hosts * task.work_s * task.on_demand_micros_h / HOUR_S
        return fmean(100 * foresight.fluid_micros(w, task) / full for w in windows), 0, len(windows)
    if name in (GANG, GANG_WAITS):  # one host for its strategy
        task = replace(task, hosts=1, stall_s=0.0)
        choose = baselines.uniform_progress(task.work_s, task.deadline_s, idle=name == GANG_WAITS)
        outcomes = [alone(w.lowest(trace.most), task, choose) for w in windows]
    else:
        choose = TOGETHER[name](task)
        outcomes = [together(w, task, choose, observe if name == OURS else forget) for w in windows]
    return fmean(o.cost_percent(task) for o in outcomes), sum(o.missed(task) for o in outcomes), len(windows)


def many_hosts(traces: Sequence[Trace], every_s: float, each: Each) -> dict[str, Any]:
    used, skipped = [], {}
    for trace in traces:
        why = ("of prices alone" if not trace.capacity else "of one host" if trace.most <= 1 else
               "not of 4 or 16 hosts" if trace.most not in (4, 16) else
               f"shorter than {DEADLINES_H[-1]} h" if trace.length_s < DEADLINES_H[-1] * HOUR_S else "")
        if why:
            skipped[trace.name] = why
        else:
            used.append(trace)
    columns = [(OURS, LOSS.seconds), *((name, stall) for name in TOGETHER for stall in STALLS_S),
               (GANG, 0.0), (GANG_WAITS, 0.0), (FLUID, 0.0)]
    cells = [(name, stall, trace, hours, every_s) for trace in used for name, stall in columns for hours in DEADLINES_H]
    found = iter(each(together_cell, cells, "B3"))
    head = ["cost % at R = " + " / ".join(map(str, DEADLINES_H)), "N", "windows",
            *(f"{name}, r={stall:g} s" if stall else name for name, stall in columns), "misses"]
    rows, figures = [head], {}
    for trace in used:
        results = [[next(found) for _ in DEADLINES_H] for _ in columns]
        shown = [" / ".join(f"{cost:.1f}" for cost, _, _ in cell) for cell in results]
        rows.append([trace.name, str(trace.most), "/".join(str(n) for _, _, n in results[0]), *shown,
                     str(sum(n for cell in results for _, n, _ in cell))])
        figures[trace.name] = {f"{name}, r={stall:g} s" if stall else name: [cost for cost, _, _ in cell]
                               for (name, stall), cell in zip(columns, results, strict=True)}
    return {"title": "Deadline, N hosts, spot and on demand mixed", "rows": rows, "used": [t.name for t in used],
            "skipped": skipped, "notes": [f"r={LOSS.seconds:g} s is this release's own pause ({LOSS.source})."],
            "figures": {"deadlines_h": DEADLINES_H, "cost": figures}}


# ---- the cost of other constants

FACTORS = (0.0, 0.5, 2.0)
TRIED = ((60, 0.05), (60, 0.2))


def tuned_cell(name: str, value: float, trace: Trace, hours: float, change_h: float,
               every_s: float) -> tuple[list[float], int]:
    tuning = replace(deadline.TUNED, **{name: value}) if name else deadline.TUNED
    task = Task(WORK_S, hours * HOUR_S, change_h * HOUR_S)
    found: list[Outcome] = [alone(w, task, lambda m: deadline.choose(m, tuning), observe)
                            for w in pieces(trace, task.deadline_s, every_s)]
    return [o.cost_percent(task) for o in found], sum(o.missed(task) for o in found)


def sensitivity(traces: Sequence[Trace], every_s: float, each: Each) -> dict[str, Any]:
    """Return B1 at R = 60, with each constant of the policy at zero, half and twice its value."""
    used, skipped = _one_host(traces)
    names = [("", 0.0)] + [(f.name, factor * getattr(deadline.TUNED, f.name)) for f in fields(deadline.DeadlineTuning)
                           for factor in FACTORS]
    cells = [(*name, trace, *cell, every_s) for name in names for cell in TRIED for trace in used]
    found = iter(each(tuned_cell, cells, "sensitivity"))
    rows = [["constant", *(f"cost %, R={r}, d={d}" for r, d in TRIED), "misses"]]
    for name, value in names if used else ():
        results = [[next(found) for _ in used] for _ in TRIED]
        rows.append([f"{name} = {value:g}" if name else f"as it is: {deadline.TUNED}",
                     *(f"{fmean(cost for costs, _ in cell for cost in costs):.2f}" for cell in results),
                     str(sum(n for cell in results for _, n in cell))])
    return {"title": "of our policy's constants", "rows": rows, "used": [t.name for t in used], "skipped": skipped,
            "notes": [f"Windows every {every_s / HOUR_S:g} h."]}
