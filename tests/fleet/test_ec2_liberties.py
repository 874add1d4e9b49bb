"""What ledger and plan make of a cloud that takes the liberties of EC2; see `ec2_like.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.dispatcher.http.revocation import rejection
from spotfleet.errors import NeedsPerson, NoCapacity
from spotfleet.fleet import reconcile
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import (
    HostListed,
    HostPlaced,
    LaunchIntended,
    LaunchRefused,
    event_from_json,
    event_to_json,
)
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.reconcile import Calls, Terminate
from spotfleet.model import SECOND, BillingRules, CloudState, HostState, Run
from spotfleet.providers import LaunchRequest
from tests.support.fleet.ec2_like import ec2_world
from tests.support.fleet.fleet_world import POOLS, Fuse, MemoryLedger, World, market_rules


def check_bill(world: World) -> None:
    world.tick(1)
    invoice, bill = world.market.invoice(world.now), report(world.ledger.rows, world.now)
    assert {h: m for h, m in invoice.hosts.items() if m} == {
        h: m for h in {line.host for line in bill.lines}
        if (m := sum(line.micros for line in bill.lines if line.host == h))}


# ---- the pool that the cloud took


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(0, 10**6), st.lists(st.tuples(
    st.integers(0, 5), st.sampled_from([None, 30.0]), st.sampled_from([1.0, 30.0, 500.0, 4000.0]),
    st.sampled_from(POOLS), st.integers(400_000, 2_000_000)), max_size=6))
def test_the_bill_is_the_clouds_own_whichever_of_the_named_pools_it_took(hosts, seed, losses):
    world = ec2_world(hosts, rules=market_rules(BillingRules(60), capacity=3, boot_s=2.0))
    world.cloud.seed = seed
    world.run(60)
    for victim, notice_s, after_s, pool, micros_h in losses:
        living = sorted(world.living())
        world.market.interrupt(living[victim % len(living)], notice_s, world.now)
        world.market.set_price(pool, micros_h, world.now)
        world.tick(after_s)
        world.run(60)
    check_bill(world)
    assert all(h.offer.pool == world.pool_of(h.request_id) for h in world.state.hosts)


def took_another() -> World:
    """One host, up, in a pool that was an alternative."""
    for seed in range(20):
        world = ec2_world(1)
        world.cloud.seed = seed
        world.run(60)
        if world.count(HostPlaced):
            return world
    raise AssertionError("no seed takes an alternative")


def test_the_ledger_follows_once_with_the_offer_that_was_named_and_spread_counts_what_is_real():
    world = took_another()
    intent = next(e for e in world.ledger.rows if isinstance(e, LaunchIntended))
    placed = [e for e in world.ledger.rows if isinstance(e, HostPlaced)]
    assert len(placed) == 1 and placed[0].offer in intent.alternatives
    world.run(300)
    assert world.count(HostPlaced) == 1
    world.hosts = 3
    world.tick(1)
    begun = [e for e in world.ledger.rows if isinstance(e, LaunchIntended)][1:]
    assert world.pool_of("f-0") not in {o.pool for e in begun for o in (e.offer, *e.alternatives)}


def test_a_launch_whose_answer_is_lost_is_asked_for_again_with_the_very_same_pools():
    world = ec2_world(1)
    world.cloud.faults.lose("launch", "before")
    asked: list[LaunchRequest] = []
    launch = world.cloud.launch
    world.cloud.launch = lambda request: asked.append(request) or launch(request)
    world.tick()
    world.market.set_price(POOLS[0], 1_900_000, world.now)  # by now the plan would name others
    world.run(120)
    assert len(asked) == 2 and asked[0].alternatives and asked[0] == asked[1]
    assert world.up() == world.living() == ["f-0"]


def test_a_ledger_of_before_has_launches_without_alternatives():
    intent = took_another().ledger.rows[1]
    assert isinstance(intent, LaunchIntended) and event_from_json(event_to_json(intent)) == intent
    old = {k: v for k, v in event_to_json(intent).items() if k not in ("alternatives", "together")}
    assert event_from_json(old) == replace(intent, alternatives=())
    refused = event_to_json(LaunchRefused(1.0, "f-0", "pool", "full", POOLS))
    assert event_from_json({k: v for k, v in refused.items() if k != "pools"}) == LaunchRefused(
        1.0, "f-0", "pool", "full")


def test_a_refusal_of_all_named_pools_cools_each_and_the_next_tick_asks_none_of_them():
    world = ec2_world(1)
    asked = []

    def launch(request: LaunchRequest) -> None:
        pools = tuple(o.pool for o in (request.offer, *request.alternatives))
        asked.append(pools)
        raise NoCapacity("no room anywhere", pools=pools)

    world.cloud.launch = launch
    world.run(14, every_s=1.0)
    assert [sorted(pools) for pools in asked] == [sorted(POOLS)]


# ---- a quota that is used up


def test_a_region_without_quota_is_run_into_once_in_a_tick_and_not_again_until_the_cooldown_ends():
    world = ec2_world(8)
    world.calls = Calls(16, scout=True)
    asked = []

    def launch(request: LaunchRequest) -> None:
        asked.append(world.now)
        raise NoCapacity("MaxSpotInstanceCountExceeded", scope="region")

    world.cloud.launch = launch
    began = world.now
    world.run(40, every_s=1.0)
    assert [at - began for at in asked] == [1.0, 16.0]


def test_why_a_region_refuses_and_what_can_be_done_about_it_is_told_until_it_is_asked_again():
    world = ec2_world(2)

    def launch(request: LaunchRequest) -> None:
        raise NoCapacity("0 of 96 vCPUs left", hint="raise quota L-3819A6DF", scope="region")

    world.cloud.launch = launch
    world.tick()
    (wait,) = world.tick(1)
    assert wait.why.endswith(" UTC: 0 of 96 vCPUs left (raise quota L-3819A6DF)")
    refused = next(e for e in world.ledger.rows if isinstance(e, LaunchRefused))
    assert refused.why == "0 of 96 vCPUs left (raise quota L-3819A6DF)"


def test_missing_rights_are_run_into_once_in_a_tick():
    world = ec2_world(8)
    world.calls = Calls(16, scout=True)
    asked = []

    def launch(request: LaunchRequest) -> None:
        asked.append(request.request_id)
        raise NeedsPerson("UnauthorizedOperation")

    world.cloud.launch = launch
    with pytest.raises(NeedsPerson):
        world.tick()
    assert asked == ["f-0"]


def test_a_scout_that_is_accepted_lets_the_others_follow_in_the_same_tick():
    world = ec2_world(3)
    world.calls = Calls(16, scout=True)
    world.tick()
    assert len(world.living()) == 3


# ---- runs that the cloud forgets


def listed_runs(world: World, host: str) -> tuple[Run, ...]:
    return [e for e in world.ledger.rows if isinstance(e, HostListed) and e.request_id == host][-1].runs


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([5.0, 70.0, 900.0]), st.sampled_from([3.0, 61.0, 400.0])), min_size=1,
                max_size=5), st.sampled_from([BillingRules(1), BillingRules(60), BillingRules(60, 300)]))
def test_where_only_the_newest_run_is_listed_the_bill_has_all_that_were_seen_to_stop(stays, billing):
    world = ec2_world(1, behavior="stop", rules=market_rules(billing, capacity=1))
    world.run(60)
    (only,) = world.living()
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    for runs_s, stopped_s in stays:
        world.tick(runs_s)
        if world.market.hosts[only].state is not CloudState.RUNNING:
            break
        world.market.interrupt(only, None, world.now)
        world.tick(1.0)
        world.tick(stopped_s)
        world.market.return_host(only, world.now)
        world.tick(1.0)
    assert len(listed_runs(world, only)) == len(world.market.hosts[only].runs)
    check_bill(world)


def test_a_stop_that_nobody_saw_counts_as_running_until_the_next_start_and_no_longer():
    world = ec2_world(1, behavior="stop", rules=market_rules(BillingRules(1), capacity=1))
    world.run(60)
    (only,) = world.living()
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    world.market.interrupt(only, None, world.now)
    world.clock.advance(300)
    world.market.return_host(only, world.now)
    back_at = world.market.now
    world.tick(10)
    first, second = listed_runs(world, only)
    assert (first.ended_at, second) == (back_at, Run(back_at))
    invoice, bill = world.market.invoice(world.now), report(world.ledger.rows, world.now)
    assert invoice.micros < bill.micros <= invoice.micros * (world.now - first.started_at) / (
        world.now - first.started_at - 300) * 1.3  # prices move meanwhile


def test_a_listing_with_one_run_that_lags_brings_no_stopped_host_to_life():
    world = ec2_world(1, behavior="stop", rules=market_rules(capacity=1))
    world.run(60)
    (only,) = world.living()
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    world.market.interrupt(only, None, world.now)
    world.tick(1)
    world.cloud.faults.listing_lag_s = 30.0
    world.tick(1)
    assert world.state.host(only).state is HostState.STOPPED


# ---- what the cloud brings back


def test_a_host_that_ended_as_we_asked_and_comes_back_is_refused_and_ended_again():
    world = ec2_world(2)
    world.run(60)
    world.asked_to_drain["f-0"] = "asked by its user"
    world.run(60)
    assert world.state.host("f-0").state is HostState.GONE
    assert "has ended" in rejection(world.state, "f-0")
    world.cloud.revive("f-0")
    world.tick(1)
    host = world.state.host("f-0")
    assert (host.state, host.counts, host.revived) == (HostState.DRAINING, False, True)
    assert rejection(world.state, "f-0") == "f-0 had ended, and the cloud has started it again: it is removed"
    world.run(30)
    assert len(world.living()) == 2 and "f-0" not in world.living()
    check_bill(world)


def test_a_host_that_the_cloud_took_and_gives_back_as_another_machine_fills_its_place_or_is_one_too_many():
    world = ec2_world(1)
    world.run(60)
    world.market.interrupt("f-0", None, world.now)
    world.run(60)
    assert world.up() == ["f-1"]
    world.cloud.revive("f-0")
    world.run(60)
    assert len(world.living()) == 1 and len(world.up()) == 1
    world = ec2_world(1)
    world.run(60)
    world.market.interrupt("f-0", None, world.now)
    for pool in POOLS:
        world.market.refuse(pool, "pool", world.now, for_s=30.0)
    world.cloud.revive("f-0")
    world.run(60)
    assert world.up() == ["f-0"]
    check_bill(world)


def test_a_stopped_host_is_waited_for_then_ended_and_what_returns_of_it_afterwards_is_removed():
    world = ec2_world(2, behavior="stop")
    world.run(60)
    world.market.interrupt("f-0", None, world.now)
    world.market.set_capacity(world.pool_of("f-0"), 0, world.now)
    world.run(590)
    assert world.state.host("f-0").state is HostState.STOPPED and len(world.up()) == 2
    world.run(60)
    assert world.state.host("f-0").state is HostState.GONE and "f-0" in world.ends_asked()
    world.cloud.revive("f-0")
    world.run(30)
    assert sorted(world.living()) == sorted(world.up()) and "f-0" not in world.living()
    check_bill(world)


def test_a_second_machine_of_a_host_never_counts_and_is_ended_at_once():
    world = ec2_world(2)
    world.run(60)
    world.cloud.double("f-0")
    second = next(n for n in world.living() if SECOND in n)
    actions = world.tick(1)
    assert [a for a in actions if isinstance(a, Terminate)] == [
        Terminate(second, "a second machine of f-0, which nobody asked for")]
    world.run(30)
    assert sorted(world.living()) == ["f-0", "f-1"] == sorted(world.up())
    world.hosts = 3
    world.tick(1)
    assert "f-2" in world.living()  # its name counts in no numbering
    check_bill(world)


def test_a_host_that_is_listed_as_an_open_request_alone_is_given_up_like_one_that_never_joins():
    world = World(1)
    world.tick()
    lines = world.cloud.hosts
    world.cloud.hosts = lambda fleet: [
        replace(h, provider_id="sir-1", state=CloudState.PENDING, runs=()) if h.request_id == "f-0" else h
        for h in lines(fleet)]
    world.deaf.add("f-0")
    world.run(620)
    assert "f-0" in world.ends_asked() and world.up() == ["f-1"]


def test_the_state_is_that_of_the_ledger_after_all_this():
    world = took_another()
    world.cloud.double("f-0")
    world.run(30)
    assert fold(world.ledger.rows) == world.state
    ledger = MemoryLedger(Fuse())
    ledger.append(*(event_from_json(event_to_json(e)) for e in world.ledger.rows))
    assert ledger.state() == world.state


def test_a_lost_ledger_takes_hosts_over_where_they_are():
    world = took_another()
    world.ledger = MemoryLedger(world.fuse)
    reconcile.create(world.ledger, world.cloud, "f", world.ledger.state().nodes, world.now)
    world.run(60)
    (host,) = world.state.hosts
    assert host.offer.pool == world.pool_of("f-0") and world.up() == ["f-0"]
