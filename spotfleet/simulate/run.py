"""`simulate(...)`: our policy and others over every window of some records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from spotfleet.errors import UsageError
from spotfleet.fleet import cost
from spotfleet.fleet.cost_groups import breakdown
from spotfleet.fleet.events import LaunchRefused
from spotfleet.fleet.policy import deadline
from spotfleet.fleet.policy.values import Moment
from spotfleet.model import Market, Offer
from spotfleet.simulate import measured
from spotfleet.simulate.cloud import Cloud, SpotPool, on_demand_like
from spotfleet.simulate.deciding import decider, strategies
from spotfleet.simulate.result import PARTS, Outcome, Pool, SimulationReport, Story, Window
from spotfleet.simulate.spread import Watch, spread
from spotfleet.simulate.story import tell
from spotfleet.simulate.strategy import Job, Strategy
from spotfleet.simulate.tariff import Tariff
from spotfleet.simulate.trace import Trace
from spotfleet.simulate.work import Pauses, Work
from spotfleet.simulate.world import Setting, World

EPOCH = 1_700_000_000.0  # of records that do not say when they began
EVERY_S = 4 * 3600.0
APART_S = 60.0  # two windows begin at least; the same one twice says nothing more
AT_ONCE = 8  # windows that one process does before it reports, at most
AT_ONCE_S = 40 * 86400.0  # and no more time of all pools together, for that of a day takes milliseconds


@dataclass(frozen=True)
class Record:
    """A trace with what its hosts cost."""

    trace: Trace
    tariff: Tariff
    path: str = ""


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    setting: Setting
    work_s: float = math.inf  # at all hosts
    deadline_s: float = math.inf
    window_s: float = 0.0  # where there is neither; 0: a whole record
    every_s: float = EVERY_S
    windows: int = 0  # so many, evenly spread, instead of one every `every_s`
    notice_s: float = measured.NOTICE_S
    each: bool = False  # every record is a market of its own; else all are pools of one fleet

    @property
    def job(self) -> Job:
        return Job(self.setting.hosts, self.work_s, self.deadline_s)

    def length_s(self, shortest_s: float) -> float:
        if not math.isinf(self.deadline_s):
            return self.deadline_s
        return self.window_s or shortest_s


@dataclass(frozen=True)
class Scene:
    """One window: records, and where in each it begins."""

    records: tuple[Record, ...]
    starts_s: tuple[float, ...]
    length_s: float
    name: str = ""


def check(plan: Plan, records: Sequence[Record]) -> None:
    """Raises UsageError for a plan that cannot be simulated on `records`."""
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
    moment = Moment(0.0, plan.setting.hosts, left_s=plan.deadline_s, work_s=plan.work_s * plan.setting.hosts,
                    boot_s=plan.setting.boot_s, stall_s=measured.JOIN.seconds)
    if why := deadline.impossible(moment):
        raise UsageError(f"the deadline cannot be met: {why}", hint="a later --deadline, less --work, or more hosts")


def scenes(plan: Plan, records: Sequence[Record]) -> list[Scene]:
    """The windows, in the order of time. Raises UsageError if no record is as long as one."""
    groups = [(r,) for r in records] if plan.each else [tuple(records)]
    found: list[Scene] = []
    for group in groups:
        begun, shortest_s = _aligned(group)
        length_s = plan.length_s(shortest_s)
        for start_s in _starts(plan, shortest_s, length_s):
            name = group[0].trace.name if len(group) == 1 else ""
            found.append(Scene(group, tuple(b + start_s for b in begun), length_s, name))
    if not found:
        longest = max(records, key=lambda r: r.trace.length_s)
        raise UsageError(
            f"{longest.path or longest.trace.name}: {_hours(longest.trace.length_s)} long, shorter than a window of "
            f"{_hours(plan.length_s(0.0))}", hint="give longer traces, or a shorter --deadline")
    return found


def _aligned(group: Sequence[Record]) -> tuple[list[float], float]:
    """Where in each record the first window begins, and how long all of them last from there: by the calendar where
    all say when they began and overlap, else each from its beginning."""
    traces = [r.trace for r in group]
    if all(t.began_at for t in traces):
        first, last = max(t.began_at for t in traces), min(t.began_at + t.length_s for t in traces)
        if last > first:
            return [first - t.began_at for t in traces], last - first
    return [0.0] * len(traces), min(t.length_s for t in traces)


def _starts(plan: Plan, whole_s: float, length_s: float) -> Iterator[float]:
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


def world(plan: Plan, strategy: Strategy, scene: Scene) -> World:
    """Ready to run."""
    first = scene.records[0].trace
    began_at = (first.began_at or EPOCH) + scene.starts_s[0]
    pools, full = [], {}
    for record, start_s in zip(scene.records, scene.starts_s, strict=True):
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
    cloud = Cloud(pools, list(full.values()), began_at, plan.notice_s)
    return World(plan.setting, cloud, work, decider(strategy, plan.job), cloud.now + scene.length_s,
                 cloud.now + plan.deadline_s, sees_room=not strategy.ours)


def _distinct(offer: Offer, others: Sequence[SpotPool]) -> Offer:
    """Two records of one zone and type are two pools."""
    taken = {p.offer.pool for p in others}
    number = 2
    zone = offer.zone
    while offer.pool in taken:
        offer = replace(offer, zone=f"{zone}#{number}")
        number += 1
    return offer


def judged(plan: Plan, scene: Scene, done: World) -> Window:
    """What came of it."""
    report = cost.report(done.ledger.rows, done.now)
    parts = dict(breakdown(report).parts())
    paid = {market.value: sum(line.seconds for line in report.lines if line.market == market.value)
            for market in Market}
    spot = sum(line.micros for line in report.lines if line.market == Market.SPOT.value)
    finished_s = None if done.finished_at is None else done.finished_at - done.began_at
    machines = done.cloud.machines.values()
    return Window(
        scene.name, scene.starts_s[0], report.micros, spot, report.micros - spot,
        finished_s is not None or math.isinf(plan.work_s), finished_s, done.now - done.began_at, done.work.useful_s,
        float(sum(paid.values())), float(paid[Market.SPOT.value]), float(paid[Market.ON_DEMAND.value]),
        sum(m.taken_at is not None for m in machines), len(machines),
        sum(isinstance(r, LaunchRefused) for r in done.ledger.rows),
        tuple((name, parts[name]) for name in PARTS))


@dataclass(frozen=True)
class Run:
    """One strategy, by its name since functions do not travel to another process, on one window."""

    strategy: str
    scene: Scene
    told: bool = False  # in detail


def one(plan: Plan, run: Run, watch: Watch = lambda share: None) -> tuple[Window, Story | None]:
    done = world(plan, next(s for s in strategies() if s.name == run.strategy), run.scene)
    done.watch = watch
    done.run()
    window = judged(plan, run.scene, done)
    return window, tell(run.strategy, done, window) if run.told else None


def simulate(fleet: str, plan: Plan, records: Sequence[Record], notes: Sequence[str] = (),
             progress: Callable[[float, int], None] = lambda done, of: None, processes: int = 0) -> SimulationReport:
    """`progress` is told how many of how many runs are done, parts of runs included; `processes` 0: one for each core.

    Raises UsageError for an impossible deadline, and for records shorter than a window.
    """
    check(plan, records)
    places = scenes(plan, records)
    kinds = strategies()
    if math.isinf(plan.deadline_s):  # without an end there is no slack to speak of
        kinds = tuple(k for k in kinds if k.timeless)
    single = len(places) == 1
    runs = [Run(kind.name, scene, told=single) for kind in kinds for scene in places]
    of = len(runs) if single else len(runs) + len(kinds)
    progress(0.0, of)
    found = _all(plan, runs, lambda done: progress(done, of), processes)
    windows = [window for window, _ in found]
    full = _full_micros(plan, records)
    outcomes = tuple(_outcome(plan, kind, windows[i * len(places):(i + 1) * len(places)], records)
                     for i, kind in enumerate(kinds))
    if not single:
        typical = min(range(len(places)), key=lambda i: abs(outcomes[0].windows[i].micros - outcomes[0].mean_micros))
        again = [Run(kind.name, places[typical], told=True) for kind in kinds]
        found = _all(plan, again, lambda done: progress(len(runs) + done, of), processes)
    progress(float(of), of)
    return SimulationReport(
        fleet, tuple(_pool(r) for r in records), not plan.each, plan.setting.hosts, _finite(plan.work_s),
        _finite(plan.deadline_s), places[0].length_s, plan.every_s, plan.setting.boot_s, plan.notice_s, full, outcomes,
        tuple(story for _, story in found if story is not None),
        tuple((f.name, f.seconds, f.source) for f in measured.ALL), tuple(notes))


def _all(plan: Plan, runs: Sequence[Run], progress: Callable[[float], None],
         processes: int) -> list[tuple[Window, Story | None]]:
    longest_s = max(run.scene.length_s * len(run.scene.records) for run in runs)
    at_once = max(1, min(AT_ONCE, math.floor(AT_ONCE_S / max(1.0, longest_s))))
    return spread(partial(one, plan), runs, progress, at_once, processes)


def _full_micros(plan: Plan, records: Sequence[Record]) -> int:
    """The work on demand where that is cheapest, without any waste."""
    if math.isinf(plan.work_s):
        return 0
    return round(plan.work_s * plan.setting.hosts * min(r.tariff.on_demand_micros_h for r in records) / 3600)


def _outcome(plan: Plan, strategy: Strategy, windows: Sequence[Window], records: Sequence[Record]) -> Outcome:
    cheapest = min(r.tariff.on_demand_micros_h for r in records)
    full = [_full_micros(plan, records) or w.useful_s * cheapest / 3600 for w in windows]
    shares = [w.micros / f for w, f in zip(windows, full, strict=True) if f]
    used = [w.useful_s / (plan.setting.hosts * w.lasted_s) for w in windows if w.lasted_s]
    return Outcome(strategy.name, strategy.ours, tuple(windows), 100 * sum(shares) / max(1, len(shares)),
                   sum(used) / max(1, len(used)))


def _pool(record: Record) -> Pool:
    trace, tariff = record.trace, record.tariff
    ends = [*(at for at, _ in trace.capacity[1:]), trace.length_s]
    free = sum(end - at for (at, n), end in zip(trace.capacity, ends, strict=False) if n)
    ends = [*(at for at, _ in tariff.spot[1:]), max(trace.length_s, tariff.spot[-1][0])]
    mean = sum(micros * (end - at) for (at, micros), end in zip(tariff.spot, ends, strict=True))
    known = bool(trace.capacity)
    return Pool(trace.name, record.path, trace.provider, trace.zone, tariff.instance_type, trace.length_s,
                trace.most if known else None, free / trace.length_s if known else None,
                round(mean / (ends[-1] - tariff.spot[0][0])) if ends[-1] > tariff.spot[0][0] else tariff.spot[0][1],
                tariff.on_demand_micros_h, tariff.by)


def _finite(seconds: float) -> float | None:
    return None if math.isinf(seconds) else seconds


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 3600:.0f} h"
