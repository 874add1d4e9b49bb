"""Simulation of every strategy on every window (a period of the records that could hold one job)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from spotfleet.errors import UsageError
from spotfleet.fleet.cost import meter
from spotfleet.fleet.cost.groups import breakdown
from spotfleet.fleet.domain.events import LaunchRefused
from spotfleet.fleet.policy import deadline
from spotfleet.fleet.policy.values import DecisionInput
from spotfleet.model import BillingRules, Market, Offer
from spotfleet.simulate import constants
from spotfleet.simulate.narrative import story_of
from spotfleet.simulate.parallel import Watch, run_all
from spotfleet.simulate.strategies.strategy import Strategy, WindowJob
from spotfleet.simulate.tariff import Tariff
from spotfleet.simulate.values.result import PARTS, PoolResult, SimulationReport, Story, StrategyOutcome, Window
from spotfleet.simulate.values.trace import Trace
from spotfleet.simulate.world.cloud import SimulatedCloud, SpotPool, on_demand_like
from spotfleet.simulate.world.deciders import decider, strategies
from spotfleet.simulate.world.work import Pauses, Work
from spotfleet.simulate.world.world import Setting, SimulatedWorld

EPOCH = 1_700_000_000.0  # begin of records that do not state theirs
EVERY_S = 4 * 3600.0
APART_S = 60.0  # minimum distance between the starts of two windows; the same window twice adds no information
CHUNK_WINDOWS = 8  # most windows that a process gets at a time
# Most record time, over all pools, that a process gets at a time: simulating a day of it takes milliseconds.
CHUNK_S = 40 * 86400.0


@dataclass(frozen=True)
class PricedTrace:
    """Trace with the prices of its hosts."""

    trace: Trace
    tariff: Tariff
    path: str = ""


@dataclass(frozen=True)
class SimulationPlan:
    """Plan of a simulation."""

    setting: Setting
    work_s: float = math.inf  # at all hosts
    deadline_s: float = math.inf
    window_s: float = 0.0  # used without a deadline; 0: a whole record
    every_s: float = EVERY_S
    windows: int = 0  # number of evenly spread windows, instead of one every `every_s`
    notice_s: float = constants.NOTICE_S
    each: bool = False  # every record is a market of its own; else all are pools of one fleet
    billing: BillingRules = field(default_factory=BillingRules)
    boots: int = 0  # the measured ones whose median the setting's `boot_s` is; 0: it was given or is assumed
    boot_from: str = ""  # its source, for people

    @property
    def job(self) -> WindowJob:
        return WindowJob(self.setting.hosts, self.work_s, self.deadline_s)

    def length_s(self, shortest_s: float) -> float:
        if not math.isinf(self.deadline_s):
            return self.deadline_s
        return self.window_s or shortest_s


@dataclass(frozen=True)
class RunInput:
    """Records and the start of one window in each."""

    records: tuple[PricedTrace, ...]
    starts_s: tuple[float, ...]
    length_s: float
    name: str = ""


def check(plan: SimulationPlan, records: Sequence[PricedTrace]) -> None:
    """Raise UsageError for a plan that cannot be simulated on `records`."""
    if not records:
        raise UsageError("there is no trace to simulate", hint="give one or more with --trace FILE")
    if plan.setting.hosts < 1:
        raise UsageError("nodes: a simulation needs at least one host", hint="set nodes.target")
    if plan.job.work_s <= 0:
        raise UsageError("--work: there is no work to do", hint="such as --work 48h")
    if math.isinf(plan.deadline_s):
        return
    if math.isinf(plan.work_s):
        raise UsageError("a deadline needs to know the work", hint="give --work, or `work` in the fleet file")
    moment = DecisionInput(0.0, plan.setting.hosts, left_s=plan.deadline_s, work_s=plan.work_s * plan.setting.hosts,
                           boot_s=plan.setting.boot_s, stall_s=constants.JOIN.seconds, boots=plan.boots)
    if why := deadline.impossible(moment):
        raise UsageError(f"the deadline cannot be met: {why}", hint="a later --deadline, less --work, or more hosts")


def run_inputs(plan: SimulationPlan, records: Sequence[PricedTrace]) -> list[RunInput]:
    """Return the windows, ordered by time. Raises UsageError if none fits: into any record alone for `each`, else into
    the time that all records have in common."""
    groups = [(r,) for r in records] if plan.each else [tuple(records)]
    found: list[RunInput] = []
    for group in groups:
        begun, shortest_s = _aligned(group)
        length_s = plan.length_s(shortest_s)
        for start_s in _starts(plan, shortest_s, length_s):
            name = group[0].trace.name if len(group) == 1 else ""
            found.append(RunInput(group, tuple(b + start_s for b in begun), length_s, name))
    if not found:
        raise UsageError(f"{_common_length(max(groups, key=lambda g: _aligned(g)[1]))}, shorter than a window of "
                         f"{_hours(plan.length_s(0.0))}", hint="give longer traces, or a shorter --deadline")
    return found


def _aligned(group: Sequence[PricedTrace]) -> tuple[list[float], float]:
    """Return the start of the first window in each record, and the common length from there. The records are aligned by
    the calendar if all of them state their start and overlap, else by their beginnings."""
    traces = [r.trace for r in group]
    if all(t.began_at for t in traces):
        first, last = max(t.began_at for t in traces), min(t.began_at + t.length_s for t in traces)
        if last > first:
            return [first - t.began_at for t in traces], last - first
    return [0.0] * len(traces), min(t.length_s for t in traces)


def _common_length(group: Sequence[PricedTrace]) -> str:
    """Return the text of what limits the common length: the overlap, or the shortest record."""
    shortest, common_s = min(group, key=lambda r: r.trace.length_s), _aligned(group)[1]
    if common_s < shortest.trace.length_s - 1e-6:
        return f"the {len(group)} records overlap for {_hours(common_s)}"
    return f"{shortest.path or shortest.trace.name}: {_hours(shortest.trace.length_s)} long"


def _starts(plan: SimulationPlan, whole_s: float, length_s: float) -> Iterator[float]:
    room_s = whole_s - length_s
    if room_s < -1e-6:
        return
    if plan.windows:
        count = min(plan.windows, math.floor((room_s + 1e-6) / APART_S) + 1)
        for k in range(count):
            yield room_s * k / max(1, count - 1)
        return
    for k in range(math.floor((room_s + 1e-6) / plan.every_s) + 1):
        yield k * plan.every_s


def world(plan: SimulationPlan, strategy: Strategy, run_input: RunInput) -> SimulatedWorld:
    """Return a world that is ready to run."""
    first = run_input.records[0].trace
    began_at = (first.began_at or EPOCH) + run_input.starts_s[0]
    pools, full = [], {}
    for record, start_s in zip(run_input.records, run_input.starts_s, strict=True):
        trace, tariff = record.trace, record.tariff
        name = trace.zone or trace.name
        offer = Offer(trace.provider or "cloud", trace.region or name, name, tariff.instance_type or "host",
                      Market.SPOT, 1, 0, tariff.on_demand_micros_h, trace.accelerator)
        capacity = trace.capacity or ((0.0, 10**6),)
        pools.append(SpotPool(_distinct(offer, pools), tuple((began_at + at - start_s, n) for at, n in capacity),
                              tuple((began_at + at - start_s, micros) for at, micros in tariff.spot)))
        full.setdefault(offer.region, on_demand_like(pools[-1].offer))
    hosts = plan.setting.hosts
    pauses = Pauses() if strategy.restart_s is None else Pauses.restarts(strategy.restart_s)
    work = Work(hosts, plan.work_s * hosts, began_at, pauses, strategy.gang, strategy.checkpoint_s)
    cloud = SimulatedCloud(pools, list(full.values()), began_at, plan.notice_s, plan.billing)
    return SimulatedWorld(plan.setting, cloud, work, decider(strategy, plan.job), cloud.now + run_input.length_s,
                          cloud.now + plan.deadline_s, sees_room=not strategy.ours)


def _distinct(offer: Offer, others: Sequence[SpotPool]) -> Offer:
    """Return a renamed offer if needed: two records of one zone and type are two pools."""
    taken = {p.offer.pool for p in others}
    number = 2
    zone = offer.zone
    while offer.pool in taken:
        offer = replace(offer, zone=f"{zone}#{number}")
        number += 1
    return offer


def judged(plan: SimulationPlan, run_input: RunInput, done: SimulatedWorld) -> Window:
    """Return the result of a finished world."""
    report = meter.report(done.ledger.rows, done.now)
    parts = dict(breakdown(report).parts())
    paid = {market.value: sum(line.seconds for line in report.lines if line.market == market.value)
            for market in Market}
    spot = sum(line.micros for line in report.lines if line.market == Market.SPOT.value)
    finished_s = None if done.finished_at is None else done.finished_at - done.began_at
    machines = done.cloud.machines.values()
    return Window(
        run_input.name, run_input.starts_s[0], report.micros, spot, report.micros - spot,
        finished_s is not None or math.isinf(plan.work_s), finished_s, done.now - done.began_at, done.work.useful_s,
        float(sum(paid.values())), float(paid[Market.SPOT.value]), float(paid[Market.ON_DEMAND.value]),
        sum(m.taken_at is not None for m in machines), len(machines),
        sum(isinstance(r, LaunchRefused) for r in done.ledger.rows),
        tuple((name, parts[name]) for name in PARTS))


@dataclass(frozen=True)
class WindowRun:
    """Run of one strategy, given by its name because functions cannot be sent to another process, on one window."""

    strategy: str
    run_input: RunInput
    detailed: bool = False  # also return its Story


def one(plan: SimulationPlan, run: WindowRun, watch: Watch = lambda share: None) -> tuple[Window, Story | None]:
    done = world(plan, next(s for s in strategies() if s.name == run.strategy), run.run_input)
    done.watch = watch
    done.run()
    window = judged(plan, run.run_input, done)
    return window, story_of(run.strategy, done, window) if run.detailed else None


def simulate(fleet: str, plan: SimulationPlan, records: Sequence[PricedTrace], notes: Sequence[str] = (),
             progress: Callable[[float, int], None] = lambda done, of: None, processes: int = 0) -> SimulationReport:
    """Simulate all strategies on all windows.

    `progress` gets the number of finished runs, parts of runs included, and their total; `processes` 0: one for each
    core. Raises UsageError for a plan that `check` or `run_inputs` refuses.
    """
    check(plan, records)
    inputs = run_inputs(plan, records)
    kinds = strategies()
    if math.isinf(plan.deadline_s):  # without a deadline there is no slack
        kinds = tuple(k for k in kinds if k.timeless)
    single = len(inputs) == 1
    runs = [WindowRun(kind.name, run_input, detailed=single) for kind in kinds for run_input in inputs]
    of = len(runs) if single else len(runs) + len(kinds)
    progress(0.0, of)
    found = _all(plan, runs, lambda done: progress(done, of), processes)
    windows = [window for window, _ in found]
    full = _full_micros(plan, records)
    outcomes = tuple(_outcome(plan, kind, windows[i * len(inputs):(i + 1) * len(inputs)], records)
                     for i, kind in enumerate(kinds))
    if not single:
        typical = min(range(len(inputs)), key=lambda i: abs(outcomes[0].windows[i].micros - outcomes[0].mean_micros))
        again = [WindowRun(kind.name, inputs[typical], detailed=True) for kind in kinds]
        found = _all(plan, again, lambda done: progress(len(runs) + done, of), processes)
    progress(float(of), of)
    return SimulationReport(
        fleet, tuple(_pool(r) for r in records), not plan.each, plan.setting.hosts, _finite(plan.work_s),
        _finite(plan.deadline_s), inputs[0].length_s, plan.every_s, plan.setting.boot_s, plan.notice_s, full, outcomes,
        tuple(story for _, story in found if story is not None),
        tuple((f.name, f.seconds, f.source) for f in constants.ALL), tuple(notes), plan.boot_from)


def _all(plan: SimulationPlan, runs: Sequence[WindowRun], progress: Callable[[float], None],
         processes: int) -> list[tuple[Window, Story | None]]:
    longest_s = max(run.run_input.length_s * len(run.run_input.records) for run in runs)
    chunk_size = max(1, min(CHUNK_WINDOWS, math.floor(CHUNK_S / max(1.0, longest_s))))
    return run_all(partial(one, plan), runs, progress, chunk_size, processes)


def _full_micros(plan: SimulationPlan, records: Sequence[PricedTrace]) -> int:
    """Return the cost of the work on demand where that is cheapest, without any waste."""
    if math.isinf(plan.work_s):
        return 0
    return round(plan.work_s * plan.setting.hosts * min(r.tariff.on_demand_micros_h for r in records) / 3600)


def _outcome(plan: SimulationPlan, strategy: Strategy, windows: Sequence[Window],
             records: Sequence[PricedTrace]) -> StrategyOutcome:
    cheapest = min(r.tariff.on_demand_micros_h for r in records)
    full = [_full_micros(plan, records) or w.useful_s * cheapest / 3600 for w in windows]
    shares = [w.micros / f for w, f in zip(windows, full, strict=True) if f]
    used = [w.useful_s / (plan.setting.hosts * w.lasted_s) for w in windows if w.lasted_s]
    return StrategyOutcome(strategy.name, strategy.ours, tuple(windows), 100 * sum(shares) / max(1, len(shares)),
                           sum(used) / max(1, len(used)))


def _pool(record: PricedTrace) -> PoolResult:
    trace, tariff = record.trace, record.tariff
    ends = [*(at for at, _ in trace.capacity[1:]), trace.length_s]
    free = sum(end - at for (at, n), end in zip(trace.capacity, ends, strict=False) if n)
    ends = [*(at for at, _ in tariff.spot[1:]), max(trace.length_s, tariff.spot[-1][0])]
    mean = sum(micros * (end - at) for (at, micros), end in zip(tariff.spot, ends, strict=True))
    known = bool(trace.capacity)
    return PoolResult(trace.name, record.path, trace.provider, trace.zone, tariff.instance_type, trace.length_s,
                      trace.most if known else None, free / trace.length_s if known else None,
                      round(mean / (ends[-1] - tariff.spot[0][0])) if ends[-1] > tariff.spot[0][0]
                      else tariff.spot[0][1],
                      tariff.on_demand_micros_h, tariff.by)


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 3600:.0f} h"
