"""When a host under a deadline waits, rides spot or works on demand. Ten hours of work, hosts of 3 $/h and 1 $/h."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from spotfleet.fleet.domain.availability import AvailabilityHistory, AvailabilityPeriod
from spotfleet.fleet.policy.deadline import choose, impossible, soonest_s
from spotfleet.fleet.policy.values import DecisionInput

H = 3600.0
BOOT_S = 180.0


def calm(now: float = 50 * H, spell_s: float = 20 * H) -> AvailabilityHistory:
    """Spot was there for `spell_s`, after a short gap and as long a spell."""
    return AvailabilityHistory((AvailabilityPeriod(True, now - 2 * spell_s - 600, now - spell_s - 600),
                   AvailabilityPeriod(False, now - spell_s - 600, now - spell_s),
                                AvailabilityPeriod(True, now - spell_s, now)))


def shaky(now: float = 50 * H) -> AvailabilityHistory:
    """Spot came and went every five minutes for ten hours, and came a moment ago."""
    turns = [now - k * 300.0 for k in range(120, -1, -1)]
    return AvailabilityHistory((*(AvailabilityPeriod(k % 2 == 0, a, b) for k, (a, b) in enumerate(pairwise(turns))),
                                AvailabilityPeriod(True, now, now)))


def moment(slack_s: float, hosts: int = 1, work_s: float = 10 * H, **known) -> DecisionInput:
    """With `slack_s` per host more than the work takes; no spot can be had, no host is there."""
    known = {"room": 0, "boot_s": BOOT_S, "spot_micros_h": 1_000_000, "on_demand_micros_h": 3_000_000, **known}
    return DecisionInput(50 * H, hosts, left_s=work_s + slack_s, work_s=work_s * hosts, **known)


def hosts(m: DecisionInput) -> tuple[int, int]:
    choice = choose(m)
    return choice.spot, choice.on_demand


@pytest.mark.parametrize(("known", "spot", "on_demand"), [
    pytest.param({"slack_s": 20 * H}, 4, 0, id="much slack: wait for spot"),
    pytest.param({"slack_s": 20 * H, "room": 4}, 4, 0, id="spot can be had: take it"),
    pytest.param({"slack_s": 20 * H, "room": None}, 4, 0, id="nobody knows: try spot"),
    pytest.param({"slack_s": 0.5 * H}, 4, 4, id="slack in the reserve: on demand what spot lacks"),
    pytest.param({"slack_s": 0.5 * H, "room": 3}, 4, 1, id="spot has some: on demand the others"),
    pytest.param({"slack_s": 0.5 * H, "spot": 3, "spot_ready": 3}, 4, 1, id="one of four was lost: one on demand"),
    pytest.param({"slack_s": 0.5 * H, "spot": 4, "spot_ready": 4}, 4, 0, id="spot for all: nothing on demand"),
    pytest.param({"slack_s": 20 * H, "on_demand": 4, "on_demand_ready": 4}, 4, 4, id="on demand until spot returns"),
    pytest.param({"slack_s": 60.0, "room": 4}, 0, 4, id="no slack for a boot: on demand to the end"),
    pytest.param({"slack_s": -H, "room": 4}, 0, 4, id="too late: on demand with all"),
])  # fmt: skip
def test_four_hosts_wait_only_with_slack_beyond_the_reserve(known: dict, spot: int, on_demand: int):
    assert hosts(moment(hosts=4, **known)) == (spot, on_demand)


def test_on_demand_hosts_work_until_the_spot_hosts_that_relieve_them_have_booted():
    booting = moment(2 * H, hosts=4, spot=4, spot_ready=1, on_demand=4, on_demand_ready=4, availability=calm())
    assert hosts(booting) == (4, 3)
    assert hosts(replace(booting, spot_ready=4)) == (4, 0)


def test_spot_hosts_work_until_the_on_demand_hosts_that_end_the_job_have_booted():
    late = moment(40.0, hosts=4, spot=4, spot_ready=4)
    assert hosts(late) == (4, 4)
    assert hosts(replace(late, on_demand=4, on_demand_ready=4)) == (0, 4)


def test_a_short_lived_market_is_not_worth_leaving_on_demand_for():
    on_demand = moment(2 * H, room=1, on_demand=1, on_demand_ready=1)
    assert hosts(replace(on_demand, availability=calm())) == (1, 1)
    stay = choose(replace(on_demand, availability=shaky(), boot_s=600.0))
    assert (stay.spot, stay.on_demand) == (0, 1)
    assert math.isfinite(stay.again_s), "it may yet turn out to last"


def test_a_market_that_outlives_its_usual_spells_is_taken_after_all():
    seen = shaky()
    on_demand = moment(2 * H, room=1, on_demand=1, on_demand_ready=1, boot_s=600.0)
    later = AvailabilityHistory((*seen.periods[:-1], AvailabilityPeriod(True, 50 * H, 53 * H)))
    assert hosts(replace(on_demand, availability=seen)) == (0, 1)
    assert hosts(replace(on_demand, availability=later)) == (1, 1)


def test_one_host_that_cannot_be_relieved_while_it_works_changes_with_slack_for_going_back():
    """As where a changeover stops all work: nothing boots beside the old host."""
    ready = moment(2 * H, room=1, on_demand=1, on_demand_ready=1, boot_s=0.0, stall_s=180.0, availability=calm())
    assert hosts(ready) == (1, 0)
    assert hosts(replace(ready, left_s=ready.work_s + 350.0)) == (0, 1)


@pytest.mark.parametrize(("m", "spot", "on_demand"), [
    pytest.param(moment(H, work_s=0.0), 0, 0, id="done"),
    pytest.param(replace(moment(H), left_s=math.inf, work_s=5.0), 1, 0, id="no deadline"),
    pytest.param(replace(moment(20 * H, room=1), spot_micros_h=3_000_000), 0, 1, id="spot is no cheaper"),
])  # fmt: skip
def test_without_work_deadline_or_saving_there_is_nothing_to_weigh(m: DecisionInput, spot: int, on_demand: int):
    assert hosts(m) == (spot, on_demand)


def test_who_waits_says_how_much_slack_there_is_and_looks_again_before_it_is_gone():
    choice = choose(moment(20 * H))
    assert choice.why == "20 h 0 min of slack per host, 2 h 21 min of it in reserve for losses to come: wait for spot"
    assert 17 * H < choice.again_s < 18 * H


def test_the_plainest_reasons():
    assert choose(moment(60.0)).why == "1 min of slack per host is too little for another change: on demand to the end"
    assert choose(moment(0.5 * H, spot=1, spot_ready=1)).why == "spot hosts for all"
    assert choose(moment(2 * H, room=None)).why == "spot hosts are asked for"
    waits = moment(2 * H, room=None, on_demand=1, on_demand_ready=1, availability=calm())
    assert choose(waits).why == "spot hosts are asked for, on demand until they work"
    stay = choose(moment(2 * H, room=1, on_demand=1, on_demand_ready=1, boot_s=600.0, availability=shaky()))
    assert stay.why.startswith("spot is expected for ")
    assert stay.why.endswith(", too short for going there and back: stay on demand")


def test_an_impossible_deadline_is_told_with_the_soonest_finish():
    assert soonest_s(40 * H, 4, BOOT_S) == 10 * H + BOOT_S
    assert impossible(moment(BOOT_S, hosts=4)) == ""
    assert impossible(moment(-H, hosts=4)) == (
        "the work takes 4 hosts 10 h 3 min on demand, with 3 min for a boot (assumed), and 9 h 0 min are left: it will "
        "be late")
    assert "with 3 min for a boot (the median of 7), and" in impossible(moment(-H, hosts=4, boots=7))
