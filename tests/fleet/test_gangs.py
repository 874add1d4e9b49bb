"""Fleets that come whole or not at all, and fleets that stay in one place, on an emulated cloud."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.errors import NoCapacity, SpotfleetError
from spotfleet.fleet.reconcile import Calls, Wait
from spotfleet.model import HostState, Market
from spotfleet.providers import LaunchRequest
from tests.fleet.test_ec2_liberties import check_bill
from tests.support.fleet.ec2_like import Ec2Cloud
from tests.support.fleet.fleet_world import GPU, POOLS, Killed, World, market_rules


class GangCloud(Ec2Cloud):
    """Launches several hosts together or none."""

    def launch_together(self, requests: Sequence[LaunchRequest]) -> None:
        def act(now: float) -> None:
            pool = requests[0].offer.pool
            new = [r for r in requests if r.request_id not in self.market.hosts]
            if new and self.market.free(pool) < len(new):
                raise NoCapacity(f"{pool}: no room for {len(new)} more", pools=(pool,))
            for request in new:
                super(GangCloud, self).launch(replace(request, alternatives=()))

        self.fuse.burn(lambda: self._call("launch", act))


def gang_world(hosts: int, cloud: type[Ec2Cloud], capacity: int = 4) -> World:
    return World(hosts, rules=market_rules(capacity=capacity), cloud_type=cloud, all_or_nothing=True)


@pytest.mark.parametrize("cloud", [GangCloud, Ec2Cloud], ids=["together", "one by one"])
def test_a_fleet_comes_whole_in_the_first_pool_that_has_room_for_all(cloud):
    world = gang_world(4, cloud)
    for pool, room in zip(POOLS, (3, 2, 4), strict=True):
        world.market.set_capacity(pool, room, world.now)
    world.run(300)
    assert len(world.up()) == 4 and {world.pool_of(n) for n in world.up()} == {POOLS[2]}
    assert len(world.living()) == 4
    check_bill(world)


@pytest.mark.parametrize("cloud", [GangCloud, Ec2Cloud], ids=["together", "one by one"])
def test_while_no_pool_has_room_for_all_none_is_kept(cloud):
    world = gang_world(4, cloud, capacity=3)
    world.run(900)
    assert world.up() == []
    world.run(30)
    assert world.living() == [] or cloud is Ec2Cloud  # asked for anew a moment ago, where they come one by one
    actions = world.run(1, every_s=1)
    assert any(isinstance(a, Wait) for a in actions) or cloud is Ec2Cloud
    world.market.set_capacity(POOLS[1], 4, world.now)
    world.run(1300)
    assert len(world.up()) == 4 and {world.pool_of(n) for n in world.up()} == {POOLS[1]}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gang_whose_answer_is_lost_is_asked_for_again_as_a_whole_and_comes_once(when):
    world = gang_world(3, GangCloud)
    world.cloud.faults.lose("launch", when)
    world.run(120)
    assert sorted(world.up()) == sorted(world.living()) == ["f-0", "f-1", "f-2"]
    assert all(h.together == ("f-0", "f-1", "f-2") for h in world.state.hosts)


def test_a_gang_larger_than_what_is_asked_at_once_is_still_one_call():
    world = gang_world(20, GangCloud, capacity=20)
    world.calls = Calls(16)
    calls = []
    together = world.cloud.launch_together
    world.cloud.launch_together = lambda requests: calls.append(len(requests)) or together(requests)
    world.tick()
    assert calls == [20] and len(world.living()) == 20


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 14), st.booleans(), st.sampled_from([GangCloud, Ec2Cloud]))
def test_a_gang_whose_caller_is_killed_anywhere_ends_whole(effects, after, cloud):
    world = gang_world(3, cloud)
    world.market.set_capacity(POOLS[0], 2, world.now)
    world.fuse.light(effects, after)
    for _ in range(8):
        try:
            world.tick(7)
        except Killed:
            world.settle_until = world.now + 15
    world.fuse.left = None
    world.run(400)
    assert len(world.up()) == 3 and len(world.living()) == 3
    assert len({world.pool_of(n) for n in world.up()}) == 1
    check_bill(world)


def test_a_fleet_in_one_zone_stays_there_through_losses_and_moves_only_when_nobody_is_left():
    rules = market_rules(capacity=3)
    pools = (*rules.pools, *(replace(p, instance_type="gpu.big") for p in rules.pools if p.market is Market.SPOT))
    world = World(2, rules=replace(rules, pools=pools), placement="zone", cloud_type=Ec2Cloud)
    world.run(60)
    zone = {world.pool_of(n).split("/")[1] for n in world.up()}
    assert len(zone) == 1
    home = zone.pop()
    for name in (f"local/{home}/{GPU}/spot", f"local/{home}/gpu.big/spot"):
        world.market.set_capacity(name, 0, world.now)
    world.market.interrupt(world.up()[0], None, world.now)
    world.run(120)
    assert len(world.up()) == 1
    (wait,) = [a for a in world.tick(1) if isinstance(a, Wait)]
    assert wait.why.startswith(f"1 of 2 hosts missing: they must be in zone {home}, where ")
    world.market.interrupt(world.up()[0], 120.0, world.now)
    world.run(200)
    assert len(world.up()) == 2 and home not in {world.pool_of(n).split("/")[1] for n in world.up()}


def test_a_gang_of_which_some_are_not_listed_is_asked_for_again_whole():
    world = gang_world(3, GangCloud)
    world.tick()
    asked, together, hosts = [], world.cloud.launch_together, world.cloud.hosts
    world.cloud.launch_together = lambda requests: asked.append([r.request_id for r in requests]) or together(requests)
    world.cloud.hosts = lambda fleet: [h for h in hosts(fleet) if h.request_id == "f-1"]
    world.tick(6)
    assert asked == [["f-0", "f-1", "f-2"]] and len(world.living()) == 3


def test_an_error_that_is_no_refusal_leaves_the_gang_intended():
    world = gang_world(2, GangCloud)

    def together(requests: Sequence[LaunchRequest]) -> None:
        raise SpotfleetError("InternalError")

    world.cloud.launch_together = together
    world.tick()
    assert [h.state for h in world.state.hosts] == [HostState.LAUNCHING] * 2
