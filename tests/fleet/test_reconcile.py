"""What one tick does, on an emulated cloud with a clock of its own; `World` lets hosts boot, join and drain."""

from __future__ import annotations

from itertools import pairwise

import pytest

from spotfleet.errors import NeedsPerson
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import (
    FleetCreated,
    HostDraining,
    HostJoined,
    HostListed,
    HostNoticed,
    HostSilent,
    LaunchIntended,
    LaunchRefused,
    PriceChanged,
)
from spotfleet.fleet.reconcile import (
    Drain,
    Launch,
    NoAnswer,
    Observed,
    Terminate,
    Wait,
    Wanted,
    create,
    leftovers,
    record_listing,
    tick,
)
from spotfleet.model import CloudState, HostState, Need, Nodes, Role
from spotfleet.providers import Boot, LaunchRequest
from tests.support.fleet.fleet_world import POOLS, Killed, World, boot, market_rules


@pytest.fixture
def world() -> World:
    """Three hosts, up."""
    world = World(hosts=3)
    world.run(60)
    assert len(world.up()) == 3
    return world


def test_a_fleet_comes_up_over_its_pools_and_then_rests(world):
    assert sorted(world.pool_of(name) for name in world.up()) == sorted(POOLS)
    rows = len([e for e in world.ledger.rows if not isinstance(e, PriceChanged)])
    assert world.run(300) == []
    assert len([e for e in world.ledger.rows if not isinstance(e, PriceChanged)]) == rows


def test_a_fleet_is_stamped_once_and_again_only_after_its_end(world):
    create(world.ledger, world.cloud, "f", Nodes(1, 3, 9), world.now)
    assert world.count(FleetCreated) == 1
    assert world.ledger.rows[0].billing == world.cloud.billing()


def test_a_noticed_host_is_drained_and_replaced_while_it_still_runs(world):
    world.market.interrupt(world.up()[0], 120.0, world.now)
    actions = world.tick(1)
    assert [type(a) for a in actions] == [Drain, Launch]
    assert len(world.living()) == 4
    assert world.pool_of(actions[1].request_id) != world.pool_of(actions[0].request_id)
    world.run(60)
    assert len(world.up()) == 3 and len(world.living()) == 3


def test_a_notice_is_obeyed_even_while_the_provider_does_not_answer(world):
    world.market.interrupt(world.up()[0], 120.0, world.now)
    world.cloud.answers = False
    actions = world.tick(1)
    assert [type(a) for a in actions] == [Drain, NoAnswer]
    assert actions[1].why == "local: no answer within 30 s; the next tick asks again"
    assert world.count(HostNoticed) == world.count(HostDraining) == 1
    assert [type(a) for a in world.tick(1)] == [NoAnswer]
    world.cloud.answers = True
    assert [type(a) for a in world.tick(1)] == [Launch]


def test_a_notice_that_is_repeated_is_one_notice_and_a_moved_deadline_another(world):
    victim = world.up()[0]
    world.drain_s = 500.0
    world.market.interrupt(victim, 120.0, world.now)
    world.run(30)
    assert world.count(HostNoticed) == 1
    world.market.interrupt(victim, 120.0, world.now)
    world.run(30)
    assert world.count(HostNoticed) == 2


def test_a_rebalance_hint_is_written_once_and_drains_nothing(world):
    world.market.rebalance(world.up()[0], world.now)
    assert world.run(60) == []
    assert world.count(HostNoticed) == 1
    assert world.count(HostDraining) == 0


def test_a_host_that_dies_without_notice_is_replaced_as_soon_as_it_is_listed(world):
    world.market.interrupt(world.up()[0], None, world.now)
    assert [type(a) for a in world.tick(1)] == [Launch]


def test_a_stopped_host_that_returns_after_it_was_replaced_is_removed():
    world = World(hosts=2, behavior="stop")
    world.run(60)
    victim = world.up()[0]
    world.market.interrupt(victim, None, world.now)
    world.run(20)
    assert world.state.host(victim).state is HostState.STOPPED
    assert len(world.living()) == 2
    world.market.return_host(victim, world.now)
    world.run(60)
    assert world.state.host(victim).state is HostState.GONE
    assert len(world.living()) == 2
    assert len(world.state.host(victim).runs) == 2


def test_a_stopped_host_fills_its_own_place_when_nothing_else_can():
    world = World(hosts=1, behavior="stop", rules=market_rules(capacity=1))
    world.run(60)
    (only,) = world.up()
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    world.market.interrupt(only, None, world.now)
    world.run(30)
    world.market.return_host(only, world.now)
    world.run(60)
    assert world.up() == [only] == world.living()
    assert world.state.host(only).incarnation.endswith("/2")


def test_a_launch_whose_answer_is_lost_makes_one_host():
    for when in ("before", "after"):
        world = World(hosts=1)
        world.cloud.faults.lose("launch", when)
        assert [type(a) for a in world.tick()] == [NoAnswer]
        world.run(120)
        assert world.up() == world.living() == ["f-0"]


def test_a_host_that_is_not_listed_yet_is_asked_for_ever_more_seldom():
    world = World(hosts=1, join_s=1000.0)
    world.cloud.faults.listing_lag_s = 100.0
    world.run(100, every_s=1)
    asked = [e.at for e in world.ledger.rows if isinstance(e, LaunchIntended)]
    assert [b - a for a, b in pairwise(asked)] == [5, 10, 20, 40]
    assert world.living() == ["f-0"]


def test_a_refused_pool_cools_down_and_another_is_tried():
    world = World(hosts=2)
    cheapest = world.cloud.offers(Need())[0].pool
    world.market.set_capacity(cheapest, 0, world.now)
    assert Wait(f"f-0 refused: {cheapest}: no room for another host") in world.tick()
    world.tick(1)
    assert {world.pool_of(name) for name in world.living()} == set(POOLS) - {cheapest}
    assert world.count(LaunchRefused) == 1


def test_after_one_refusal_the_same_pool_is_not_asked_again_in_one_tick():
    world = World(hosts=3)
    world.market.refuse(POOLS[0], "type", world.now)
    world.tick()
    assert world.count(LaunchRefused) == world.count(LaunchIntended) == 1


def test_a_lack_of_rights_is_written_down_and_raised():
    world = World(hosts=1)
    world.market.refuse(POOLS[0], "person", world.now)
    with pytest.raises(NeedsPerson):
        world.tick()
    assert [e.scope for e in world.ledger.rows if isinstance(e, LaunchRefused)] == ["account"]
    assert [type(a) for a in world.tick(1)] == [Wait]  # and is not hammered
    world.market.allow(POOLS[0], world.now)
    world.run(120)
    assert len(world.up()) == 1


def test_hosts_that_a_lost_ledger_knew_are_adopted_and_their_numbers_not_used_again(world):
    world.clock.advance(86400)
    world.ledger = type(world.ledger)(world.fuse)
    create(world.ledger, world.cloud, "f", Nodes(1, 3, 9), world.now)
    world.hosts = 4
    world.run(60)
    assert sorted(world.up()) == sorted(world.living()) == ["f-0", "f-1", "f-2", "f-3"]


def test_repeated_and_contradicting_lines_of_a_listing_are_written_once(world):
    rows = world.count(HostListed)
    fresh = world.cloud.hosts("f")
    world.market.interrupt(world.up()[0], None, world.now)
    truth = world.cloud.hosts("f")
    world.cloud.hosts = lambda fleet: [*truth, *fresh, *truth, *fresh]
    world.hosts = 2
    world.run(60)
    assert world.count(HostListed) == rows + 1
    assert len(world.state.hosts) == 2


def test_a_listing_that_falls_behind_brings_no_ended_host_back(world):
    before = world.cloud.hosts("f")
    victim = world.up()[0]
    world.market.interrupt(victim, None, world.now)
    world.tick(1)
    world.cloud.hosts = lambda fleet: before
    world.tick(1)
    assert world.state.host(victim).state is HostState.GONE


def test_a_host_missing_from_two_listings_close_together_is_not_gone(world):
    world.deaf.update(world.up())
    whole = world.cloud.hosts
    world.cloud.hosts = lambda fleet: []
    world.tick(1)
    world.tick(1)
    world.cloud.hosts = whole
    world.deaf.clear()
    assert world.tick(1) == []
    assert len(world.up()) == 3
    assert all(h.missing_since is None for h in world.state.hosts)


def test_a_host_missing_for_long_is_gone_unless_its_agent_speaks(world):
    silent, talking = world.up()[:2]
    world.deaf.add(silent)
    whole = world.cloud.hosts
    world.cloud.hosts = lambda fleet: [h for h in whole(fleet) if h.request_id not in (silent, talking)]
    began = world.now
    world.run(12, every_s=1)
    assert world.state.host(talking).state is HostState.UP
    lost = world.state.host(silent)
    assert (lost.state, lost.runs[0].ended_at) == (HostState.GONE, began + 1)


def test_a_host_that_was_never_listed_is_waited_for_until_its_launch_is_given_up():
    world = World(hosts=1, join_s=10_000.0)
    whole = world.cloud.hosts
    world.cloud.hosts = lambda fleet: [h for h in whole(fleet) if h.request_id != "f-0"]
    world.run(590)
    assert [h.request_id for h in world.state.hosts] == ["f-0"]
    world.run(100)
    assert world.state.host("f-0").why == "was never listed by the provider"
    assert world.living() == ["f-1"]


def test_a_host_given_up_too_early_is_surplus_when_it_is_seen_again(world):
    lost = world.up()[0]
    world.deaf.add(lost)
    whole = world.cloud.hosts
    world.cloud.hosts = lambda fleet: [h for h in whole(fleet) if h.request_id != lost]
    world.run(60)
    assert len(world.living()) == 4
    world.cloud.hosts = whole
    world.run(60)
    assert lost not in world.living() and len(world.up()) == len(world.living()) == 3


def test_an_agent_that_falls_silent_is_written_once_and_replaced_after_its_time(world):
    victim = world.up()[0]
    world.deaf.add(victim)
    world.run(100)
    assert world.count(HostSilent) == 1 and victim in world.up()
    world.run(60)
    assert victim not in world.living() and len(world.up()) == 3


def test_an_agent_that_comes_back_ends_its_silence(world):
    world.deaf.add(world.up()[0])
    world.run(100)
    world.deaf.clear()
    world.run(300)
    assert world.count(HostJoined) == 4 and world.count(HostSilent) == 1
    assert sorted(world.up()) == ["f-0", "f-1", "f-2"]


def test_after_a_restart_the_fleet_rests_until_all_have_reported(world):
    world.deaf.update(world.up())
    world.hosts, world.settle_until = 5, world.now + 16
    assert [type(a) for a in world.tick(1)] == [Wait]
    assert world.count(HostSilent) == 0
    world.deaf.clear()
    assert [type(a) for a in world.tick(1)] == [Launch, Launch]


def test_every_change_of_price_is_written_with_the_clouds_time_also_after_days(world):
    world.clock.advance(5 * 86400)
    world.tick()
    for name in world.up():
        pool, run = world.pool_of(name), world.state.host(name).runs[0]
        truth = world.cloud.prices([pool], run.started_at)
        seen = [(e.at, e.micros_h) for e in world.ledger.rows if isinstance(e, PriceChanged) and e.pool == pool]
        assert seen == [(p.at, p.micros_h) for p in truth]
        assert len(seen) > 300


def test_a_run_that_began_before_the_oldest_known_price_of_its_pool_is_billed_right():
    world = World(hosts=1, rules=market_rules(period_s=60))
    for pool in POOLS[1:]:
        world.market.set_capacity(pool, 0, world.now)
    (offer,) = world.cloud.offers(Need(zone="a"))
    world.cloud.launch(LaunchRequest("f-7", "f", Role.WORKER, offer, Boot("")))  # by a ledger that was lost
    whole = world.cloud.hosts
    world.cloud.hosts = lambda fleet: [h for h in whole(fleet) if h.request_id != "f-7"]
    world.clock.advance(5000)
    world.run(600)
    assert len(world.up()) == 1 and world.up() != ["f-7"]
    world.hosts, world.cloud.hosts = 2, whole
    world.run(60)
    assert "f-7" in world.up()
    assert report(world.ledger.rows, world.now).micros == world.market.invoice(world.now).micros


def test_a_look_writes_the_newest_prices_and_changes_no_machine(world):
    world.hosts = 5
    world.clock.advance(86400)
    record_listing(world.wanted(), world.ledger, world.cloud, world.now)
    assert len(world.living()) == 3
    assert report(world.ledger.rows, world.now).micros == world.market.invoice(world.now).micros


def test_the_intent_to_end_a_host_is_written_before_the_cloud_hears_of_it(world):
    def die(request_id: str) -> None:
        raise Killed

    world.cloud.terminate = die
    world.asked_to_drain["f-0"] = "asked by its user"
    world.tick(1)
    with pytest.raises(Killed):
        world.tick(30)
    assert world.ends_asked() == {"f-0"}


def test_a_pool_whose_price_rests_does_not_fetch_the_history_of_the_others():
    world = World(hosts=1)
    world.run(60)
    world.hosts = 2
    world.run(86400, every_s=600)
    asked = []
    prices = world.cloud.prices
    world.cloud.prices = lambda pools, since: asked.append(prices(pools, since)) or asked[-1]
    world.tick(1)
    assert sum(len(points) for points in asked) <= 4


def test_down_drains_before_it_ends_and_leaves_nothing(world):
    world.hosts = 0
    assert [type(a) for a in world.tick(1)] == [Drain, Drain, Drain]
    assert world.tick(1) == []
    assert [type(a) for a in world.tick(9)] == [Terminate, Terminate, Terminate]
    assert world.tick(1) == []
    assert leftovers(world.cloud, "f") == []
    assert world.state.hosts == ()


def test_leftovers_name_stopped_hosts_too():
    world = World(hosts=1, behavior="stop")
    world.run(60)
    world.market.interrupt("f-0", None, world.now)
    assert [(h.request_id, h.state) for h in leftovers(world.cloud, "f")] == [("f-0", CloudState.STOPPED)]
    assert leftovers(world.cloud, "f", Role.DISPATCHER) == []


def test_two_processes_that_reconcile_one_fleet_make_one_set_of_hosts():
    world = World(hosts=2)
    laptop = World(hosts=2)
    laptop.clock, laptop.cloud, laptop.market = world.clock, world.cloud, world.market
    world.tick()
    laptop.tick()  # knows nothing of what the other has just written
    assert world.living() == ["f-0", "f-1"]


def test_a_dispatcher_and_its_workers_never_touch_each_other(world):
    wanted = Wanted("f", Role.DISPATCHER, 1, (Need(use_spot=False),))
    ledger = type(world.ledger)()
    create(ledger, world.cloud, "f", Nodes(), world.now)
    for _ in range(2):
        tick(wanted, ledger, world.cloud, boot, Observed(), world.now)
    assert [h.request_id for h in ledger.state().hosts] == ["f-d-0"]
    tick(Wanted("f", Role.DISPATCHER, 0), ledger, world.cloud, boot, Observed(), world.now)
    assert world.run(60) == []
    assert world.living() == world.up()
