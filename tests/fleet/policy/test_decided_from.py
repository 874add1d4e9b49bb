"""What the ledger tells the policy: availability, boots, work done, prices of traffic, and what was decided before."""

from __future__ import annotations

import pytest

from spotfleet.fleet.domain.availability import AvailabilityPeriod
from spotfleet.fleet.domain.events import (
    BudgetReached,
    ClockSetBack,
    Event,
    FleetCreated,
    GenerationFormed,
    HostJoined,
    HostListed,
    HostNoticed,
    JobChanged,
    JobProgress,
    JobResumed,
    LaunchIntended,
    LaunchRefused,
    PolicyChanged,
)
from spotfleet.fleet.domain.history import JobProgressSoFar, MarketHistory
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.policy.lifetimes import BOOT_S, STALL_S, boot_s, lived, stall_s
from spotfleet.model import BillingRules, CloudState, JobState, Market, Nodes, Offer, PolicySpec, Role, Run

SPOT = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
FULL = Offer("fake", "r", "zone-a", "g5", Market.ON_DEMAND, 1, 3_000_000, 3_000_000, "A10G")
RUNS = CloudState.RUNNING


def seen(*events: Event, target: int = 2) -> MarketHistory:
    return fold([FleetCreated(0.0, "f", "fake", Nodes(1, target, 9), BillingRules()), *events]).history


def launch(at: float, n: int, offer: Offer = SPOT) -> LaunchIntended:
    return LaunchIntended(at, f"f-{n}", Role.WORKER, offer, "")


def listed(at: float, n: int, *runs: Run) -> HostListed:
    return HostListed(at, f"f-{n}", f"i-{n}", RUNS if not runs or runs[-1].ended_at is None else CloudState.TERMINATED,
                      runs or (Run(at),))


def progress(at: float, version: int, step_s: float) -> JobProgress:
    return JobProgress(at, "j", version, step_s)


def formed(at: float, version: int, *hosts: str) -> GenerationFormed:
    return GenerationFormed(at, "j", 1, tuple(f"{h}/0/1" for h in hosts), "join", "", version)


# ---- availability


def test_spot_can_be_had_from_the_acceptance_that_brings_half_of_the_target_until_fewer_are_left():
    taken = listed(900.0, 0, Run(10.0, 900.0, taken=True))
    assert seen(launch(0.0, 0), listed(10.0, 0), taken).availability.periods == (
        AvailabilityPeriod(True, 10.0, 900.0), AvailabilityPeriod(False, 900.0, 900.0))


def test_a_loss_or_a_refusal_means_little_while_half_of_the_target_is_held():
    two = [launch(0.0, 0), launch(0.0, 1), listed(10.0, 0), listed(10.0, 1)]
    noticed = HostNoticed(500.0, "f-0", 120.0, "terminate")
    refused = [launch(501.0, 2), LaunchRefused(501.0, "f-2", "pool", "full")]
    assert seen(*two, noticed, *refused).availability.periods == (AvailabilityPeriod(True, 10.0, 501.0),)
    assert seen(*two, noticed, *refused, target=4).availability.periods[-1] == AvailabilityPeriod(False, 500.0, 501.0)


def test_what_on_demand_hosts_meet_and_mere_hints_say_nothing_of_spot():
    full = [launch(0.0, 0, FULL), LaunchRefused(0.0, "f-0", "pool", "full"), launch(0.0, 1, FULL), listed(1.0, 1)]
    assert seen(*full).availability.periods == ()
    hint = HostNoticed(5.0, "f-2", 0.0, "", "rebalance")
    found = seen(launch(1.0, 2), listed(2.0, 2), hint, target=1)
    assert found.availability.periods == (AvailabilityPeriod(True, 2.0, 2.0),)


def test_a_clock_that_was_set_back_takes_the_memory_along():
    back = seen(launch(1000.0, 0), listed(1010.0, 0), ClockSetBack(10.0, 1000.0))
    assert back.availability.periods == (AvailabilityPeriod(True, 10.0, 10.0),)


# ---- how long things take


def test_boots_and_pauses_are_the_medians_of_what_was_seen():
    events: list[Event] = []
    for n, took_s in enumerate((90.0, 400.0, 100.0)):
        events += [launch(1000.0 * n, n), HostJoined(1000.0 * n + took_s, f"f-{n}", "1")]
    events += [progress(5000.0, 10, 2.0), JobResumed(5001.0, "j", 2, 10, repeated=1, pause_s=0.5)]
    state = fold(events)
    assert (boot_s(state), stall_s(state)) == (100.0, 2.5)
    assert (boot_s(fold([])), stall_s(fold([]))) == (BOOT_S, STALL_S)


def test_an_agent_that_joins_anew_is_no_boot():
    once = [launch(0.0, 0), HostJoined(90.0, "f-0", "1")]
    assert seen(*once, HostJoined(9000.0, "f-0", "2")).boots == (90.0,)


def test_a_host_that_left_in_time_after_its_notice_was_taken_too():
    events = [launch(0.0, 0), listed(0.0, 0), HostNoticed(50.0, "f-0", 120.0, "terminate"),
              listed(100.0, 0, Run(0.0, 100.0))]
    found = lived(fold(events), 500.0)[SPOT.pool]
    assert (found.seconds, found.taken) == (100.0, 1)


# ---- work


def test_work_is_steps_times_their_time_times_the_hosts_that_made_them():
    story = [formed(0.0, 0, "a", "b"), progress(10.0, 10, 1.0), formed(11.0, 10, "a"), progress(20.0, 15, 2.0)]
    assert seen(*story).progress == {"j": JobProgressSoFar(15, 10 * 1.0 * 2 + 5 * 2.0 * 1, 2.0, 1)}


def test_steps_that_are_made_again_are_no_work():
    story = [formed(0.0, 0, "a"), progress(10.0, 10, 1.0), formed(11.0, 4, "b"), progress(17.0, 10, 1.0)]
    assert seen(*story).progress["j"].host_s == 10.0


def evaluating(until: int, begin: float = 0.0, version: int = 0) -> list[Event]:
    """Two hosts that make a step each second, and evaluate for 10 s after ten of them; told each 10 s."""
    events: list[Event] = [formed(begin - 5.0, version, "a", "b"), JobResumed(begin, "j", 1, version, 0, 0.1)]
    return events + [progress(begin + n, version + n // 20 * 10 + min(10, n % 20), 1.0) for n in range(10, until, 10)]


def test_a_step_takes_what_the_clock_says_with_all_that_is_between_steps():
    work = seen(*evaluating(until=412)).progress["j"]
    assert (work.step_s, work.pace_s) == (1.0, pytest.approx(2.0, rel=0.05))
    assert work.host_s == pytest.approx(400 * 2, rel=0.05)


def test_until_two_minutes_of_training_are_known_a_step_takes_the_median():
    assert seen(*evaluating(until=120)).progress["j"].pace_s == 1.0
    assert seen(*evaluating(until=152)).progress["j"].pace_s > 1.5


def test_waiting_for_hosts_is_no_training_and_what_was_learned_outlasts_it():
    before = evaluating(until=412)
    waits = [formed(411.0, 210), formed(9000.0, 210, "a", "b")]
    work = seen(*before, *waits).progress["j"]
    assert work.pace_s == seen(*before).progress["j"].pace_s
    again = seen(*before, *evaluating(until=412, begin=9005.0, version=210)).progress["j"]
    assert (again.pace_s, again.host_s) == (pytest.approx(2.0, rel=0.05), pytest.approx(800 * 2, rel=0.05))


def test_steps_that_are_made_again_tell_how_long_steps_take():
    story = [formed(0.0, 0, "a"), JobResumed(0.0, "j", 1, 0, 0, 0.0), progress(200.0, 100, 2.0), formed(210.0, 50, "b"),
             JobResumed(210.0, "j", 2, 50, 50, 0.0), progress(410.0, 150, 2.0)]
    work = seen(*story).progress["j"]
    assert (work.version, work.pace_s, work.host_s) == (150, 2.0, 300.0)


def test_of_a_pace_that_changes_the_newest_hours_count_most():
    story = [formed(0.0, 0, "a"), JobResumed(0.0, "j", 1, 0, 0, 0.0)]
    story += [progress(600.0 * n, 100 * n, 1.0) for n in range(1, 200)]
    slow = seen(*story).progress["j"]
    story += [progress(600.0 * 199 + 600.0 * n, 100 * 199 + 600 * n, 1.0) for n in range(1, 100)]
    assert (slow.pace_s, seen(*story).progress["j"].pace_s) == (pytest.approx(6.0), pytest.approx(1.0, abs=0.1))


def test_a_clock_that_was_set_back_takes_the_training_along():
    story = [formed(1000.0, 0, "a"), JobResumed(1000.0, "j", 1, 0, 0, 0.0), ClockSetBack(10.0, 990.0),
             progress(210.0, 100, 1.0)]
    assert seen(*story).progress["j"].pace_s == 2.0


def test_a_job_that_has_ended_reduces_nothing_any_more():
    story = [formed(0.0, 0, "a"), progress(10.0, 10, 1.0), JobChanged(11.0, "j", JobState.SUCCEEDED, "")]
    assert "j" not in seen(*story).progress


# ---- what was said


def test_the_newest_policy_and_the_newest_word_on_each_limit_are_kept_until_the_fleet_is_made_anew():
    changed = PolicyChanged(1.0, PolicySpec("auto"), "")
    warned = [BudgetReached(2.0, "max_cost", p, 8, 10, "") for p in (80, 95)]
    after = seen(changed, *warned)
    assert after.policy == PolicySpec("auto") and after.reached == {"max_cost": warned[1]}
    assert seen(changed, *warned, FleetCreated(9.0, "f", "fake", Nodes(1, 1, 1), BillingRules())) == MarketHistory()
