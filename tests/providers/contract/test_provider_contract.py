"""The contract of spotfleet/providers/__init__.py, point by point, for every provider."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest

from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import BillingRules, CloudHost, CloudState, Market, Need, Offer, Role
from spotfleet.providers import DISPATCHER_TAG, Boot, CloudClock
from tests.support.contract.provider_worlds import World, needs, request, until


def an_offer(world: World) -> Offer:
    return world.provider().offers(world.need())[0]


def launched(world: World, request_id: str = "f-1", **more) -> CloudHost:
    """A host that runs, as listed."""
    world.provider().launch(request(an_offer(world), request_id, **more))
    until(world, lambda: request_id in world.machines())
    until(world, lambda: the_line(world, request_id).state is CloudState.RUNNING)
    return the_line(world, request_id)


def the_line(world: World, request_id: str = "f-1", fleet: str = "f") -> CloudHost:
    return next(h for h in world.provider().hosts(fleet) if h.request_id == request_id)


def ended(world: World, request_id: str = "f-1") -> CloudHost:
    until(world, lambda: the_line(world, request_id).state is CloudState.TERMINATED)
    return the_line(world, request_id)


# the time


def test_a_cloud_with_a_clock_gives_the_time_by_which_it_bills(world: World):
    provider = world.provider()
    if not isinstance(provider, CloudClock):
        pytest.skip("does not apply: this provider has no clock")
    began_at = launched(world).runs[0].started_at
    now = provider.cloud_time()
    assert began_at - 2.0 <= now < began_at + 600.0
    assert now <= world.provider().cloud_time() < now + 600.0


# what is sold


def test_offers_satisfy_the_need_at_a_price(world: World):
    offers = world.provider().offers(world.need())
    assert offers
    market = Market.SPOT if world.need().use_spot else Market.ON_DEMAND
    for offer in offers:
        assert offer.market is market and offer.slots > 0
        assert 0 < offer.price_micros_h <= offer.on_demand_micros_h


def test_nothing_is_offered_for_a_need_that_nothing_satisfies(world: World):
    assert world.provider().offers(replace(world.need(), instance_type="no.such.type")) == []
    assert world.provider().offers(replace(world.need(), max_micros_h=1)) == []


def test_a_dispatcher_can_be_had_on_demand(world: World):
    offers = world.provider().offers(Need(use_spot=False))
    assert offers and all(o.market is Market.ON_DEMAND and o.price_micros_h == o.on_demand_micros_h for o in offers)


def test_a_provider_that_can_launch_passes_its_check_and_has_billing_rules(world: World):
    world.provider().check()
    assert isinstance(world.provider().billing(), BillingRules)


# 1: launch


def test_a_launch_asked_for_twice_makes_one_host(world: World):
    offer = an_offer(world)
    for _ in range(2):
        world.provider().launch(request(offer))
    until(world, lambda: bool(world.machines()))
    assert world.machines() == ["f-1"] and len(world.provider().hosts("f")) == 1


def test_a_launch_asked_for_by_many_at_once_makes_one_host(world: World):
    offer, failed = an_offer(world), []

    def ask() -> None:
        try:
            world.provider().launch(request(offer))
        except SpotfleetError as error:
            failed.append(error)

    callers = [Thread(target=ask) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    until(world, lambda: bool(world.machines()))
    assert not failed and world.machines() == ["f-1"] and len(world.provider().hosts("f")) == 1


def test_a_launch_whose_answer_is_lost_is_asked_for_again_without_harm(world: World):
    offer = an_offer(world)
    world.lose("launch", "after")
    with pytest.raises((OSError, SpotfleetError)):
        world.provider().launch(request(offer))
    until(world, lambda: world.machines() == ["f-1"])
    world.provider().launch(request(offer))
    assert world.machines() == ["f-1"] and len(world.provider().hosts("f")) == 1


def test_a_launch_that_never_arrived_can_be_asked_for_again(world: World):
    offer = an_offer(world)
    world.lose("launch", "before")
    with pytest.raises((OSError, SpotfleetError)):
        world.provider().launch(request(offer))
    assert world.provider().hosts("f") == []
    world.provider().launch(request(offer))
    until(world, lambda: world.machines() == ["f-1"])


def test_a_launch_asked_for_again_after_the_end_makes_no_second_host(world: World):
    offer = an_offer(world)
    world.provider().launch(request(offer))
    world.provider().terminate("f-1")
    line = ended(world)
    world.provider().launch(request(offer))
    world.let_pass(0.3)
    assert world.machines() == [] and the_line(world) == line


def test_a_refused_launch_says_its_scope_and_leaves_no_host(world: World):
    offer = an_offer(world)
    world.full(offer.pool)
    with pytest.raises(NoCapacity) as caught:
        world.provider().launch(request(offer))
    assert caught.value.scope in ("pool", "type", "region", "account") and caught.value.hint
    assert world.provider().hosts("f") == [] and world.machines() == []


def test_a_launch_that_a_person_must_allow_says_what_to_do_and_leaves_no_host(world: World):
    offer = an_offer(world)
    world.wants_a_person(offer.pool)
    with pytest.raises(NeedsPerson) as caught:
        world.provider().launch(request(offer))
    assert caught.value.hint
    assert world.provider().hosts("f") == [] and world.machines() == []


# 2: tags


def test_a_host_belongs_to_its_fleet_from_the_moment_it_exists(world: World):
    offer = an_offer(world)
    world.provider().launch(request(offer, fleet="f"))
    line = the_line(world)
    assert (line.fleet, line.role, line.offer.pool) == ("f", Role.WORKER, offer.pool)
    assert line.provider_id and line.offer.price_micros_h > 0
    assert world.provider().hosts("another") == []


# 3: hosts


def test_a_running_host_has_one_open_run_and_an_ended_one_a_closed_run(world: World):
    line = launched(world)
    assert [r.ended_at for r in line.runs] == [None] and line.address
    world.let_pass(0.2)
    world.provider().terminate("f-1")
    after = ended(world)
    assert [r.started_at for r in after.runs] == [r.started_at for r in line.runs]
    assert after.runs[-1].ended_at > after.runs[-1].started_at and not after.runs[-1].taken
    assert after.provider_id == line.provider_id and world.machines() == []


def test_a_late_and_repetitive_listing_tells_the_truth_in_the_end(world: World):
    launched(world)
    times = world.lag(0.5, duplicates=1)
    world.provider().terminate("f-1")
    until(world, lambda: {h.state for h in world.provider().hosts("f")} == {CloudState.TERMINATED})
    lines = world.provider().hosts("f")
    assert len(lines) == times and len(set(map(repr, lines))) == 1


# 4: terminate


def test_terminating_an_unknown_or_ended_host_is_no_error(world: World):
    launched(world)
    world.provider().terminate("no-such-host")
    world.provider().terminate("f-1")
    line = ended(world)
    world.provider().terminate("f-1")
    assert the_line(world) == line


def test_a_terminate_whose_answer_is_lost_has_still_happened(world: World):
    launched(world)
    world.lose("terminate", "after")
    with pytest.raises((OSError, SpotfleetError)):
        world.provider().terminate("f-1")
    assert not ended(world).runs[-1].taken


def test_terminating_one_host_leaves_the_others(world: World):
    """The name of one of them has a group of hosts in it."""
    launched(world, "f-1")
    launched(world, "f-gpu-2")
    world.provider().terminate("f-gpu-2")
    assert ended(world, "f-gpu-2").role is Role.WORKER
    assert world.machines() == ["f-1"] and the_line(world, "f-1").state is CloudState.RUNNING


# 5: prices


def test_prices_begin_with_the_one_in_force_and_list_later_changes_oldest_first(world: World):
    needs(world, "past prices")
    line = launched(world)
    since = line.runs[-1].started_at
    world.let_pass(0.2)
    for micros_h in (1_234_567, 2_345_678):
        world.move_price(line.offer.pool, micros_h)
        world.let_pass(0.2)
    points = world.provider().prices([line.offer.pool], since)
    assert points[0].at <= since and all(p.at > since for p in points[1:])
    assert [p.at for p in points] == sorted(p.at for p in points)
    assert [p.micros_h for p in points][-2:] == [1_234_567, 2_345_678]
    assert an_offer_of(world, line.offer.pool).price_micros_h == 2_345_678


def an_offer_of(world: World, pool: str) -> Offer:
    return next(o for o in world.provider().offers(world.need()) if o.pool == pool)


def test_prices_are_told_for_each_pool_that_is_asked_for(world: World):
    line = launched(world)
    pools = [o.pool for o in world.provider().offers(world.need())][:3]
    since = line.runs[-1].started_at
    points = world.provider().prices(pools, since)
    assert {p.pool for p in points} == set(pools)
    for pool in pools:
        assert next(p for p in points if p.pool == pool).at <= since


def test_a_price_once_told_does_not_change(world: World):
    needs(world, "past prices")
    line = launched(world)
    since, pool = line.runs[-1].started_at, line.offer.pool
    before = world.provider().prices([pool], since)
    world.move_price(pool, 1_234_567)
    assert world.provider().prices([pool], since)[: len(before)] == before


# 6: no state in the process; and chaos


def test_what_one_client_launched_another_sees_interrupts_and_ends(world: World):
    needs(world, "interruptions")
    launched(world, "f-1")
    launched(world, "f-2")
    stranger = world.provider()
    assert {h.request_id for h in stranger.hosts("f")} == {"f-1", "f-2"}
    stranger.interrupt("f-1", None)
    stranger.terminate("f-2")
    assert ended(world, "f-1").runs[-1].taken and not ended(world, "f-2").runs[-1].taken


def test_an_interrupted_host_runs_through_its_notice_and_is_taken(world: World):
    needs(world, "interruptions")
    line = launched(world)
    world.provider().interrupt("f-1", 1.0)
    assert the_line(world).state is CloudState.RUNNING
    after = ended(world)
    assert after.runs[-1].taken and after.why
    assert after.runs[-1].ended_at - line.runs[-1].started_at >= 1.0
    assert world.machines() == []


def test_a_host_interrupted_without_notice_is_gone_at_once(world: World):
    needs(world, "interruptions")
    launched(world)
    world.provider().interrupt("f-1", None)
    assert ended(world).runs[-1].taken and world.machines() == []


def test_an_interrupted_host_that_asked_to_be_stopped_is_not_terminated(world: World):
    world.stops_hosts()
    launched(world, interruption_behavior="stop")
    world.provider().interrupt("f-1", None)
    until(world, lambda: the_line(world).state is CloudState.STOPPED)
    assert the_line(world).runs[-1].taken and world.machines() == []
    world.provider().terminate("f-1")
    ended(world)


def test_interrupting_a_host_that_does_not_exist_is_an_error(world: World):
    with pytest.raises(SpotfleetError, match="no-such-host"):
        world.provider().interrupt("no-such-host", None)


# 6: tags and boot files


def test_a_host_keeps_what_it_was_told_at_birth(world: World):
    needs(world, "boot files")
    offer = an_offer(world)
    told = replace(request(offer), boot=Boot("idle_host", {"boot.json": '{"a": 1}'}))
    world.provider().launch(told)
    until(world, lambda: bool(world.machines()))
    assert world.provider().boot_files("f-1") == {"boot.json": '{"a": 1}'}


def test_tags_are_set_beside_those_that_are_there(world: World):
    needs(world, "tags after a launch")
    launched(world, tags={"team": "vision"})
    world.provider().tag("f-1", {DISPATCHER_TAG: "https://10.0.0.1:1"})
    world.provider().tag("f-1", {"more": "x"})
    told = {key: world.tag("f-1", key) for key in ("team", DISPATCHER_TAG, "more", "none")}
    assert told == {"team": "vision", DISPATCHER_TAG: "https://10.0.0.1:1", "more": "x", "none": ""}


@pytest.mark.parametrize("ask", ["tag", "boot_files"])
def test_an_unknown_host_has_neither_tags_nor_boot_files(world: World, ask):
    with pytest.raises(UsageError, match="f-9"):
        world.provider().tag("f-9", {"a": "b"}) if ask == "tag" else world.provider().boot_files("f-9")


def test_the_listing_of_no_fleet_in_particular_is_that_of_all(world: World):
    offer = an_offer(world)
    world.provider().launch(request(offer, "f-1", "f"))
    world.provider().launch(request(an_offer(world), "g-1", "g"))
    until(world, lambda: len(world.machines()) == 2)
    until(world, lambda: {h.fleet for h in world.provider().hosts("")} == {"f", "g"})
