"""Whole simulations: what is found out about a fleet on records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spotfleet.errors import UsageError
from spotfleet.fleet.cost.meter import report
from spotfleet.model import BillingRules, Need, PolicySpec
from spotfleet.simulate.run import PricedTrace, check, judged, run_inputs, simulate, world
from spotfleet.simulate.values.result import PARTS
from spotfleet.simulate.world.deciders import strategies
from tests.support.simulate.scenes import HOUR, plan, record

QUIET = ((0.0, 4),)
GAPS = ((0.0, 1), (2.0, 0), (5.0, 2), (9.0, 0), (9.5, 4), (15.0, 1), (20.0, 4))
NAMES = ["spotfleet", "on-demand only", "greedy", "Uniform Progress", "gang restart"]


def one(asked, *records: PricedTrace, strategy: str = "spotfleet"):
    done = world(asked, next(s for s in strategies() if s.name == strategy), run_inputs(asked, records)[0])
    done.run()
    return done, judged(asked, run_inputs(asked, records)[0], done)


def outcomes(asked, *records: PricedTrace):
    return {o.strategy: o for o in simulate("f", asked, records, processes=1).outcomes}


# ---- what it costs


def test_on_a_quiet_market_work_costs_its_hours_and_a_boot_on_spot():
    _, window = one(plan(hosts=2), record(*QUIET))
    assert window.done and window.finished_s == pytest.approx(4 * HOUR + 180, abs=2)
    assert window.micros == pytest.approx(2 * (4 + 0.05) * 1_000_000, rel=1e-3)
    assert window.on_demand_micros == 0
    assert (window.losses, window.launches, window.refusals) == (0, 2, 0)


def test_on_demand_only_costs_three_times_as_much():
    found = outcomes(plan(windows=1), record(*QUIET))
    assert found["on-demand only"].percent == pytest.approx(101.25, abs=0.1)
    assert found["spotfleet"].percent == pytest.approx(101.25 / 3, abs=0.1)


def test_prices_are_those_of_the_time():
    _, window = one(plan(work_h=2), record(*QUIET, prices=((0.0, 1_000_000), (1.0, 2_000_000))))
    assert window.micros == pytest.approx(1_000_000 + 1.05 * 2_000_000, rel=1e-3)


def test_a_first_hour_that_the_cloud_interrupts_is_free_where_its_rules_say_so():
    gaps = ((0.0, 1), (0.5, 0), (1.0, 1))
    paid, free = (one(replace(plan(work_h=2), billing=BillingRules(60, free_s)), record(*gaps))[1].micros
                  for free_s in (0, 3600))
    assert paid - free == pytest.approx(500_000, rel=0.02)


@pytest.mark.parametrize("strategy", NAMES)
def test_the_bill_is_the_clouds_and_its_parts_add_up(strategy):
    done, window = one(plan(hosts=2, work_h=9, deadline_h=16), record(*GAPS), strategy=strategy)
    assert window.micros == done.cloud.invoice().micros == report(done.ledger.rows, done.now).micros
    assert sum(micros for _, micros in window.parts) == window.micros
    assert [name for name, _ in window.parts] == list(PARTS)
    assert window.spot_micros + window.on_demand_micros == window.micros


@settings(max_examples=12, deadline=None)
@example([(1, 1)], 2, "greedy")  # half of a gang is none
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=6), st.integers(1, 3),
       st.sampled_from(NAMES))
def test_no_deadline_is_missed_that_on_demand_hosts_could_keep(steps, hosts, strategy):
    at, capacity = 0.0, [(0.0, hosts)]
    for quarters, room in steps:
        at += quarters / 4
        capacity.append((at, room))
    done, window = one(plan(hosts=hosts, work_h=5, deadline_h=7), record(*capacity), strategy=strategy)
    assert window.done
    assert done.work.useful_s == pytest.approx(5 * HOUR * hosts, abs=0.01)
    assert done.cloud.invoice().micros == report(done.ledger.rows, done.now).micros


def test_hosts_never_exceed_the_room_of_the_records():
    done, _ = one(plan(hosts=4, work_h=9, deadline_h=16), record(*GAPS))
    for machine in done.cloud.machines.values():
        held = sum(m.started_at <= machine.started_at < (m.ended_at or math.inf)
                   for m in done.cloud.machines.values() if m.offer.market == machine.offer.market)
        if machine.offer.market.value == "spot":
            assert held <= done.cloud.pools[0].room(machine.started_at)


def test_two_runs_are_the_same_to_the_last_event():
    first, _ = one(plan(hosts=2, work_h=9, deadline_h=16), record(*GAPS))
    again, _ = one(plan(hosts=2, work_h=9, deadline_h=16), record(*GAPS))
    assert first.ledger.rows == again.ledger.rows


def test_more_processes_find_the_same():
    asked = plan(windows=2)
    assert simulate("f", asked, [record(*GAPS)], processes=2) == simulate("f", asked, [record(*GAPS)], processes=1)


# ---- what the fleet file wishes


def test_spot_alone_waits_where_there_is_none():
    _, window = one(plan(work_h=4, deadline_h=math.inf, policy=PolicySpec("spot")), record((0.0, 0), (3.0, 1)))
    assert window.on_demand_micros == 0
    assert window.finished_s == pytest.approx(7 * HOUR, abs=900)


def test_an_auto_fleet_fills_in_on_demand_and_gives_it_back():
    done, window = one(plan(work_h=8, deadline_h=math.inf, policy=PolicySpec("auto")), record((0.0, 0), (3.0, 1)))
    assert 0 < window.on_demand_s < 4 * HOUR
    assert window.finished_s < 9 * HOUR
    assert [a.offer.market.value for a in done.state.hosts] == ["spot"]


def test_an_auto_fleet_goes_on_demand_for_as_long_as_spot_costs_more():
    """Though nothing else happens all the while."""
    asked = plan(work_h=20, deadline_h=math.inf, policy=PolicySpec("auto"))
    done, window = one(asked, record(*QUIET, prices=((0.0, 1_000_000), (5.0, 5_000_000), (12.0, 1_000_000))))
    assert window.on_demand_s == pytest.approx(7 * HOUR, abs=900)
    assert [a.offer.market.value for a in done.state.hosts] == ["spot"]


def test_a_fleet_with_a_highest_price_waits_until_spot_costs_that():
    asked = plan(work_h=2, deadline_h=math.inf, policy=PolicySpec("spot"))
    asked = replace(asked, setting=replace(asked.setting, any_of=(Need(max_micros_h=2_000_000),)))
    _, window = one(asked, record(*QUIET, prices=((0.0, 3_000_000), (5.0, 2_000_000))))
    assert window.finished_s == pytest.approx(7 * HOUR + 180, abs=5)


def test_an_on_demand_fleet_touches_no_spot_host():
    _, window = one(plan(policy=PolicySpec("on-demand"), deadline_h=math.inf), record(*QUIET))
    assert (window.spot_s, window.refusals) == (0.0, 0)


def test_work_without_end_fills_the_record():
    asked = plan(hosts=2, work_h=math.inf, deadline_h=math.inf, policy=PolicySpec("spot"))
    found = outcomes(asked, record((0.0, 2), (12.0, 0)))
    assert list(found) == ["spotfleet", "on-demand only", "gang restart"]
    assert found["spotfleet"].goodput == pytest.approx(0.5, abs=0.01)
    assert found["on-demand only"].goodput == pytest.approx(1.0, abs=0.01)
    gang = found["gang restart"].windows[0]
    assert (gang.on_demand_s, gang.spot_s) == (0.0, pytest.approx(2 * 12 * HOUR, rel=0.01))
    assert found["spotfleet"].misses == 0


# ---- several records


def test_work_without_a_deadline_is_compared_with_what_needs_none():
    report = simulate("f", plan(work_h=4, deadline_h=math.inf, policy=PolicySpec("spot")), [record(*QUIET)])
    assert [o.strategy for o in report.outcomes] == ["spotfleet", "on-demand only", "gang restart"]


def test_several_records_are_pools_of_one_fleet():
    done, window = one(plan(hosts=2, work_h=6, deadline_h=math.inf, policy=PolicySpec("spot")),
                       record((0.0, 2), (2.0, 0), name="a"), record((0.0, 0), (1.0, 2), name="b"))
    assert {m.offer.zone for m in done.cloud.machines.values()} == {"a", "b"}
    assert window.finished_s == pytest.approx(6 * HOUR, abs=1000)


def test_records_of_one_zone_are_two_pools():
    done, _ = one(plan(hosts=2), record((0.0, 1), zone="a"), record((0.0, 1), zone="a"))
    assert sorted(p.offer.zone for p in done.cloud.pools) == ["a", "a#2"]


def test_each_record_can_be_a_market_of_its_own():
    found = simulate("f", plan(each=True, windows=2), [record(*QUIET, name="a"), record(*GAPS, name="b")], processes=1)
    assert [w.pool for w in found.ours.windows] == ["a", "a", "b", "b"]
    assert not found.together


def test_records_that_say_when_they_began_are_laid_over_each_other_by_the_calendar():
    a, b = record(*QUIET, began_at=1000 * HOUR), record(*QUIET, began_at=1004 * HOUR)
    first = run_inputs(plan(), [a, b])[0]
    assert first.starts_s == (4 * HOUR, 0.0)


# ---- windows


def test_a_window_begins_each_so_often_and_ends_in_the_record():
    assert [s.starts_s for s in run_inputs(plan(every_s=8 * HOUR), [record(*QUIET)])] == [
        (0.0,), (8 * HOUR,), (16 * HOUR,)]


def test_or_so_many_are_spread_over_it():
    assert [s.starts_s for s in run_inputs(plan(windows=3), [record(*QUIET)])] == [(0.0,), (8 * HOUR,), (16 * HOUR,)]
    assert [s.starts_s for s in run_inputs(plan(windows=1), [record(*QUIET)])] == [(0.0,)]


@pytest.mark.parametrize(("asked", "records", "said"), [
    (plan(deadline_h=4.0), [record(*QUIET)], "the deadline cannot be met"),
    (plan(deadline_h=30.0), [record(*QUIET)], "24.0 h long, shorter than a window of 30.0 h"),
    (plan(deadline_h=48.0), [record(*QUIET, hours=100.0), record(*QUIET, hours=10.0, name="brief")],
     "brief: 10.0 h long, shorter than a window of 48.0 h"),
    (plan(deadline_h=48.0, each=True), [record(*QUIET, hours=40.0, name="longer"), record(*QUIET, hours=10.0)],
     "longer: 40.0 h long, shorter than a window of 48.0 h"),
    (plan(deadline_h=10.0), [record(*QUIET, began_at=1000 * HOUR), record(*QUIET, began_at=1020 * HOUR)],
     "the 2 records overlap for 4.0 h, shorter than a window of 10.0 h"),
    (plan(work_h=math.inf), [record(*QUIET)], "a deadline needs to know the work"),
    (plan(hosts=0), [record(*QUIET)], "at least one host"),
    (plan(), [], "there is no trace"),
], ids=["impossible", "short record", "shortest pool", "longest market", "short overlap", "no work",
        "no hosts", "no record"])
def test_what_cannot_be_simulated_is_said(asked, records, said):
    with pytest.raises(UsageError) as raised:
        check(asked, records)
        run_inputs(asked, records)
    assert said in str(raised.value)
    assert raised.value.hint


# ---- one window in detail


def test_a_story_tells_one_window_of_each_strategy():
    found = simulate("f", plan(hosts=2, work_h=9, deadline_h=16, windows=2), [record(*GAPS)], processes=1)
    assert [s.strategy for s in found.stories] == NAMES == [o.strategy for o in found.outcomes]
    story = found.stories[0]
    assert story.decisions[0].rule == "deadline" and story.decisions[0].why
    assert {a.what for a in story.actions} >= {"launch", "joined", "notice", "drain", "end", "finished"}
    assert story.spent[-1][1] == story.window.micros
    assert story.work[-1] == (story.window.lasted_s, 1.0)
    assert max(n for _, n in story.offered) == 2
    for points in (story.hosts, story.offered, story.spent, story.work):
        assert [p[0] for p in points] == sorted(p[0] for p in points)
