"""In which pools new hosts are asked for: alternatives, fleets in one place, fleets that come whole or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given as given_any
from hypothesis import settings
from hypothesis import strategies as st

from spotfleet.fleet.domain.events import LaunchIntended, LaunchRefused
from spotfleet.fleet.domain.state import fold, scope_keys
from spotfleet.fleet.planner.plan import Drain, Launch, Terminate, Wait, plan
from spotfleet.fleet.planner.pool_choice import NAMED, SPREAD_WITHIN
from spotfleet.model import HostState, Market, Need, Offer, Role
from tests.fleet.test_plan import CHEAP, FULL, LAUNCHING, NOTHING, UP, given, host, want

ZONES = [replace(CHEAP, zone=f"zone-{z}", price_micros_h=1_000_000 + n * 50_000) for n, z in enumerate("abcdef")]
A, B, C, D, E, F = ZONES
EITHER = Need(), Need(use_spot=False)


def named(actions: list) -> list[tuple[str, str]]:
    """Of each launch its own zone, and the others'."""
    return [(a.offer.zone[-1], "".join(o.zone[-1] for o in a.alternatives)) for a in actions if isinstance(a, Launch)]


# ---- alternatives


def test_alternatives_in_order_are_used_by_that_order_and_a_later_one_only_while_the_cloud_refuses_those_before():
    dear = [Need(zone="zone-c"), Need(zone="zone-b", turn=1), Need(zone="zone-a", turn=2)]
    first, = plan(want(1, *dear), given(), [A, B, C], NOTHING, now=0)
    assert first.offer == C and first.why.endswith("in fake/zone-c/g5/spot, number 1 of 3") and not first.alternatives
    refused = given(cooldown_until={scope_keys(C)["pool"]: 300.0})
    assert named(plan(want(1, *dear), refused, [A, B, C], NOTHING, now=299)) == [("b", "")]
    assert named(plan(want(1, *dear), refused, [A, B, C], NOTHING, now=301)) == [("c", "")]


def test_a_launch_names_the_other_pools_that_are_as_good_the_cheapest_first():
    assert named(plan(want(1), given(), [C, A, B], NOTHING, now=0)) == [("a", "bc")]


def test_launches_of_one_tick_share_the_pools_so_that_hosts_spread_whatever_the_cloud_takes():
    assert named(plan(want(2), given(), ZONES, NOTHING, now=0)) == [("a", "ce"), ("b", "df")]
    assert named(plan(want(3), given(), [A, B], NOTHING, now=0)) == [("a", ""), ("b", ""), ("a", "")]


def test_a_pool_with_more_hosts_than_the_launchs_own_is_no_alternative():
    assert named(plan(want(2), given(UP), [A, B, C], NOTHING, now=0)) == [("b", "c")]
    assert named(plan(want(3), given(UP, host(1, UP, offer=B)), [A, B], NOTHING, now=0)) == [("a", "b")]


def test_a_pool_that_was_reclaimed_a_moment_ago_or_refuses_is_no_alternative():
    burnt = given(reclaimed_at={B.pool: 100.0})
    assert named(plan(want(1), burnt, [A, B, C], NOTHING, now=279)) == [("a", "c")]
    assert named(plan(want(1), burnt, [A, B, C], NOTHING, now=280)) == [("a", "bc")]
    cooling = given(cooldown_until={scope_keys(C)["pool"]: 300.0})
    assert named(plan(want(1), cooling, [A, B, C], NOTHING, now=299)) == [("a", "b")]


def test_the_replacement_of_a_noticed_host_names_no_pool_from_which_hosts_are_just_taken():
    state = given(host(0, UP, offer=A, notice_deadline=220.0), host(1, UP, offer=B), reclaimed_at={A.pool: 100.0})
    actions = plan(want(2), state, [A, B, C, D], NOTHING, now=101)
    assert [type(a) for a in actions] == [Drain, Launch] and named(actions) == [("c", "d")]


@pytest.mark.parametrize("other", [
    replace(B, region="s"), replace(B, market=Market.ON_DEMAND), replace(B, slots=8), replace(B, accelerator=""),
    replace(B, provider="other"), replace(B, price_micros_h=1_500_001), replace(B, room=1)],
    ids=["region", "market", "slots", "no accelerator", "provider", "price", "counted room"])
def test_an_alternative_is_alike_and_costs_about_the_same(other: Offer):
    assert named(plan(want(1, *EITHER), given(), [A, other], NOTHING, now=0)) == [("a", "")]


def test_at_most_ten_pools_are_named():
    many = [replace(A, instance_type=f"g{n:02d}") for n in range(30)]
    launch = plan(want(1), given(), many, NOTHING, now=0)[0]
    assert 1 + len(launch.alternatives) == NAMED == 10


offers = st.builds(
    lambda zone, kind, price, market, slots, room: Offer("fake", "r", zone, kind, market, slots, price, 3_000_000,
                                                         "A10G", room),
    st.sampled_from("abcd"), st.sampled_from(["g5", "g6"]), st.integers(900_000, 2_500_000),
    st.sampled_from([Market.SPOT, Market.SPOT, Market.ON_DEMAND]), st.sampled_from([1, 1, 4]),
    st.sampled_from([0, 0, 0, 2]))


@settings(max_examples=200, deadline=None)
@given_any(st.lists(offers, max_size=12, unique_by=lambda o: o.pool), st.integers(1, 6),
           st.lists(st.integers(0, 11), max_size=3), st.sampled_from(["spread", "zone", "cluster"]), st.data())
def test_whatever_is_on_offer_alternatives_are_good_and_named_once(on_offer, hosts, burnt, placement, data):
    up = [host(n, UP, offer=data.draw(st.sampled_from(on_offer)))
          for n in range(data.draw(st.integers(0, hosts)) if on_offer and placement == "spread" else 0)]
    state = given(*up, reclaimed_at={on_offer[n].pool: 0.0 for n in burnt if n < len(on_offer)})
    launches = [a for a in plan(want(hosts, *EITHER, placement=placement), state, on_offer, NOTHING, now=1)
                if isinstance(a, Launch)]
    others = Counter(o.pool for a in launches for o in a.alternatives)
    assert max(others.values(), default=0) <= 1
    assert not others.keys() & ({a.offer.pool for a in launches} | state.reclaimed_at.keys())
    cheapest = min((o.price_micros_h for o in on_offer), default=0)
    for launch in launches:
        assert len(launch.alternatives) < NAMED
        for other in launch.alternatives:
            assert (other.market, other.slots, other.room) == (launch.offer.market, launch.offer.slots, 0)
            assert other.price_micros_h <= cheapest * SPREAD_WITHIN or placement != "spread"
    if placement != "spread":
        assert len({a.offer.zone for a in launches} | {o.zone for a in launches for o in a.alternatives}) <= 1
    if placement == "cluster":
        assert len({a.offer.pool for a in launches}) <= 1 and not others


# ---- a refusal of several pools at once


def test_every_pool_that_refused_cools_down_and_only_those():
    offers = (A, B, C)
    events = [LaunchIntended(0.0, "f-0", Role.WORKER, A, "", (B, C)),
              LaunchRefused(0.0, "f-0", "pool", "full", (A.pool, C.pool))]
    state = fold(events)
    assert named(plan(want(1), state, offers, NOTHING, now=1)) == [("b", "")]
    only_first = fold([events[0], LaunchRefused(0.0, "f-0", "pool", "full")])
    assert named(plan(want(1), only_first, offers, NOTHING, now=1)) == [("b", "c")]


def test_a_refusal_of_a_type_is_one_of_the_types_of_the_pools_that_refused():
    other = replace(B, instance_type="g6")
    events = [LaunchIntended(0.0, "f-0", Role.WORKER, A, "", (other,)),
              LaunchRefused(0.0, "f-0", "type", "none", (other.pool,))]
    assert fold(events).cooldown_until.keys() == {scope_keys(other)["type"]}


# ---- one place for all


@pytest.mark.parametrize("placement", ["zone", "cluster"])
def test_a_fleet_that_stays_together_takes_the_cheapest_place_for_all(placement):
    actions = plan(want(3, placement=placement), given(), [B, A, C], NOTHING, now=0)
    assert named(actions) == [("a", "")] * 3


def test_in_one_zone_several_types_share_the_hosts_but_a_cluster_is_of_one():
    two = [A, replace(A, instance_type="g6", price_micros_h=1_100_000), B]
    assert {a.offer.instance_type for a in plan(want(2, placement="zone"), given(), two, NOTHING, now=0)} == {
        "g5", "g6"}
    assert {a.offer.instance_type for a in plan(want(2, placement="cluster"), given(), two, NOTHING, now=0)} == {"g5"}


def test_the_next_place_is_tried_while_nobody_lives_in_the_one_that_refuses():
    refused = given(cooldown_until={scope_keys(A)["pool"]: 300.0})
    assert named(plan(want(2, placement="zone"), refused, [A, B], NOTHING, now=0)) == [("b", ""), ("b", "")]


def test_what_is_lost_is_replaced_where_the_others_are_though_it_is_dearer_there():
    state = given(host(0, UP, offer=C), host(1, LAUNCHING, offer=C))
    assert named(plan(want(3, placement="zone"), state, [A, B, C], NOTHING, now=0)) == [("c", "")]


def test_while_that_place_refuses_the_others_wait_and_say_for_what():
    state = given(host(0, UP, offer=C), cooldown_until={scope_keys(C)["pool"]: 43_230.0})
    assert plan(want(3, placement="zone"), state, [A, B, C], NOTHING, now=43_200) == [
        Wait("2 of 3 hosts missing: they must be in zone zone-c, where f-0 is: pool fake/zone-c/g5/spot refused, "
             "asked again at 12:00:30 UTC")]
    assert plan(want(2, placement="cluster"), state, [A], NOTHING, now=43_200) == [
        Wait("1 of 2 hosts missing: they must be in pool fake/zone-c/g5/spot, where f-0 is: no machine is available "
             "that is spot; checked again regularly")]


def test_a_place_whose_hosts_are_all_taken_binds_nobody_any_more():
    state = given(host(0, UP, offer=C, notice_deadline=100.0), host(1, HostState.DRAINING, offer=C),
                  reclaimed_at={C.pool: 0.0})
    assert named(plan(want(2, placement="zone"), state, [A, C], NOTHING, now=1)) == [("a", ""), ("a", "")]


def test_a_host_that_comes_back_elsewhere_is_ended_since_it_is_of_no_use_there():
    state = given(host(0, LAUNCHING, offer=A), host(1, UP, offer=B), host(2, UP, offer=B))
    why = "it is in zone zone-a, the fleet in zone zone-b"
    assert plan(want(3, placement="zone"), state, [A, B], NOTHING, now=0)[0] == Terminate("f-0", why)
    up = given(host(0, UP, offer=A), host(1, UP, offer=B), host(2, UP, offer=B))
    assert plan(want(3, placement="zone"), up, [A, B], NOTHING, now=0)[0] == Drain("f-0", why)
    assert plan(want(3), state, [A, B], NOTHING, now=0) == []


# ---- all or nothing


def test_a_fleet_that_comes_whole_is_asked_for_in_one_pool_at_once():
    actions = plan(want(3, all_or_nothing=True), given(), [B, A], NOTHING, now=0)
    names = ("f-0", "f-1", "f-2")
    assert actions == [Launch(name, A, "all 3 hosts or none; $1.00/h in fake/zone-a/g5/spot", (), names)
                       for name in names]


def test_it_is_asked_for_where_there_may_be_room_for_all_or_not_at_all():
    small = replace(A, room=2)
    assert {a.offer for a in plan(want(3, all_or_nothing=True), given(), [small, B], NOTHING, now=0)} == {B}
    assert plan(want(3, all_or_nothing=True), given(), [small], NOTHING, now=0) == [
        Wait("3 of 3 hosts missing: no pool on offer has room for all of them")]


def test_once_it_is_there_what_is_lost_is_replaced_one_by_one():
    actions = plan(want(3, all_or_nothing=True), given(UP, UP), [A, B], NOTHING, now=0)
    assert named(actions) == [("b", "")] and actions[0].together == ()


def test_what_came_of_a_fleet_that_was_refused_in_part_is_given_back_and_the_whole_asked_for_elsewhere():
    together = ("f-0", "f-1", "f-2")
    rows = [LaunchIntended(0.0, name, Role.WORKER, A, "", (), together) for name in together]
    state = fold([*rows, LaunchRefused(0.0, "f-1", "pool", "full")])
    actions = plan(want(3, all_or_nothing=True), state, [A, B], NOTHING, now=1)
    assert actions[:2] == [Terminate("f-0", "all or none: f-1 was refused"),
                           Terminate("f-2", "all or none: f-1 was refused")]
    assert [(a.request_id, a.offer) for a in actions[2:]] == [("f-3", B), ("f-4", B), ("f-5", B)]


def test_on_demand_and_spot_are_never_named_together():
    assert named(plan(want(1, *EITHER), given(), [A, FULL], NOTHING, now=0)) == [("a", "")]
