"""Random histories of planner and reconciler, with seeds; `planner_history.py` says what must hold in each.

More of them: `python -m tests.sim.many_histories planner COUNT`; one: `python -m tests.support.fleet.planner_history
SEED`.
"""

from __future__ import annotations

import pytest

from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.reconcile import create
from spotfleet.model import Nodes
from tests.support.fleet.fleet_world import MemoryLedger, World
from tests.support.fleet.grouped_history import GroupedSim
from tests.support.fleet.planner_history import TROUBLES, history

HISTORIES, BLOCK = 30, 10


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_random_history_of_the_planner_is_safe_and_ends_with_the_wanted_hosts(first: int):
    for seed in range(first, first + BLOCK):
        history(seed)


def test_a_random_history_of_a_fleet_of_two_groups_ends_with_the_wanted_hosts_of_each():
    for seed in range(3):
        history(seed, GroupedSim)


def test_the_histories_have_every_trouble():
    log = {line for seed in range(HISTORIES) for line in history(seed).log}
    assert log >= TROUBLES.keys() | {"killed"}


def test_hosts_that_a_lost_ledger_knew_are_ended_too_when_none_is_wanted():
    world = World(hosts=3)
    world.run(60)
    world.ledger = MemoryLedger(world.fuse)
    create(world.ledger, world.cloud, "f", Nodes(1, 3, 9), world.now)
    world.hosts = 0
    world.run(60)
    assert world.living() == []
    assert report(world.ledger.rows, world.now).micros == world.market.invoice(world.now).micros
