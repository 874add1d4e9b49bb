"""Any history ends with the wanted hosts and none leaked, and with the bill that the cloud writes itself.

The process that reconciles is killed before or after any row it writes and any call it makes.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from spotfleet.fleet.cost.meter import report
from spotfleet.model import BillingRules, CloudState, HostState
from tests.support.fleet.fleet_world import GPU, POOLS, Killed, World, market_rules

seconds = st.sampled_from([0.5, 1.0, 7.25, 30.0, 301.0, 4000.0])
pick = st.integers(0, 10)
steps = st.lists(st.one_of(
    st.tuples(st.just("tick"), seconds),
    st.tuples(st.just("take"), pick, st.sampled_from([None, 1.5, 30.0, 120.0]), st.sampled_from(["", "stop"])),
    st.tuples(st.just("power off"), pick),
    st.tuples(st.just("deafen"), pick),
    st.tuples(st.just("drain"), pick),
    st.tuples(st.just("capacity"), st.sampled_from(POOLS), st.integers(0, 3)),
    st.tuples(st.just("refuse"), st.sampled_from(POOLS), st.sampled_from(["pool", "type", "region"])),
    st.tuples(st.just("price"), st.sampled_from(POOLS), st.integers(100_000, 3_000_000)),
    st.tuples(st.just("kill"), st.integers(1, 4), st.booleans(), seconds),
    st.tuples(st.just("lose"), st.sampled_from(["launch", "terminate", "hosts", "prices", "offers"]),
              st.sampled_from(["before", "after"])),
    st.tuples(st.just("lag"), st.sampled_from([0.0, 3.0, 60.0])),
    st.tuples(st.just("repeat"), st.integers(0, 2)),
    st.tuples(st.just("want"), st.integers(0, 4)),
), min_size=6, max_size=40)
billings = st.sampled_from([BillingRules(1), BillingRules(60), BillingRules(60, 300)])


def take_step(world: World, step: tuple) -> None:
    what, *args = step
    market, now, living = world.market, world.now, sorted(world.living())
    match what:
        case "tick":
            world.tick(args[0])
        case "take" if living:
            market.interrupt(living[args[0] % len(living)], args[1], now, args[2])
        case "power off" if living:
            market.power_off(living[args[0] % len(living)], now)
        case "deafen" if living:
            world.deaf.add(living[args[0] % len(living)])
        case "drain" if living:
            world.asked_to_drain[living[args[0] % len(living)]] = "asked by its user"
        case "capacity":
            market.set_capacity(args[0], args[1], now)
        case "refuse":
            market.refuse(args[0], args[1], now, for_s=200.0)
        case "price":
            market.set_price(args[0], args[1], now)
        case "lose":
            world.cloud.faults.lose(args[0], args[1])
        case "lag":
            world.cloud.faults.listing_lag_s = args[0]
        case "repeat":
            world.cloud.faults.duplicates = args[0]
        case "want":
            world.hosts = args[0]
        case "kill":
            world.fuse.light(args[0], args[1])
            try:
                world.tick(args[2])
            except Killed:
                world.settle_until = world.now + 15
            world.fuse.left = None


def check(world: World) -> None:
    for name in world.living():
        assert world.state.host(name) is not None, f"the ledger does not know {name}"


def end_the_trouble(world: World) -> None:
    world.cloud.faults.listing_lag_s, world.cloud.faults.duplicates = 0.0, 0
    world.cloud.faults.lost.clear()
    for pool in POOLS:
        world.market.allow(pool, world.now)
        world.market.set_capacity(pool, 3, world.now)


def live_through(history: list[tuple], hosts: int, billing: BillingRules, behavior: str) -> World:
    world = World(hosts, behavior=behavior, rules=market_rules(billing, boot_s=2.0, beside=True))
    for step in history:
        take_step(world, step)
        check(world)
    end_the_trouble(world)
    return world


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 4), billings, st.sampled_from(["terminate", "stop"]))
def test_any_history_ends_with_the_wanted_hosts_and_none_leaked(history, hosts, billing, behavior):
    world = live_through(history, hosts, billing, behavior)
    # the slowest way out: a notice of 2 min to stop, 10 min until it is given up, a cooldown of at most 10 min
    last = world.run(3000, every_s=15)
    assert last == []
    assert len(world.living()) == world.hosts
    assert sorted(world.up()) == sorted(world.living())
    assert all(h.state is HostState.UP for h in world.state.hosts)
    stopped = [n for n, h in world.market.hosts.items() if h.state is CloudState.STOPPED]
    assert stopped == []


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 4), billings, st.sampled_from(["terminate", "stop"]))
def test_after_any_history_the_bill_is_the_clouds_own_to_the_micro_dollar(history, hosts, billing, behavior):
    world = live_through(history, hosts, billing, behavior)
    world.run(60, every_s=15)
    invoice, bill = world.market.invoice(world.now), report(world.ledger.rows, world.now)
    by_host = dict.fromkeys(invoice.hosts, 0)
    for line in bill.lines:
        by_host[line.host] += line.micros
    assert by_host == invoice.hosts
    assert bill.micros == invoice.micros


def test_the_worlds_pools_are_the_markets():
    assert {p.name for p in market_rules().pools if p.market.value == "spot"} == set(POOLS)
    assert all(GPU in pool for pool in POOLS)
