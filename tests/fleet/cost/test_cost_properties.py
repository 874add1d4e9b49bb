"""What holds of every bill: windows, hosts and cuts add up to the micro-dollar, and nothing is ever negative."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.fleet.cost import meter as meter_module
from spotfleet.fleet.cost.boots import boots_by_pool
from spotfleet.fleet.cost.groups import DAY_S, WAYS, Breakdown, FleetLedgers, breakdown, costs, day, grouped
from spotfleet.fleet.cost.meter import CostReport, Meter, report
from spotfleet.fleet.cost.series import combined, series
from spotfleet.fleet.domain.events import (
    Event,
    FleetCreated,
    GenerationFormed,
    HostJoined,
    HostListed,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    LaunchIntended,
    PriceChanged,
    RatesStamped,
)
from spotfleet.model import BillingRules, CloudState, JobState, Market, Nodes, Offer, Rates, Role, Run

ZONES = ("a", "b")
NOW = 1_000_000.0
RULES = (BillingRules(1), BillingRules(60), BillingRules(3600, 3600))
DUST = 20  # micro-dollars that the rounding of splits may move from one part to another in a window

instants = st.integers(0, int(NOW) * 8).map(lambda n: n / 8)
micros = st.integers(0, 5_000_000)


def offer(zone: str, market: Market, slots: int, price: int) -> Offer:
    return Offer("fake", "r", zone, "g5", market, slots, price, price * 3 + 1)


@st.composite
def machines(draw, name: str, role: Role) -> list[Event]:
    """One host: its runs one after the other, the last of them perhaps going on."""
    times = sorted(draw(st.lists(instants, min_size=1, max_size=6, unique=True)))
    runs = [Run(a, b, draw(st.booleans())) for a, b in zip(times[::2], times[1::2], strict=False)]
    if len(times) % 2:
        runs.append(Run(times[-1]))
    goes_on = runs[-1].ended_at is None
    sold = offer(draw(st.sampled_from(ZONES)), draw(st.sampled_from(list(Market))), draw(st.integers(1, 4)),
                 draw(micros))
    state = CloudState.RUNNING if goes_on else draw(st.sampled_from([CloudState.STOPPED, CloudState.TERMINATED]))
    end = runs[-1].ended_at if state is CloudState.TERMINATED else None
    joined = [HostJoined(r.started_at + draw(st.integers(0, 4000)), name, "a") for r in runs if draw(st.booleans())]
    return [LaunchIntended(times[0], name, role, sold, ""),
            HostListed(NOW, name, f"i-{name}", state, tuple(runs), disk_gib=draw(st.integers(0, 900)),
                       addresses=draw(st.integers(0, 2)), ended_at=end), *joined]


@st.composite
def trainings(draw, job: str, hosts: list[str]) -> list[Event]:
    """One job: generations over these hosts, progress, resumptions, perhaps an end."""
    times = sorted(draw(st.lists(instants, min_size=1, max_size=6, unique=True)))
    events: list[Event] = [JobSubmitted(times[0], job, "digits", "train", 1, 4)]
    version = 0
    for number, at in enumerate(times, 1):
        members = draw(st.lists(st.sampled_from(hosts), min_size=1, max_size=4)) if hosts else []
        version += draw(st.integers(0, 500))
        workers = tuple(f"{m}/{i}/a" for i, m in enumerate(members))
        events.append(GenerationFormed(at, job, number, workers, "start", "", version))
        version += draw(st.integers(0, 500))
        events.append(JobResumed(at + 1, job, number, version, draw(st.integers(0, 20)), draw(st.floats(0, 500)),
                                 first_steps=dict.fromkeys(members, 1.0) if draw(st.booleans()) else {}))
        events.append(JobProgress(at + 2, job, version, draw(st.floats(0, 10)), draw(st.integers(0, 10**9))))
    if draw(st.booleans()):
        events.append(JobChanged(times[-1] + 100, job, JobState.SUCCEEDED, "", version))
    return events


@st.composite
def histories(draw) -> list[Event]:
    events: list[Event] = [FleetCreated(0.0, "f", "fake", Nodes(), draw(st.sampled_from(RULES)))]
    names = [f"f-{i}" for i in range(draw(st.integers(0, 3)))]
    for name in names:
        events += draw(machines(name, Role.WORKER))
    if draw(st.booleans()):
        events += draw(machines("f-d-0", Role.DISPATCHER))
    for at, zone, market, price in draw(st.lists(st.tuples(instants, st.sampled_from(ZONES),
                                                           st.sampled_from(list(Market)), micros), max_size=6)):
        events.append(PriceChanged(at, offer(zone, market, 1, 0).pool, price, price * 3))
    for at, *rates in draw(st.lists(st.tuples(instants, micros, micros, micros), max_size=3)):
        events.append(RatesStamped(at, "fake", "r", Rates(*rates)))
    for number in range(draw(st.integers(0, 2))):
        events += draw(trainings(f"job-{number}", names))
    return events


def figures(found: CostReport) -> dict[str, int]:
    """Everything of a report that is a sum."""
    return {name: getattr(found, name) for name in (
        "micros", "on_demand_micros", "machine_micros", "dispatcher_micros", "idle_micros", "boot_micros",
        "repeated_micros", "pause_micros", "disk_micros", "address_micros", "traffic_micros", "useful_steps")}


def lines(found: CostReport) -> dict[tuple, int]:
    """Every line of a report, by what it is about."""
    rows = [(("run", x.host, x.started_at), x.micros) for x in found.lines]
    rows += [(("seconds", x.host, x.started_at), x.seconds) for x in found.lines]
    rows += [((x.kind, x.name, x.region, x.detail), x.micros) for x in found.extras]
    rows += [(("boot", x.host, x.running_at, name), getattr(x, name)) for x in found.boots
             for name in ("micros", "seconds")]
    rows += [(("job", x.job, name), getattr(x, name)) for x in found.jobs
             for name in ("micros", "on_demand_micros", "useful_steps", "repeated_micros", "pause_micros")]
    return dict(rows)


def summed(each: list[dict]) -> dict:
    return {key: sum(one.get(key, 0) for one in each) for one in each for key in one}


@settings(max_examples=60, deadline=None)
@given(histories(), st.lists(instants, max_size=4, unique=True))
def test_windows_that_follow_one_another_add_up_line_by_line(events, cuts):
    meter = Meter(events, NOW)
    edges = [None, *sorted(cuts), None]
    windows = [meter.report(a, b) for a, b in pairwise(edges)]
    assert summed([figures(w) for w in windows]) == figures(meter.report())
    whole = lines(meter.report())
    assert {k: v for k, v in summed([lines(w) for w in windows]).items() if v} == {k: v for k, v in whole.items() if v}


@settings(max_examples=60, deadline=None)
@given(histories(), instants, instants)
def test_nothing_is_negative_and_the_breakdown_adds_up_in_every_window(events, one, other):
    meter = Meter(events, NOW)
    for found in (meter.report(), meter.report(min(one, other), max(one, other))):
        named = [line for line in lines(found).values()]
        named += [value for key, value in figures(found).items() if key != "idle_micros"]
        assert min(named, default=0) >= 0
        assert found.idle_micros >= -DUST
        parts = breakdown(found)
        assert parts.total == found.micros
        assert min(value for _, value in parts.parts()) >= 0
    assert meter.report().idle_micros >= 0


@settings(max_examples=60, deadline=None)
@given(histories(), instants, instants)
def test_boots_cost_no_more_than_their_hosts_and_change_no_total(events, one, other):
    meter, unjoined = Meter(events, NOW), Meter([e for e in events if not isinstance(e, HostJoined)], NOW)
    for since, until in ((None, None), (min(one, other), max(one, other))):
        found = meter.report(since, until)
        runs = {(x.host, x.started_at): x for x in found.lines}
        assert all(0 <= b.micros <= runs[b.host, b.running_at].micros for b in found.boots)
        assert all(0 <= b.seconds <= runs[b.host, b.running_at].seconds for b in found.boots)
        assert sum(b.micros for b in found.boots) == found.boot_micros
        pools = boots_by_pool(found.boots)
        assert sum(p.micros for p in pools) == found.boot_micros and sum(p.boots for p in pools) == len(found.boots)
        never = unjoined.report(since, until)
        assert {k: v for k, v in figures(found).items() if k != "boot_micros"} == {
            k: v for k, v in figures(never).items() if k != "boot_micros"}
        assert breakdown(found).total == breakdown(never).total == found.micros
        assert never.boot_micros == found.machine_micros - found.dispatcher_micros


@settings(max_examples=60, deadline=None)
@given(histories())
def test_hosts_add_up(events):
    shared = [e for e in events if not isinstance(e, (LaunchIntended, HostListed, HostJoined, JobProgress))]
    alone = [Meter([*shared, *(e for e in events if getattr(e, "request_id", None) == name)], NOW).micros()
             for name in {e.request_id for e in events if isinstance(e, LaunchIntended)}]
    whole = report(events, NOW)
    assert sum(alone) == whole.micros - whole.traffic_micros
    assert Meter(events, NOW).micros() == whole.micros


@settings(max_examples=25, deadline=None)
@given(histories(), instants, instants)
def test_every_cut_adds_up_over_many_fleets_too(events, one, other):
    books = [FleetLedgers("f", tuple(events), NOW), FleetLedgers("g", tuple(events), NOW - 100)]
    for since, until in ((None, None), (min(one, other), max(one, other))):
        found = costs(books, since, until)
        assert found.breakdown.total == found.micros
        for way in WAYS:
            rows = grouped(books, way, since, until)
            assert sum(row.micros for row in rows) == found.micros, way
            assert sum(row.on_demand_micros for row in rows) == found.on_demand_micros, way
            assert len({row.key for row in rows}) == len(rows)


@settings(max_examples=25, deadline=None)
@given(histories(), st.integers(2, 30))
def test_a_series_never_falls_and_ends_at_the_bill(events, points):
    found = series(events, NOW, points=points)
    if not found.spend:
        assert report(events, NOW).lines == ()
        return
    assert len(found.spend) == points
    assert all(a.micros <= b.micros and a.at <= b.at for a, b in pairwise(found.spend))
    whole = report(events, NOW)
    last = found.spend[-1]
    assert (last.micros, last.all_on_demand_micros) == (whole.micros, whole.on_demand_micros)
    assert all(p.micros == p.spot_micros + p.on_demand_micros + p.other_micros for p in found.spend)
    assert min(min(p.spot, p.on_demand) for p in found.hosts) >= 0
    both = combined([found, found], points)
    assert both.spend[-1].micros == 2 * whole.micros
    assert {p.at: p.spot for p in both.hosts} == {p.at: 2 * p.spot for p in found.hosts}


@settings(max_examples=60, deadline=None)
@given(histories(), st.lists(st.tuples(micros, micros), min_size=1, max_size=3), instants)
def test_prices_and_rates_of_later_change_nothing_that_fell_due_before(events, news, at):
    later: list[Event] = [RatesStamped(at, "fake", "r", Rates(a, b, a, b)) for a, b in news]
    later += [PriceChanged(at, offer(zone, market, 1, 0).pool, a, b) for a, b in news for zone in ZONES
              for market in Market]
    exact = [replace(events[0], billing=BillingRules(1)), *events[1:]]  # a minimum has the price of its run's end
    assert lines(report([*exact, *later], NOW, until=at)) == lines(report(exact, NOW, until=at))


def test_a_bill_reads_no_catalog():
    package = Path(meter_module.__file__).parents[2]
    seen: set[str] = set()
    todo = {p.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".")
            for p in package.glob("fleet/cost/*.py")}
    while todo:
        name = todo.pop()
        seen.add(name)
        path = package.parent / (name.replace(".", "/") + ".py")
        if path.is_file():
            tree = ast.walk(ast.parse(path.read_text()))
            found = {n.module for n in tree if isinstance(n, ast.ImportFrom) and n.module}
            todo |= {m for m in found if m.startswith("spotfleet.") and m not in seen}
    assert "spotfleet.fleet.domain.events" in seen
    assert not [name for name in seen if "catalog" in name or "providers" in name]


def test_what_a_minimum_adds_falls_due_when_the_run_ends():
    events = [FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(60)),
              LaunchIntended(0.0, "f-0", Role.WORKER, offer("a", Market.SPOT, 1, 3600), ""),
              HostListed(0.0, "f-0", "i", CloudState.STOPPED, (Run(100.0, 120.0),))]
    assert [Meter(events, NOW).micros(until=at) for at in (100.0, 110.0, 119.0, 120.0)] == [0, 10, 19, 60]


def test_days_are_those_of_the_calendar():
    assert [day(at) for at in (-1.0, 0.0, DAY_S - 1, 951_782_400.0, 1_709_164_800.0, 4_107_542_400.0)] == [
        "1969-12-31", "1970-01-01", "1970-01-01", "2000-02-29", "2024-02-29", "2100-03-01"]


def test_an_hour_over_midnight_is_cut_at_midnight():
    host = offer("a", Market.SPOT, 1, 3_600_000)
    events = [FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1)),
              LaunchIntended(0.0, "f-0", Role.WORKER, host, ""),
              HostListed(0.0, "f-0", "i", CloudState.TERMINATED, (Run(2 * DAY_S - 1200, 2 * DAY_S + 2400),))]
    rows = grouped([FleetLedgers("f", tuple(events), 5 * DAY_S)], "day")
    assert [(r.key, r.micros, r.seconds) for r in rows if r.micros] == [
        ("1970-01-02", 1_200_000, 1200), ("1970-01-03", 2_400_000, 2400)]
    assert math.isclose(rows[0].on_demand_micros / rows[0].micros, 3, rel_tol=1e-5)


def test_a_window_begins_with_its_since_and_ends_before_its_until():
    sold = offer("a", Market.SPOT, 1, 3600)
    events = [FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1)),
              RatesStamped(0.0, "fake", "r", Rates(0, 0, 900)),
              LaunchIntended(0.0, "f-0", Role.WORKER, sold, ""),
              LaunchIntended(0.0, "f-1", Role.WORKER, replace(sold, zone="b"), ""),
              HostListed(0.0, "f-0", "i", CloudState.RUNNING, (Run(0.0),)),
              HostListed(0.0, "f-1", "j", CloudState.RUNNING, (Run(0.0),)),
              GenerationFormed(0.0, "j", 1, ("f-0/0/a", "f-1/0/a"), "start", ""),
              JobResumed(50.0, "j", 1, 7, 2, 3.0), JobProgress(50.0, "j", 7, 1.0, 2**30)]
    meter = Meter(events, 100.0)
    before, after = meter.report(until=50.0), meter.report(since=50.0)
    assert [(w.useful_steps, w.repeated_micros, w.pause_micros, w.traffic_micros) for w in (before, after)] == [
        (0, 0, 0, 0), (7, 4, 6, 9 * 2 * 900)]
    assert (before.machine_micros, after.machine_micros) == (100, 100)


def test_what_a_split_rounds_below_nothing_is_borne_by_the_largest_part():
    events = [FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1)), *_busy()]
    whole = report(events, 100.0)
    odd = replace(whole, idle_micros=-2, micros=whole.jobs[0].micros - 2, disk_micros=0)
    assert breakdown(odd) == replace(breakdown(whole), useful=whole.jobs[0].micros - 2, idle=0)


def _busy() -> list[Event]:
    """A host that a job holds from its first second to its last."""
    return [LaunchIntended(0.0, "f-0", Role.WORKER, offer("a", Market.SPOT, 1, 3600), ""),
            HostListed(0.0, "f-0", "i", CloudState.RUNNING, (Run(0.0),)), HostJoined(0.0, "f-0", "a"),
            GenerationFormed(0.0, "j", 1, ("f-0/0/a",), "start", "")]


def test_no_more_is_lost_to_repeats_and_pauses_than_the_hosts_of_jobs_have_cost():
    resumed = JobResumed(50.0, "j", 1, 7, 30, 1000.0)
    whole = report([FleetCreated(0.0, "f", "fake", Nodes(), BillingRules(1)), *_busy(),
                    JobProgress(49.0, "j", 6, 1.0), resumed], 100.0)
    assert (whole.repeated_micros, whole.pause_micros, whole.micros) == (30, 1000, 100)
    assert breakdown(whole) == Breakdown(useful=0, repeated=30, pause=70)
