"""Weeks of a fleet in seconds: its bill is the emulated cloud's own invoice, to the micro-dollar."""

from __future__ import annotations

import os
from random import Random

import pytest

from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.events import LaunchRefused, PriceChanged
from spotfleet.fleet.ledger import Ledger, read_events
from spotfleet.fleet.reconcile import create
from spotfleet.model import BillingRules, HostState, Nodes
from tests.support.fleet.fleet_world import POOLS, World, market_rules

DAY = 86400.0
LONG = bool(os.environ.get("SPOTFLEET_LONG"))


def live(world: World, days: float, seed: int) -> None:
    """Ticks every few minutes, with gaps of hours and once of three days; losses, stops, refusals, lag, prices."""
    random = Random(seed)
    start, paused = world.now, False
    while world.now < start + days * DAY:
        trouble(world, random)
        world.tick(random.choice([60.0, 187.5, 300.0, 301.0009765625]))
        if random.random() < 0.01:
            world.tick(random.uniform(1, 8) * 3600)
        if not paused and world.now > start + days * DAY / 2:
            paused = True
            world.tick(3 * DAY)


def trouble(world: World, random: Random) -> None:
    market, living, pool = world.market, world.living(), random.choice(POOLS)
    match random.randrange(40):
        case 0 | 1 if living:
            market.interrupt(random.choice(living), random.choice([None, 30.0, 120.0]), world.now)
        case 2 if living:
            market.power_off(random.choice(living), world.now)
        case 3:
            market.set_capacity(pool, random.randrange(4), world.now)
        case 4:
            market.refuse(pool, random.choice(["pool", "type"]), world.now, for_s=random.uniform(60, 3000))
        case 5:
            world.cloud.faults.listing_lag_s = random.choice([0.0, 10.0, 90.0])
        case 6:
            world.cloud.faults.duplicates = random.randrange(3)
        case 7:
            world.cloud.faults.lose(random.choice(["launch", "terminate", "hosts", "prices"]),
                                    random.choice(["before", "after"]))
        case 8:
            world.hosts = random.randrange(5)
        case 9:
            for name in POOLS:
                market.allow(name, world.now)
                market.set_capacity(name, 2, world.now)


@pytest.mark.parametrize(("billing", "behavior", "weeks"), [
    (BillingRules(1), "terminate", 1), (BillingRules(60), "stop", 3), (BillingRules(3600, 3600), "terminate", 1),
], ids=["by-the-second", "by-the-minute-with-stops", "first-hour-free-if-taken"])
def test_weeks_cost_what_the_cloud_bills(billing, behavior, weeks):
    """All three weeks in the long form; else those of the rules under which most can happen."""
    weeks = 3 if LONG else weeks
    world = World(hosts=3, behavior=behavior, rules=market_rules(billing, boot_s=41.5))
    live(world, days=7 * weeks, seed=7)
    check_bill(world)
    runs = [line for line in report(world.ledger.rows, world.now).lines]
    assert len(runs) > 33 * weeks
    assert sum(line.taken for line in runs) > 10 * weeks
    assert world.count(LaunchRefused) > 3 * weeks
    assert world.count(PriceChanged) > 333 * weeks
    if behavior == "stop":
        assert any(len(h.runs) > 1 for h in [*world.state.hosts, *world.state.ended.values()])
    world.hosts = 0
    world.cloud.faults.listing_lag_s = 0.0
    world.run(1200, every_s=60)
    assert world.living() == [] and world.state.hosts == ()
    check_bill(world)


def check_bill(world: World) -> None:
    """What the ledger knows at this moment is what the cloud would bill for the hosts as listed."""
    world.cloud.faults.listing_lag_s = 0.0
    world.cloud.faults.lost.clear()
    world.tick(1.0)
    bill, invoice = report(world.ledger.rows, world.now), world.market.invoice(world.now)
    by_host = dict.fromkeys(invoice.hosts, 0)
    for line in bill.lines:
        by_host[line.host] += line.micros
    assert by_host == invoice.hosts
    assert bill.micros == invoice.micros > 0


def test_a_bill_made_from_a_ledger_file_that_came_home_is_the_same(tmp_path):
    world = World(hosts=3, rules=market_rules(BillingRules(60), boot_s=41.5))
    ledger = world.ledger = Ledger(tmp_path / "ledger.db")
    create(ledger, world.cloud, "f", Nodes(1, 3, 9), world.now)
    for _ in range(40):
        world.tick(600.0)
        world.market.interrupt(world.living()[0], None, world.now)
    world.tick(1.0)
    ledger.copy_to(tmp_path / "home.db")
    ledger.close()
    bill = report(read_events(tmp_path / "home.db"), world.now)
    assert bill.micros == world.market.invoice(world.now).micros
    assert sum(line.taken for line in bill.lines) >= 39  # one may be taken while it boots, before it costs anything
    assert {HostState.GONE} == {h.state for h in world_state(tmp_path / "home.db").ended.values()}


def world_state(path):
    ledger = Ledger(path)
    try:
        return ledger.state()
    finally:
        ledger.close()
