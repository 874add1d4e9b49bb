"""As on EC2: a disk goes with its machine, and a host that the cloud starts again as another machine has a new one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfleet.fleet.cost.meter import report
from spotfleet.model import BillingRules, Rates
from tests.support.fleet.ec2_like import Ec2Cloud
from tests.support.fleet.fleet_world import POOLS, World, market_rules

MONTH = 730 * 3600


def world_of_one(boot_s: float) -> World:
    """One host, up, whose disk of 1 GiB costs a micro-dollar a second."""
    rules = market_rules(BillingRules(1), boot_s=boot_s, beside=True)
    world = World(1, rules=replace(rules, rates=Rates(MONTH), disk_gib=1), cloud_type=Ec2Cloud)
    world.cloud.forgets = False
    world.run(120)
    assert world.up() == ["f-0"]
    return world


def disk_of(world: World) -> tuple[int, int]:
    """What the disk of f-0 costs by the ledger, and by the cloud."""
    bill, invoice = report(world.ledger.rows, world.now), world.market.invoice(world.now)
    return sum(e.micros for e in bill.extras if (e.kind, e.name) == ("disk", "f-0")), invoice.disks["f-0"]


def taken_after(world: World, seconds: float) -> None:
    """And there is no room for another."""
    for pool in POOLS:
        world.market.set_capacity(pool, 0, world.now)
    world.run(world.market.hosts["f-0"].runs[-1].started_at + seconds - world.now, every_s=1.0)
    world.market.interrupt("f-0", None, world.now)


SEEN = pytest.mark.parametrize("seen", [True, False], ids=["its end was listed", "nobody saw its end"])


@SEEN
def test_between_the_machines_of_a_host_there_is_no_disk(seen: bool):
    world = world_of_one(boot_s=0.0)
    taken_after(world, 200)
    world.clock.advance(100)
    if seen:
        world.tick()
    world.clock.advance(200)
    world.cloud.revive("f-0")
    world.run(40, every_s=1.0)
    assert world.up() == ["f-0"] and disk_of(world) == (200 + 40, 200 + 40)
    world.market.interrupt("f-0", None, world.now)
    world.clock.advance(300)
    world.tick()
    assert disk_of(world) == (200 + 40, 200 + 40)


@SEEN
def test_another_machine_that_never_runs_brings_no_disk(seen: bool):
    world = world_of_one(boot_s=60.0)
    taken_after(world, 200)
    world.hosts = 0
    world.clock.advance(100)
    if seen:
        world.tick()
    world.clock.advance(200)
    world.cloud.revive("f-0")
    world.tick()
    assert disk_of(world) == (200, 200)
    world.run(30, every_s=1.0)
    assert world.living() == [] and disk_of(world) == (200, 200)
