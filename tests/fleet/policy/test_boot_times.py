"""The time of a boot: measured in the pool, else of the machine type, else of the fleet, else assumed."""

from __future__ import annotations

from dataclasses import replace

from spotfleet.fleet.domain.events import Event, FleetCreated, HostJoined, HostListed, LaunchIntended
from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.fleet.domain.state import FleetState, Refusals, fold, scope_keys
from spotfleet.fleet.policy.decide import PolicyInput, decide, decision_input
from spotfleet.fleet.policy.lifetimes import BOOT_S, BootTime, boot_time, boot_times, with_boots
from spotfleet.fleet.policy.pools import useful_price_by_pool, useful_prices
from spotfleet.model import BillingRules, CloudState, Market, Need, Nodes, Offer, PolicySpec, Role, Run

A = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, life_s=3600.0)
B, FULL = replace(A, zone="zone-b"), replace(A, market=Market.ON_DEMAND, price_micros_h=3_000_000)
P5 = replace(A, instance_type="p5")


def booted(*took: tuple[Offer, float]) -> FleetState:
    events: list[Event] = [FleetCreated(0.0, "f", "fake", Nodes(1, 2, 9), BillingRules())]
    for n, (offer, seconds) in enumerate(took):
        events += [LaunchIntended(1000.0 * n, f"f-{n}", Role.WORKER, offer, ""),
                   HostJoined(1000.0 * n + seconds, f"f-{n}", "1")]
    return fold(events)


def test_the_boots_of_the_pool_count_then_those_of_the_type_then_those_of_the_fleet():
    history = booted((A, 100.0), (A, 120.0), (A, 400.0), (B, 300.0), (P5, 700.0)).history
    assert boot_time(history, A) == BootTime(120.0, 3)
    assert boot_time(history, FULL) == BootTime(210.0, 4)
    assert boot_time(history, replace(A, instance_type="m6")) == boot_time(history) == BootTime(300.0, 5)


def test_where_nothing_has_booted_the_time_is_assumed_and_says_so():
    assert boot_time(MarketHistory(), A) == BootTime(BOOT_S, 0)


def test_only_the_newest_boots_count():
    history = booted(*[(A, 900.0)] * 30, *[(A, 90.0)] * 20).history
    assert boot_time(history, A) == boot_time(history) == BootTime(90.0, 20)


def test_boot_times_that_are_sent_to_a_laptop_give_the_same_times_there():
    history = booted((A, 100.0), (A, 120.0), (B, 300.0), (P5, 700.0)).history
    there = with_boots(boot_times(history))
    assert [boot_time(there, o) for o in (None, A, B, FULL, P5)] == [
        boot_time(history, o) for o in (None, A, B, FULL, P5)]
    assert with_boots(boot_times(MarketHistory())) == MarketHistory()


def test_a_pool_whose_hosts_boot_slowly_costs_more_for_a_useful_hour():
    state = booted((A, 900.0), (B, 90.0))
    prices = useful_prices(state, [A, B], [], 5000.0)
    assert prices[A] > prices[B]
    by_pool = useful_price_by_pool(state, [A, B, FULL], 1, 5000.0)
    assert by_pool == {A.pool: 1_000_000 * (1 + 900.5 / 3600), B.pool: 1_000_000 * (1 + 90.5 / 3600),
                       FULL.pool: 3_000_000.0}


def test_a_decision_by_an_assumed_boot_says_that_it_was_not_measured():
    scene = PolicyInput(PolicySpec("auto"), (Need(),), 1, offers=(replace(A, room=1), FULL))
    known = booted((A, 100.0))
    assert (decision_input(scene, known, 0.0).boots, decision_input(scene, FleetState(), 0.0).boots) == (1, 0)
    refused = replace(known.history, boots=())
    whys = [decide(scene, _refused(replace(known, history=h, hosts=())), 10.0).why for h in (refused, known.history)]
    assert whys == ["spot is refused for 10 s: wait, on-demand hosts take 3 min (assumed, none was measured) to boot",
                    "spot is refused for 10 s: wait, on-demand hosts take 100 s to boot"]


def _refused(state: FleetState) -> FleetState:
    key = scope_keys(A)["pool"]
    return replace(state, refusals={key: Refusals(1, 0.0, "full", 0.0)}, cooldown_until={key: 1000.0})


def test_the_time_of_a_restart_is_a_boot_of_its_pool_too():
    stopped = (Run(1.0, 50.0, taken=True),)
    state = fold([FleetCreated(0.0, "f", "fake", Nodes(1, 2, 9), BillingRules()),
                  LaunchIntended(0.0, "f-0", Role.WORKER, A, ""), HostJoined(40.0, "f-0", "1"),
                  HostListed(60.0, "f-0", "i", CloudState.STOPPED, stopped),
                  HostListed(100.0, "f-0", "i", CloudState.RUNNING, (*stopped, Run(95.0))),
                  HostJoined(120.0, "f-0", "2")])
    assert state.history.boots_of[A.pool] == state.history.boots == (40.0, 20.0)
