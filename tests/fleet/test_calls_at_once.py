"""What a tick asks of a cloud whose answers take long: several things at once, each written down before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.events import LaunchIntended, LaunchRefused, PriceChanged, TerminateIntended
from spotfleet.fleet.reconcile import Action, Calls, Observed, Wanted
from spotfleet.model import HostState, Need, Nodes, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local.inprocess import ManualClock
from tests.support.fleet.fleet_world import POOLS, Cloud, MemoryLedger, World, boot, market_rules

CALL_S = 0.5  # EC2 takes 0.3 to 1 s
SHUTDOWN_S = 2.0
TICK_S = 1.0  # between two ticks of a dispatcher: dispatcher/cloud/machines.py
LAPTOP_TICK_S = 0.25  # api/machine.py


class SlowCloud(Cloud):
    """Every call takes CALL_S but for rates, which are read from the catalog. `asked` are the ends that were asked for,
    each with the rows written by then."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self.ledger: MemoryLedger | None = None
        self.asked: dict[str, set[str]] = {}
        self.deaf_to: str = ""  # ends of this host are not answered

    def _call(self, method: str, act: Callable):
        self.clock.advance(0.0 if method == "rates" else CALL_S)
        return super()._call(method, act)

    def terminate(self, request_id: str) -> None:
        rows = self.ledger.rows if self.ledger else []
        self.asked[request_id] = {e.request_id for e in rows if isinstance(e, TerminateIntended)}
        if request_id == self.deaf_to:
            raise TimeoutError("no answer within 30 s")
        super().terminate(request_id)


def at_once(clock: ManualClock) -> Calls:
    """Sixteen calls that begin together; the slowest says when all have ended."""

    def overlap(call, each):
        began, ends, results = clock.now, [clock.now], []
        for argument in each:
            clock.now = began
            results.append(call(argument))
            ends.append(clock.now)
        clock.now = max(ends)
        return results

    return Calls(16, overlap)


class SlowWorld(World):
    """A world whose dispatcher asks for several things at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        slow = SlowCloud(self.market, self.clock)
        slow.fuse, slow.ledger, self.cloud = self.fuse, self.ledger, slow

    def tick(self, after_s: float = 0.0) -> list[Action]:
        self.clock.advance(after_s)
        return reconcile.tick(self.wanted(), self.ledger, self.cloud, boot, self.observed(), self.now,
                              at_once(self.clock))


def slow_world(hosts: int, capacity: int = 2) -> SlowWorld:
    """`hosts` that are up."""
    rules = replace(market_rules(capacity=capacity), shutdown_s=SHUTDOWN_S)
    world = SlowWorld(hosts=hosts, rules=rules, join_s=1.0, drain_s=0.5)
    for _ in range(8):
        world.tick(TICK_S)
    return world


def test_four_hosts_and_their_dispatcher_are_down_within_15_s_though_every_call_takes_half_a_second():
    world = slow_world(4)
    assert len(world.up()) == 4
    offer = next(o for o in world.cloud.offers(Need(use_spot=False)))
    world.cloud.launch(LaunchRequest("f-d-0", "f", Role.DISPATCHER, offer, Boot("none")))
    laptop = MemoryLedger()
    reconcile.create(laptop, world.cloud, "f", Nodes(), world.now)
    began, world.hosts = world.now, 0
    while world.state.hosts:
        world.tick(TICK_S)
    ended = 0
    while ended == 0 or laptop.state().hosts:
        released = Observed(released=frozenset(h.request_id for h in laptop.state().hosts))
        reconcile.tick(Wanted("f", Role.DISPATCHER, 0), laptop, world.cloud, boot, released, world.now)
        ended = len(reconcile.leftovers(world.cloud, "f")) == 0
        world.clock.advance(LAPTOP_TICK_S)
    assert world.living() == []
    assert world.now - began < 15.0


def test_what_is_asked_at_once_is_written_down_before_any_of_it():
    world = slow_world(4)
    world.hosts = 1
    for _ in range(3):
        world.tick(TICK_S)
    ends = world.ends_asked()
    assert len(ends) == 3
    assert world.cloud.asked == dict.fromkeys(ends, ends)


def test_one_end_that_is_not_answered_holds_no_other_up():
    world = slow_world(4)
    world.cloud.deaf_to, world.hosts = world.up()[0], 0
    for _ in range(3):
        world.tick(TICK_S)
    assert world.living() == [world.cloud.deaf_to]


def test_a_fleet_that_goes_down_drains_though_the_cloud_does_not_answer():
    world = slow_world(2)
    world.cloud.answers, world.hosts = False, 0
    world.tick(TICK_S)
    assert [h.state for h in world.state.hosts] == [HostState.DRAINING] * 2


def test_refusals_of_one_tick_cool_a_pool_as_one():
    world = slow_world(2)
    world.market.set_capacity(POOLS[0], 0, world.now)
    world.market.set_capacity(POOLS[1], 0, world.now)
    world.market.set_capacity(POOLS[2], 0, world.now)
    world.hosts = 8
    world.tick(TICK_S)
    refused = [e for e in world.ledger.rows if isinstance(e, LaunchRefused)]
    assert len(refused) == 6 and {r.count for r in world.state.refusals.values()} == {1}
    known = {e.request_id for e in world.ledger.rows if isinstance(e, LaunchIntended)}
    assert {e.request_id for e in refused} <= known


def test_prices_of_all_pools_are_one_call_but_for_a_pool_that_was_silent_for_very_long():
    world = slow_world(3, capacity=1)
    asked: list[list[str]] = []
    prices = world.cloud.prices
    world.cloud.prices = lambda pools, since: asked.append(list(pools)) or prices(pools, since)
    world.tick(5000.0)
    assert [sorted(pools) for pools in asked] == [sorted(POOLS)]
    asked.clear()
    steady = world.state.prices[POOLS[1]]
    world.market.set_price(POOLS[1], steady.micros_h, world.now)  # from now on it stays where it is
    for _ in range(60):
        world.tick(3600.0)
    assert [POOLS[1]] in asked and sorted([POOLS[0], POOLS[2]]) in map(sorted, asked)


def test_a_pool_that_is_looked_up_with_another_brings_no_prices_from_before_its_first_host():
    world = slow_world(1, capacity=1)
    steady = world.pool_of(world.up()[0])
    world.market.set_price(steady, 970_000, world.now)
    world.run(7200.0, every_s=600.0)
    world.hosts = 2
    world.run(3.0, every_s=1.0)
    fresh = world.market.hosts["f-1"]
    known = [e.at for e in world.ledger.rows if isinstance(e, PriceChanged) and e.pool == fresh.offer.pool]
    assert fresh.offer.pool != steady and len([at for at in known if at <= fresh.runs[0].started_at]) == 1
