"""What holds of every deadline, market and tick: no miss, and no sense turned upside down."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.fleet.domain.availability import (
    AvailabilityHistory,
    AvailabilityPeriod,
    expected_s,
    is_available,
    losses_per_s,
    observe,
)
from spotfleet.fleet.policy.deadline import DeadlineTuning, choose
from spotfleet.fleet.policy.values import DecisionInput

BENCH = Path(__file__).parents[3] / "bench"
sys.path.insert(0, str(BENCH))
try:
    from policy_worlds import Outcome, Piece, Task, alone, together
finally:
    sys.path.remove(str(BENCH))

H = 3600.0


@st.composite
def markets(draw: st.DrawFn, most: int, tick_s: float) -> Piece:
    """Capacity that changes as it likes, at ticks."""
    at, changes = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        changes.append((at, draw(st.integers(0, most))))
        at += tick_s * draw(st.integers(1, draw(st.sampled_from([3, 20, 200]))))
    return Piece(tuple(changes), 1e9)


def slacks(work_s: float, change_s: float) -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 1.0, change_s / 2, change_s, 2 * change_s, 3 * change_s, 10 * change_s, work_s / 5])


@settings(max_examples=100)
@given(st.data())
def test_one_host_is_never_late_if_it_could_have_been_in_time_on_demand(data: st.DataObject):
    change_s = data.draw(st.sampled_from([1.0, 30.0, 180.0, 720.0]))
    market = data.draw(markets(1, data.draw(st.sampled_from([7.0, 60.0, 195.0, 600.0]))))
    work_s = data.draw(st.floats(60, 1e5))
    task = Task(work_s, work_s + change_s + data.draw(slacks(work_s, change_s)), change_s)
    outcome = alone(market, task, choose, observe)
    assert not outcome.missed(task), outcome


@settings(max_examples=100)
@given(st.data())
def test_hosts_are_never_late_if_they_could_have_been_in_time_on_demand(data: st.DataObject):
    hosts, tick_s = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([10.0, 60.0]))
    boot_s, stall_s = tick_s * data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.0, 0.1, 15.0, 180.0]))
    work_s = data.draw(st.floats(60, 1e5))
    deadline_s = work_s + boot_s + stall_s + data.draw(slacks(work_s, boot_s))
    task = Task(work_s, deadline_s, boot_s, stall_s, hosts, tick_s=tick_s)
    outcome = together(data.draw(markets(hosts + 2, tick_s)), task, choose, observe)
    assert not outcome.missed(task), outcome


@st.composite
def moments(draw: st.DrawFn) -> DecisionInput:
    hosts = draw(st.integers(1, 20))
    spot, on_demand = draw(st.integers(0, hosts)), draw(st.integers(0, hosts))
    work_s = draw(st.floats(1, 1e5))
    availability, now = AvailabilityHistory(), 0.0
    for spell_s in draw(st.lists(st.floats(1, 1e5), max_size=6)):
        begun = observe(availability, now, len(availability.periods) % 2 == 0)
        availability, now = observe(begun, now + spell_s, False), now + spell_s
    return DecisionInput(now, hosts, spot, draw(st.integers(0, spot)), on_demand, draw(st.integers(0, on_demand)),
                  draw(st.none() | st.integers(0, 20)), work_s + draw(st.floats(-1e4, 1e5)), work_s * hosts,
                  draw(st.sampled_from([0.0, 30.0, 180.0])), draw(st.sampled_from([0.0, 0.1, 60.0])),
                  1_000_000, 3_000_000, availability, draw(st.sampled_from([1.0, 60.0])))


@given(moments())
def test_no_market_is_asked_for_more_hosts_than_the_target(moment: DecisionInput):
    choice = choose(moment)
    assert 0 <= choice.spot <= moment.hosts
    assert 0 <= choice.on_demand <= moment.hosts
    assert choice.again_s >= moment.tick_s


@given(moments(), st.floats(0, 1e5))
def test_more_time_never_takes_more_new_hosts_on_demand(moment: DecisionInput, more_s: float):
    """Of a market that is believed in: otherwise less slack may also mean to stay where one is."""
    moment = replace(moment, room=0, on_demand=0, on_demand_ready=0)
    assert choose(replace(moment, left_s=moment.left_s + more_s)).on_demand <= choose(moment).on_demand


@given(moments())
def test_a_choice_that_was_carried_out_is_the_choice_again(moment: DecisionInput):
    """Else a fleet would launch and dismiss hosts at each tick."""
    choice = choose(moment)
    spot = min(choice.spot, moment.spot + (moment.hosts if moment.room is None else moment.room))
    room = None if moment.room is None else max(0, moment.spot + moment.room - spot)
    done = replace(moment, spot=spot, spot_ready=min(spot, moment.spot_ready), on_demand=choice.on_demand,
                   on_demand_ready=min(choice.on_demand, moment.on_demand_ready), room=room)
    again = choose(done)
    assert again.on_demand >= choice.on_demand or again.spot >= spot


def outcome(market: Piece, tuning: DeadlineTuning | None = None) -> Outcome:
    task = Task(20 * H, 26 * H, 180.0)
    return alone(market, task, choose if tuning is None else lambda m: choose(m, tuning), observe)


def test_a_reserve_lets_a_job_take_spot_hosts_that_return():
    """Without one, all slack goes into waiting for the first, and the rest is on demand."""
    market = Piece(((0.0, 0), *((5.0 * H + k * H / 2, (k + 1) % 2) for k in range(60))), 1e9)
    careless = outcome(market, DeadlineTuning(reserve=0.0, net=0.0))
    assert outcome(market).useful_spot_s > careless.useful_spot_s + 3 * H


def test_spells_are_remembered_from_the_first_sight_of_each():
    availability = AvailabilityHistory()
    for at, available in ((0, True), (10, True), (20, False), (30, False), (35, True), (34, False)):
        availability = observe(availability, at, available)
    assert availability.periods == (AvailabilityPeriod(True, 0, 20), AvailabilityPeriod(False, 20, 35),
                             AvailabilityPeriod(True, 35, 35))


def test_what_was_seen_outweighs_what_was_believed_in_time():
    believed = AvailabilityHistory()
    seen = AvailabilityHistory(tuple(AvailabilityPeriod(k % 2 == 0, k * 60.0, k * 60.0 + 60.0) for k in range(200)))
    assert losses_per_s(believed) * H == 0.5
    assert expected_s(believed) == H
    assert 9 < losses_per_s(seen) * H < 30
    assert expected_s(AvailabilityHistory((*seen.periods, AvailabilityPeriod(True, 12_000, 12_000)))) < 300


def test_the_longer_a_spell_has_lasted_the_longer_it_is_expected_to():
    short = tuple(AvailabilityPeriod(k % 2 == 0, k * 60.0, k * 60.0 + 60.0) for k in range(40))
    histories = [(*short, AvailabilityPeriod(True, 2400.0, 2400.0 + age)) for age in (0, 100, 1000, 10_000)]
    expected = [expected_s(AvailabilityHistory(periods)) for periods in histories]
    assert expected == sorted(expected)
    assert expected[-1] > 3 * expected[0]


def test_spot_is_plentiful_when_half_of_the_hosts_are_held_or_to_be_had():
    known = ((0, 1, 1), (0, 0, 1), (1, 0, 1), (3, 4, 16), (3, 5, 16), (0, None, 16))
    assert [is_available(*each) for each in known] == [
        True, False, True, False, True, True]
