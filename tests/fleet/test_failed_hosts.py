"""Machines that report that they cannot become hosts: ended, replaced, and not bought for ever."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.fleet.domain.events import Event, HostFailed, HostJoined, HostListed, LaunchIntended
from spotfleet.fleet.domain.state import FAILED_S, FleetState, after_failure, failing, fold
from spotfleet.fleet.planner.plan import Launch, Observed, Terminate, Wait, Wanted, plan
from spotfleet.model import CloudState, HostState, Market, Need, Offer, Role, Run

SPOT = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G")
ON_DEMAND = replace(SPOT, market=Market.ON_DEMAND, price_micros_h=3_000_000)
BESIDE = replace(SPOT, zone="zone-b", price_micros_h=2_900_000)
EITHER = (Need(), Need(use_spot=False))
ECC = "a GPU is broken: slot 1: GPU 00000000:10:1D.0 has 3 uncorrected ECC errors;"


def machine(number: int, offer: Offer = SPOT) -> list[Event]:
    """A launch, and its machine that runs."""
    name, at = f"f-{number}", 10.0 * number
    return [LaunchIntended(at, name, Role.WORKER, offer, "why"),
            HostListed(at + 1, name, f"i-{number}", CloudState.RUNNING, (Run(at),))]


def failed(number: int, offer: Offer = SPOT, broken: bool = True) -> list[Event]:
    return [*machine(number, offer), HostFailed(10.0 * number + 2, f"f-{number}", ECC, broken)]


def planned(state: FleetState, offers: list[Offer], now: float = 50.0, hosts: int = 1) -> list:
    return plan(Wanted("f", Role.WORKER, hosts, EITHER), state, offers, Observed(), now)


def test_a_host_whose_machine_is_broken_is_ended_and_replaced_at_once():
    actions = planned(fold(failed(0)), [SPOT])
    assert actions[0] == Terminate("f-0", f"its machine is broken: {ECC}")
    assert [type(a) for a in actions] == [Terminate, Launch]


def test_a_machine_that_failed_without_a_fault_of_its_own_stays_for_a_look_at_it_and_its_host_has_the_reason():
    state = fold(failed(0, broken=False))
    assert planned(state, [SPOT]) == []
    assert state.hosts[0].why == f"it failed: {ECC}"


def test_after_three_failures_in_a_row_that_type_is_bought_no_more_in_that_zone_for_a_day_in_no_market():
    two = fold([*failed(0), *failed(1)])
    assert failing(two, 30.0) == {} and [a.offer for a in planned(two, [SPOT]) if isinstance(a, Launch)] == [SPOT]
    three = fold([*failed(0), *failed(1, ON_DEMAND), *failed(2)])
    assert [a.offer for a in planned(three, [SPOT, ON_DEMAND, BESIDE]) if isinstance(a, Launch)] == [BESIDE]
    waits = [a.why for a in planned(three, [SPOT, ON_DEMAND]) if isinstance(a, Wait)]
    line = ("machines fake/zone-a/g5: 3 in a row failed, the last one because a GPU is broken: slot 1: GPU "
            "00000000:10:1D.0 has 3 uncorrected ECC errors; no more are launched there for a day, until 00:00:22 UTC: "
            "another type, zone or image helps")
    assert waits == [f"1 host missing: {line}"] and list(failing(three, 50.0).values()) == [line]
    assert [a.offer for a in planned(three, [SPOT], now=22.0 + FAILED_S) if isinstance(a, Launch)] == [SPOT]


def test_only_failures_in_a_row_count_and_each_machine_once():
    two = [*failed(0), *failed(1)]
    assert not failing(fold([*two, *machine(2), HostJoined(25.0, "f-2", "agent"), *failed(3)]), 40.0)
    again = HostFailed(13.0, "f-1", ECC, True)
    assert not failing(fold([*two, again]), 40.0) and failing(fold([*two, again, *failed(3)]), 40.0)


def test_a_launch_that_the_cloud_accepts_is_no_proof_that_its_machine_works():
    assert failing(fold([*failed(0), *failed(1), *failed(2), *machine(3)]), 40.0)


def test_a_host_that_a_person_repairs_counts_again():
    state = fold([*failed(0), HostJoined(9.0, "f-0", "agent")])
    assert (state.hosts[0].state, state.hosts[0].failed, planned(state, [SPOT])) == (HostState.UP, "", [])


def test_the_next_step_is_in_the_event():
    host = fold(machine(0)).hosts[0]
    assert after_failure(fold(machine(0)), host, True, 2.0).startswith("nothing to do: the machine is ended")
    assert "`spotfleet ssh f-0`" in after_failure(fold(machine(0)), host, False, 2.0)
    third = after_failure(fold([*failed(1), *failed(2)]), host, True, 30.0)
    assert third.startswith("3 machines in a row of g5 in zone-a failed: no more are launched there for a day, ")
