"""What the planner promises. `given` builds a fleet; every test reads: given, when planned, then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.fleet.domain.events import FleetCreated
from spotfleet.fleet.domain.state import FleetState, Host, scope_keys
from spotfleet.fleet.planner.plan import Drain, Launch, Observed, Terminate, Wait, Wanted, plan
from spotfleet.matching import matches, meets
from spotfleet.model import BillingRules, CloudState, HostState, Market, Need, Nodes, Offer, Role, Run

UP, LAUNCHING, DRAINING, STOPPED = HostState.UP, HostState.LAUNCHING, HostState.DRAINING, HostState.STOPPED
CHEAP = Offer("fake", "r", "zone-a", "g5", Market.SPOT, 1, 1_000_000, 3_000_000, "A10G", quota="G spot")
NEAR = replace(CHEAP, zone="zone-b", price_micros_h=1_400_000)
DEAR = replace(CHEAP, zone="zone-c", price_micros_h=2_000_000)
FULL = replace(CHEAP, market=Market.ON_DEMAND, price_micros_h=3_000_000, quota="G on demand")
NOTHING = Observed()


def given(*hosts: HostState | Host, **more) -> FleetState:
    built = tuple(host(n, h) if isinstance(h, HostState) else replace(h, request_id=f"f-{n}")
                  for n, h in enumerate(hosts))
    return FleetState(hosts=built, launches=len(built), **more)


def host(n: int, state: HostState, since: float = 0.0, offer: Offer = CHEAP, **more) -> Host:
    return Host(f"f-{n}", Role.WORKER, offer, state, since, 0.0, 0.0, provider_id=f"i-{n}", cloud=CloudState.RUNNING,
                **more)


def want(hosts: int, *any_of: Need, **more) -> Wanted:
    return Wanted("f", Role.WORKER, hosts, any_of or (Need(),), **more)


def launched(actions: list) -> list[str]:
    return [a.offer.zone for a in actions if isinstance(a, Launch)]


def test_a_fleet_at_its_size_needs_nothing():
    assert plan(want(2), given(UP, LAUNCHING), [CHEAP], NOTHING, now=0) == []


def test_a_draining_host_is_replaced_before_it_is_gone():
    assert plan(want(2), given(UP, DRAINING), [CHEAP], NOTHING, now=0) == [
        Launch("f-2", CHEAP, "1 of 2 hosts missing; $1.00/h in fake/zone-a/g5/spot")]


def test_a_host_with_a_notice_is_drained_and_replaced_at_the_notice():
    state = given(UP, host(1, UP, notice_deadline=43_330.0, notice_action="terminate"))
    assert plan(want(2), state, [CHEAP], NOTHING, now=43_210) == [
        Drain("f-1", "interruption notice: it ends at 12:02:10 UTC"),
        Launch("f-2", CHEAP, "1 of 2 hosts missing; $1.00/h in fake/zone-a/g5/spot")]


def test_a_rebalance_hint_drains_and_launches_nothing():
    assert plan(want(1), given(host(0, UP, hint="leave")), [CHEAP], NOTHING, now=0) == []


def test_a_host_that_the_user_gives_away_is_drained_and_replaced():
    observed = Observed(drain={"f-0": "asked by its user"})
    assert plan(want(1), given(UP), [CHEAP], observed, now=0)[0] == Drain("f-0", "asked by its user")
    assert launched(plan(want(1), given(UP), [CHEAP], observed, now=0)) == ["zone-a"]


def test_a_draining_host_ends_when_it_holds_no_worker():
    state = given(UP, host(1, DRAINING, why="the cloud takes it"))
    assert plan(want(1), state, [], NOTHING, now=5) == []
    assert plan(want(1), state, [], Observed(released=frozenset({"f-1"})), now=5) == [
        Terminate("f-1", "drained: the cloud takes it")]


def test_a_host_that_does_not_drain_in_time_ends_anyway():
    assert plan(want(1), given(UP, host(1, DRAINING, why="2 hosts, 1 wanted")), [], NOTHING, now=120) == [
        Terminate("f-1", "not drained within 120 s: 2 hosts, 1 wanted")]


def test_a_draining_host_that_still_sends_results_ends_when_its_time_for_that_is_over():
    state = given(UP, host(1, DRAINING, why="the fleet goes down"))
    sends = Observed(unsent={"f-1": 0.5})
    assert plan(want(1), state, [], sends, now=9_999) == []
    assert plan(want(1), state, [], replace(sends, unsent={"f-1": 0.0}), now=1) == [
        Terminate("f-1", "not drained, its time to send results is over: the fleet goes down")]


def test_a_host_that_the_cloud_will_stop_is_left_to_it_since_it_may_return():
    stopping = host(1, DRAINING, notice_deadline=100.0, notice_action="stop")
    released = Observed(released=frozenset({"f-1"}))
    assert plan(want(1), given(UP, stopping), [], released, now=219) == []
    assert [type(a) for a in plan(want(1), given(UP, stopping), [], released, now=220)] == [Terminate]


@pytest.mark.parametrize(("began", "free_s", "offer", "waits"), [
    (-3500.0, 3600, CHEAP, True), (-3501.0, 3600, CHEAP, False), (-10.0, 0, CHEAP, False),
    (-10.0, 3600, FULL, False)], ids=["first hour", "later", "no such rule", "on demand"])
def test_a_drained_host_whose_run_is_free_if_the_cloud_ends_it_is_left_to_the_cloud(began, free_s, offer, waits):
    created = FleetCreated(-9e9, "f", "fake", Nodes(), BillingRules(60, free_s))
    noticed = host(1, DRAINING, notice_deadline=100.0, notice_action="terminate", runs=(Run(began),), offer=offer)
    released, state = Observed(released=frozenset({"f-1"})), given(UP, noticed, created=created)
    ends = {now: [type(a) for a in plan(want(1), state, [], released, now=now)] for now in (5, 219, 220)}
    assert ends == {5: [] if waits else [Terminate], 219: [] if waits else [Terminate], 220: [Terminate]}
    assert Terminate in [type(a) for a in plan(want(0), state, [], released, now=5)]  # the fleet goes down


def test_a_notice_that_is_given_long_before_leaves_the_host_its_whole_time():
    noticed = host(1, DRAINING, notice_deadline=600.0, notice_action="terminate", why="maintenance")
    assert plan(want(1), given(UP, noticed), [], NOTHING, now=599) == []
    assert plan(want(1), given(UP, noticed), [], NOTHING, now=600) == [
        Terminate("f-1", "not drained within 120 s: maintenance")]
    assert plan(want(1), given(UP, noticed), [], Observed(released=frozenset({"f-1"})), now=5) == [
        Terminate("f-1", "drained: maintenance")]


def test_a_host_that_never_joins_is_terminated_and_replaced():
    actions = plan(want(1), given(LAUNCHING), [CHEAP], NOTHING, now=600)
    assert actions[0] == Terminate("f-0", "has not joined within 600 s")
    assert launched(actions) == ["zone-a"]
    assert plan(want(1), given(LAUNCHING), [CHEAP], NOTHING, now=599) == []


def test_a_silent_worker_host_is_terminated_and_replaced_but_a_silent_dispatcher_never():
    silent = host(0, UP, silent_since=0.0)
    assert plan(want(1), given(silent), [], NOTHING, now=119) == []
    assert plan(want(1), given(silent), [], NOTHING, now=120)[0] == Terminate(
        "f-0", "its agent has been silent for 120 s")
    dispatcher = given(replace(silent, role=Role.DISPATCHER))
    assert plan(replace(want(1), role=Role.DISPATCHER), dispatcher, [], NOTHING, now=9_999) == []


def test_a_stopped_host_is_replaced_at_once_and_ended_when_it_does_not_come_back():
    assert launched(plan(want(1), given(STOPPED), [CHEAP], NOTHING, now=0)) == ["zone-a"]
    actions = plan(want(1), given(STOPPED, UP), [CHEAP], NOTHING, now=600)
    assert actions == [Terminate("f-0", "stopped by the cloud and not restarted within 600 s")]


def test_a_host_that_the_cloud_restarts_after_it_was_replaced_is_removed():
    revived, replacement = host(0, LAUNCHING, since=50.0), host(1, UP)
    assert plan(want(1), given(revived, replacement), [], NOTHING, now=60) == [
        Terminate("f-0", "2 hosts, 1 wanted")]


def test_surplus_takes_idle_hosts_before_busy_ones_and_then_the_dearest():
    state = given(host(0, UP, offer=DEAR), host(1, UP), host(2, UP, offer=NEAR))
    busy = Observed(busy=frozenset({"f-0"}))
    assert plan(want(1), state, [], busy, now=0) == [
        Drain("f-2", "3 hosts, 1 wanted"), Drain("f-1", "3 hosts, 1 wanted")]
    assert plan(want(2), state, [], NOTHING, now=0) == [Drain("f-0", "3 hosts, 2 wanted")]


def test_surplus_takes_what_the_cloud_may_take_soon_before_what_is_dearer():
    state = given(host(0, UP, hint="rebalance"), host(1, UP, offer=DEAR))
    assert plan(want(1), state, [], NOTHING, now=0) == [Drain("f-0", "2 hosts, 1 wanted")]


def test_down_drains_what_trains_and_terminates_what_does_not():
    assert plan(want(0), given(UP, LAUNCHING, STOPPED), [CHEAP], NOTHING, now=0) == [
        Drain("f-0", "the fleet goes down"),
        Terminate("f-2", "the fleet goes down"), Terminate("f-1", "the fleet goes down")]


def test_an_end_is_asked_for_again_until_the_cloud_lists_it():
    asked = given(UP, host(1, DRAINING, terminate_at=43_200.0))
    assert plan(want(1), asked, [], NOTHING, now=43_209) == []
    assert plan(want(1), asked, [], NOTHING, now=43_210) == [
        Terminate("f-1", "not ended yet, asked at 12:00:00 UTC")]


def test_new_hosts_spread_over_pools_because_one_reclaim_takes_a_whole_pool():
    assert launched(plan(want(4), given(), [CHEAP, NEAR], NOTHING, now=0)) == ["zone-a", "zone-b"] * 2
    assert launched(plan(want(2), given(UP), [CHEAP, NEAR], NOTHING, now=0)) == ["zone-b"]


def test_pools_that_cost_much_more_take_no_part_in_the_spreading():
    either = want(3, Need(), Need(use_spot=False))
    actions = plan(either, given(), [DEAR, CHEAP, FULL], NOTHING, now=0)
    assert [a.offer for a in actions] == [CHEAP] * 3


def test_a_pool_with_a_fresh_loss_is_avoided_while_another_costs_about_the_same():
    state = given(UP, reclaimed_at={CHEAP.pool: 100.0})
    assert launched(plan(want(3), state, [CHEAP, NEAR], NOTHING, now=279)) == ["zone-b", "zone-b"]
    assert launched(plan(want(2), given(reclaimed_at=state.reclaimed_at), [CHEAP, DEAR], NOTHING, now=101)) == [
        "zone-a"] * 2
    assert launched(plan(want(3), state, [CHEAP, NEAR], NOTHING, now=280)) == ["zone-b", "zone-a"]


def test_the_users_order_decides_between_equal_prices_only():
    same = replace(CHEAP, instance_type="g6")
    needs = Need(instance_type="g6"), Need(instance_type="g5")
    first = plan(want(1, *needs), given(), [CHEAP, same], NOTHING, now=0)[0]
    assert first.offer == same
    cheaper = replace(CHEAP, price_micros_h=900_000)
    assert plan(want(1, *needs), given(), [cheaper, same], NOTHING, now=0)[0].offer == cheaper


def test_each_alternative_has_its_own_price_limit():
    needs = Need(zone="zone-a", max_micros_h=900_000), Need(zone="zone-c", max_micros_h=2_000_000)
    assert launched(plan(want(1, *needs), given(), [CHEAP, DEAR], NOTHING, now=0)) == ["zone-c"]


@pytest.mark.parametrize(("scope", "refused"), [
    ("pool", [CHEAP]),
    *((scope, [CHEAP, NEAR]) for scope in ("type", "quota", "region", "account"))])
def test_a_scope_that_refused_is_not_asked_again_until_its_cooldown_ends(scope, refused):
    cooling = given(cooldown_until={scope_keys(CHEAP)[scope]: 300.0})
    assert launched(plan(want(1), cooling, refused, NOTHING, now=299)) == []
    either = want(1, Need(), Need(use_spot=False))
    assert plan(either, cooling, [*refused, FULL], NOTHING, now=299)[0].offer == FULL
    assert launched(plan(want(1), cooling, refused, NOTHING, now=300)) == ["zone-a"]


def test_a_wait_says_what_is_missing_and_until_when():
    cooling = given(UP, cooldown_until={scope_keys(CHEAP)["pool"]: 43_230.0})
    limit = Need(max_micros_h=1_200_000)
    assert plan(want(3, limit), cooling, [CHEAP, NEAR, DEAR], NOTHING, now=43_200) == [
        Wait("2 of 3 hosts missing: pool fake/zone-a/g5/spot refused, asked again at 12:00:30 UTC; the cheapest of 2 "
             "offers above the limit is $1.40/h in fake/zone-b/g5/spot, the limit is $1.20/h")]
    nowhere = want(1, Need(accelerator="V100", region="eu"), Need(instance_type="m6", use_spot=False))
    assert plan(nowhere, given(), [CHEAP], NOTHING, now=0) == [
        Wait("1 host missing: no machine is available that is spot V100:1 eu or on-demand m6; checked again regularly")]


def test_after_a_restart_nothing_is_launched_or_ended_until_all_hosts_have_reported():
    state = given(UP, host(1, UP), host(2, DRAINING, why="old"))
    early = Observed(joined={"f-0": "x"}, released=frozenset({"f-2"}), settle_until=43_215.0)
    assert plan(want(5), state, [CHEAP], early, now=43_200) == [
        Wait("after a restart: waiting for f-1, f-2 to report, until 12:00:15 UTC")]
    assert Terminate("f-2", "drained: old") in plan(want(5), state, [CHEAP], early, now=43_215)
    all_here = replace(early, joined={"f-0": "x", "f-1": "y", "f-2": "z"})
    assert launched(plan(want(5), state, [CHEAP], all_here, now=43_200)) == ["zone-a"] * 3


def test_a_notice_is_heard_while_a_restart_settles():
    state = given(host(0, UP, notice_deadline=0.0), UP)
    observed = Observed(joined={"f-0": "x"}, settle_until=15.0)
    assert plan(want(2), state, [CHEAP], observed, now=0)[0] == Drain(
        "f-0", "interruption notice: it ends at 00:00:00 UTC")


def test_numbers_of_hosts_are_never_used_twice():
    assert [a.request_id for a in plan(want(2), FleetState(launches=7), [CHEAP], NOTHING, now=0)] == ["f-7", "f-8"]
    dispatcher = replace(want(1), role=Role.DISPATCHER)
    assert plan(dispatcher, FleetState(launches=2), [CHEAP], NOTHING, now=0)[0].request_id == "f-d-2"


def test_hosts_of_another_role_do_not_count():
    state = given(replace(host(0, UP), role=Role.DISPATCHER), UP)
    assert launched(plan(want(1), state, [CHEAP], NOTHING, now=0)) == []
    assert launched(plan(want(2), state, [CHEAP], NOTHING, now=0)) == ["zone-a"]


def test_an_offer_matches_a_need_that_says_less():
    assert matches(Need(), CHEAP) and matches(Need(region="r", accelerator="a10g", accelerator_count=1), CHEAP)
    for other in (Need(use_spot=False), Need(zone="zone-b"), Need(region="s"), Need(instance_type="g6"),
                  Need(accelerator="V100"), Need(accelerator="A10G", accelerator_count=2)):
        assert not matches(other, CHEAP), other


def test_an_offer_meets_a_need_up_to_its_limit():
    limits = (0, CHEAP.price_micros_h, CHEAP.price_micros_h - 1)
    assert [meets(Need(max_micros_h=limit), CHEAP) for limit in limits] == [True, True, False]
    assert not meets(Need(zone="zone-b", max_micros_h=limits[1]), CHEAP)


def test_no_more_hosts_are_asked_for_than_there_is_room_for_also_in_dearer_pools():
    one, other, dear = (replace(o, room=1) for o in (CHEAP, NEAR, replace(DEAR, price_micros_h=9_000_000)))
    actions = plan(want(4), given(), [one, other, dear], NOTHING, now=0)
    assert launched(actions) == ["zone-a", "zone-b", "zone-c"]
    assert actions[-1] == Wait("1 of 4 hosts missing: no offer has room for more")
    assert launched(plan(want(4), given(), [replace(one, room=3), dear], NOTHING, now=0)) == [
        "zone-a", "zone-a", "zone-a", "zone-c"]
    rich = plan(want(4, max_micros_h=10**9), given(), [one, other, dear], NOTHING, now=0)
    assert rich[-1] == Wait("1 of 4 hosts missing: no offer has room for more")  # not for want of money
