"""Machines that may be cut off: a provider that cannot ask one lists its host as stopped, with its run still open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.fleet.domain.events import HostListed, HostNoticed, LaunchIntended
from spotfleet.fleet.reconcile import Observed, tick
from spotfleet.model import CloudHost, CloudState, HostState, Notice
from tests.support.fleet.fleet_world import POOLS, World, boot, market_rules


class Cut:
    """Lines of the listing as such a provider gives them. The machines themselves know nothing of it."""

    def __init__(self, world: World) -> None:
        self.world, self.away, self.unknown, self.given_up = world, set(), set(), set()
        self._whole = world.cloud.hosts
        world.cloud.hosts = self.hosts

    def hosts(self, fleet: str) -> list[CloudHost]:
        lines = [h for h in self._whole(fleet) if h.request_id not in self.unknown]
        return [self._given_up(h) if h.request_id in self.given_up else
                replace(h, state=CloudState.STOPPED, why="does not answer") if h.request_id in self.away else h
                for h in lines]

    def _given_up(self, line: CloudHost) -> CloudHost:
        runs = tuple(replace(r, ended_at=r.started_at + 1) for r in line.runs)
        return replace(line, state=CloudState.TERMINATED, runs=runs)

    def cut(self, host: str) -> None:
        self.away.add(host)
        self.world.deaf.add(host)

    def mend(self, host: str) -> None:
        for names in (self.away, self.unknown, self.given_up, self.world.deaf):
            names.discard(host)


@pytest.fixture
def world() -> World:
    """Three hosts, up."""
    world = World(hosts=3)
    world.run(60)
    assert len(world.up()) == 3
    return world


def one(capacity: int = 1) -> World:
    """One host, up, and room for no other."""
    world = World(hosts=1, rules=market_rules(capacity=capacity))
    world.run(60)
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    return world


def test_a_host_whose_agent_is_connected_is_not_stopped_by_a_listing_alone(world):
    Cut(world).away.update(world.up())
    rows = world.count(HostListed)
    assert world.run(700) == []
    assert sorted(world.up()) == ["f-0", "f-1", "f-2"] and world.count(HostListed) == rows


def test_a_host_that_is_cut_off_is_replaced_at_once(world):
    cut = Cut(world)
    cut.cut("f-0")
    world.tick(1)
    assert world.state.host("f-0").state is HostState.STOPPED and world.state.host("f-0").why == "does not answer"
    world.run(60)
    assert len(world.up()) == 3 and "f-0" not in world.up()


def test_a_host_that_answers_again_after_it_was_replaced_is_removed_not_doubled(world):
    cut = Cut(world)
    cut.cut("f-0")
    world.run(60)
    cut.mend("f-0")
    world.run(60)
    assert len(world.up()) == len(world.living()) == 3
    assert world.count(LaunchIntended) == 4


def test_a_host_that_answers_again_goes_on_with_the_agent_that_it_had():
    world = one()
    (only,) = world.up()
    before, cut = world.state.host(only).incarnation, Cut(world)
    cut.cut(only)
    world.run(30)
    assert world.up() == []
    cut.mend(only)
    world.run(30)
    assert world.up() == [only] and world.state.host(only).incarnation == before
    assert world.run(700) == [] and world.up() == [only]


def test_an_agent_that_is_back_before_its_machine_answers_is_enough():
    world = one()
    (only,) = world.up()
    cut = Cut(world)
    cut.cut(only)
    world.run(30)
    world.deaf.discard(only)
    world.run(20)
    assert world.up() == [only]
    assert world.run(700) == [] and world.up() == [only]


def test_a_host_that_is_asked_to_end_while_it_is_cut_off_ends_when_it_answers_again(world):
    cut = Cut(world)
    cut.cut("f-0")
    world.cloud.terminate, reached = (lambda _name: None), world.cloud.terminate
    world.run(700)
    assert "f-0" in world.ends_asked() and world.state.host("f-0").state is HostState.STOPPED
    world.cloud.terminate = reached
    cut.mend("f-0")
    world.run(30)
    assert world.state.host("f-0").state is HostState.GONE
    assert len(world.up()) == len(world.living()) == 3


def test_a_host_that_was_given_up_is_not_counted_again_when_its_machine_answers(world):
    cut = Cut(world)
    cut.cut("f-0")
    world.run(30)
    cut.given_up.add("f-0")
    world.tick(1)
    assert world.state.host("f-0").state is HostState.GONE
    cut.mend("f-0")
    world.run(60)
    assert world.state.host("f-0").state is HostState.GONE and len(world.up()) == 3


def test_a_dispatcher_that_restarted_while_a_host_was_cut_off_takes_it_back_as_one_too_many(world):
    cut = Cut(world)
    cut.cut("f-0")
    cut.unknown.add("f-0")  # another process does not know whose machine it is that does not answer
    world.settle_until = world.now + 16
    world.run(60)
    assert world.state.host("f-0").state is HostState.GONE and len(world.up()) == 3
    cut.mend("f-0")
    world.run(60)
    assert len(world.up()) == len(world.living()) == 3


@pytest.mark.parametrize("away_s", [0.0, 15.0])
def test_a_notice_of_before_a_stop_does_not_count_for_the_host_that_came_back(away_s):
    world = World(hosts=1, behavior="stop", rules=market_rules(capacity=1))
    world.run(60)
    (only,) = world.up()
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    world.market.interrupt(only, 15.0, world.now)
    deadline = world.now + 15.0
    while world.market.hosts[only].state is not CloudState.STOPPED:
        world.tick(1)
    world.run(away_s)
    world.market.return_host(only, world.now)
    world.tick(1)
    said = world.observed()
    stale = Observed(said.joined, {only: Notice(deadline - world.now, "stop")})
    tick(world.wanted(), world.ledger, world.cloud, boot, stale, world.now)
    assert world.count(HostNoticed) == 1
    world.run(60)
    assert world.up() == [only]
