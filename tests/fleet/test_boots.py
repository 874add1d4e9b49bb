"""Parts of a boot in the ledger, from the request for the machine to its first step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spotfleet.fleet.domain.boots import boot_stages
from spotfleet.fleet.domain.events import (
    ClockSetBack,
    HostJoined,
    HostListed,
    JobResumed,
    LaunchIntended,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.planner.plan import Observed, Wanted
from spotfleet.fleet.reconcile import _observation_events
from spotfleet.model import BootStages, CloudState, Market, Offer, Role, Run

OFFER = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000)
ASKED = LaunchIntended(1000.0, "f-0", Role.WORKER, OFFER, "1 missing")
RUNS = HostListed(1045.0, "f-0", "i-0", CloudState.RUNNING, (Run(1041.0),))
SAID = BootStages(system_s=22.5, setup_s=110.0, agent_s=18.0)
WHOLE = BootStages(195.0, 41.0, 22.5, 110.0, 18.0)


def test_a_host_that_joins_has_the_parts_of_its_boot_in_the_ledger():
    seen = Observed(joined={"f-0": "one"}, boots={"f-0": SAID})
    assert _observation_events(Wanted("f", Role.WORKER, 1), fold([ASKED, RUNS]), seen, 1195.0) == [
        HostJoined(1195.0, "f-0", "one", WHOLE)]


def test_an_agent_that_connects_again_has_not_booted():
    state = fold([ASKED, RUNS, HostJoined(1195.0, "f-0", "one", WHOLE)])
    seen = Observed(joined={"f-0": "two"}, boots={"f-0": SAID})
    assert _observation_events(Wanted("f", Role.WORKER, 1), state, seen, 9000.0) == [HostJoined(9000.0, "f-0", "two")]


def test_an_older_agent_reports_no_parts_and_the_dispatcher_its_own():
    (host,) = fold([ASKED, RUNS]).hosts
    assert boot_stages(host, None, 1195.0) == BootStages(195.0, 41.0)
    (unlisted,) = fold([ASKED]).hosts
    assert boot_stages(unlisted, None, 1195.0) == BootStages(195.0)


@pytest.mark.parametrize("seconds", [-1.0, 195.1, 1e30, math.inf, math.nan])
def test_a_part_that_does_not_lie_within_the_whole_is_left_out(seconds: float):
    (host,) = fold([ASKED, RUNS]).hosts
    for name in ("system_s", "setup_s", "agent_s"):
        assert boot_stages(host, replace(SAID, **{name: seconds}), 1195.0) == replace(WHOLE, **{name: None})


def test_a_machine_that_began_before_it_was_asked_for_has_no_such_part():
    early = replace(RUNS, runs=(Run(900.0),))
    (host,) = fold([ASKED, early]).hosts
    assert boot_stages(host, SAID, 1195.0).machine_s is None


def test_the_first_step_after_a_boot_is_awaited_until_it_is_done():
    joined = [ASKED, RUNS, HostJoined(1195.0, "f-0", "one", WHOLE)]
    stepped = JobResumed(1240.0, "j", 1, 1, 0, 0.0, first_steps={"f-0": 240.0, "f-9": 1.0})
    found = [fold(events).hosts[0].first_step_from for events in (
        joined, [*joined, stepped], [*joined, stepped, HostJoined(5000.0, "f-0", "two")],
        [*joined, ClockSetBack(1200.0, 100.0)], [ASKED, RUNS, HostJoined(1195.0, "f-0", "one")])]
    assert found == [1000.0, None, None, 900.0, None]


def test_a_host_that_boots_again_is_asked_for_anew():
    stopped = HostListed(2000.0, "f-0", "i-0", CloudState.STOPPED, (Run(1041.0, 1990.0, True),))
    back = HostListed(3000.0, "f-0", "i-0", CloudState.RUNNING, (Run(1041.0, 1990.0, True), Run(2995.0)))
    state = fold([ASKED, RUNS, HostJoined(1195.0, "f-0", "one", WHOLE), stopped, back])
    seen = Observed(joined={"f-0": "two"}, boots={"f-0": replace(SAID, agent_s=9.0)})
    (joined,) = _observation_events(Wanted("f", Role.WORKER, 1), state, seen, 3060.0)
    assert joined == HostJoined(3060.0, "f-0", "two", BootStages(60.0, None, 22.5, None, 9.0))
    assert fold([ASKED, RUNS, stopped, back, joined]).hosts[0].first_step_from == 3000.0


def test_events_of_earlier_releases_have_no_boots():
    data = event_to_json(HostJoined(1.0, "f-0", "one", WHOLE))
    assert event_from_json(data) == HostJoined(1.0, "f-0", "one", WHOLE)
    assert event_from_json({k: v for k, v in data.items() if k != "boot"}) == HostJoined(1.0, "f-0", "one")
    resumed = event_to_json(JobResumed(1.0, "j", 1, 1, 0, 0.0, first_steps={"f-0": 2.5}))
    assert event_from_json(resumed).first_steps == {"f-0": 2.5}
    assert event_from_json({k: v for k, v in resumed.items() if k != "first_steps"}).first_steps == {}
