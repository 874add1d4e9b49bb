"""What is believed of single lines of a listing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.fleet.domain.actions import Observed
from spotfleet.fleet.domain.events import ClockSetBack, HostListed, LaunchIntended, TerminateIntended
from spotfleet.fleet.domain.state import FleetState, Host, apply, fold
from spotfleet.fleet.planner.listing_diff import merge_lines, new_events
from spotfleet.fleet.planner.plan import Terminate, Wanted, plan
from spotfleet.model import CloudHost, CloudState, HostState, Market, Offer, Role, Run

OFFER = Offer("aws", "r", "r-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
RUNNING, STOPPED, PENDING, TERMINATED = (CloudState.RUNNING, CloudState.STOPPED, CloudState.PENDING,
                                         CloudState.TERMINATED)


def line(state: CloudState, *runs: Run, machine: str = "i-1", host: str = "f-0") -> CloudHost:
    return CloudHost(host, machine, "f", Role.WORKER, OFFER, state, runs)


def seen(*lines: CloudHost, state: FleetState | None = None, at: float = 0.0) -> FleetState:
    """The ledger after listings of one line each."""
    rows = [LaunchIntended(0.0, "f-0", Role.WORKER, OFFER, "")]
    state = state or fold(rows)
    for n, one in enumerate(lines):
        state = listed(state, one, now=at + n)
    return state


def listed(state: FleetState, *lines: CloudHost, now: float) -> FleetState:
    for one in merge_lines(lines, state, Observed(), now).values():
        for event in new_events(state.host(one.request_id), one, now):
            state = apply(state, event)
    return state


def test_runs_that_a_listing_forgets_stay_and_an_open_one_ends_with_the_next():
    state = seen(line(RUNNING, Run(10.0)), line(STOPPED, Run(10.0, 20.0, True)), line(RUNNING, Run(30.0)),
                 line(RUNNING, Run(50.0)))
    assert state.host("f-0").runs == (Run(10.0, 20.0, True), Run(30.0, 50.0), Run(50.0))


def test_an_older_line_of_one_run_is_no_news():
    state = seen(line(RUNNING, Run(10.0)), line(STOPPED, Run(10.0, 20.0, True)), line(RUNNING, Run(30.0)))
    for older in (line(STOPPED, Run(10.0, 20.0, True)), line(RUNNING, Run(10.0)), line(PENDING)):
        assert listed(state, older, now=40.0) == state or older.state is PENDING
    assert listed(state, line(PENDING), now=40.0).host("f-0").runs == state.host("f-0").runs


@pytest.mark.parametrize("ended", [TERMINATED, STOPPED])
def test_a_machine_that_ends_without_a_word_of_its_runs_was_billed_until_we_heard_of_it(ended):
    state = listed(seen(line(RUNNING, Run(10.0))), line(ended), now=70.0)
    assert state.host("f-0").runs == (Run(10.0, 70.0),)
    assert listed(state, line(ended), now=90.0) == state


def test_a_stopped_machine_whose_agent_speaks_runs_on():
    state = seen(line(RUNNING, Run(10.0)))
    for stopped in (line(STOPPED), line(STOPPED, Run(10.0, 60.0, True))):
        (merged,) = merge_lines([stopped], state, Observed(joined={"f-0": "x"}), 70.0).values()
        assert (merged.state, merged.runs) == (RUNNING, (Run(10.0),))
        assert new_events(state.host("f-0"), merged, 70.0) == []


def test_a_listing_that_has_all_runs_is_believed_as_it_is():
    state = seen(line(RUNNING, Run(10.0)), line(STOPPED, Run(10.0, 20.0, True)))
    whole = line(RUNNING, Run(10.0, 21.0, True), Run(30.0))
    assert listed(state, whole, now=40.0).host("f-0").runs == whole.runs


def test_an_ended_host_whose_request_is_open_is_ended_again_before_it_has_a_machine():
    state = seen(line(RUNNING, Run(10.0)))
    state = apply(state, TerminateIntended(20.0, "f-0", "surplus"))
    state = listed(state, line(TERMINATED, Run(10.0, 25.0)), now=30.0)
    assert state.host("f-0").state is HostState.GONE
    state = listed(state, line(PENDING, machine="sir-1"), now=40.0)
    assert (state.host("f-0").state, state.host("f-0").revived) == (HostState.DRAINING, True)
    assert [type(a) for a in plan(Wanted("f", Role.WORKER, 0), state, [], Observed(), now=60.0)] == [Terminate]


def test_of_two_lines_of_one_host_the_one_that_began_later_counts():
    old, new = line(TERMINATED, Run(10.0, 20.0)), line(RUNNING, Run(30.0), machine="i-2")
    for both in ((old, new), (new, old)):
        state = listed(fold([]), *both, now=40.0)
        assert (state.host("f-0").provider_id, state.host("f-0").cloud) == ("i-2", RUNNING)


def test_the_listing_of_before_the_ledger_was_lost_begins_a_host_with_what_it_says():
    (intent, first) = new_events(None, line(RUNNING, Run(10.0)), 40.0)
    assert isinstance(intent, LaunchIntended) and isinstance(first, HostListed) and first.runs == (Run(10.0),)


@pytest.mark.parametrize("state", [HostState.LAUNCHING, HostState.UP])
def test_a_second_machine_counts_in_no_state(state):
    host = Host("f-0~i-2", Role.WORKER, OFFER, state, 0.0, 0.0, 0.0, provider_id="i-2", cloud=RUNNING)
    assert not host.counts and replace(host, request_id="f-0").counts


def test_a_host_that_comes_back_after_the_clock_was_set_back_is_ended_again_as_soon_as_ever():
    state = apply(seen(line(RUNNING, Run(10.0))), TerminateIntended(90_000.0, "f-0", "surplus"))
    state = listed(state, line(TERMINATED, Run(10.0, 25.0)), now=90_001.0)
    state = apply(state, ClockSetBack(3_602.0, 86_400.0))
    state = listed(state, line(RUNNING, Run(90_010.0), machine="i-2"), now=3_612.0)
    assert [type(a) for a in plan(Wanted("f", Role.WORKER, 1), state, [], Observed(), now=3_612.0)][:1] == [Terminate]
