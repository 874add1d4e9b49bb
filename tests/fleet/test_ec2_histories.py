"""Random histories over a cloud that chooses pools, revives what has ended and doubles what lives.

The promises are those of `planner_history.py`: the bill, in particular, is the cloud's own whichever pool it took.
"""

from __future__ import annotations

import pytest

from spotfleet.fleet.domain.events import HostPlaced
from tests.support.fleet.ec2_like import EC2_KINDS, EC2_TROUBLES, PLACED_TROUBLES, Ec2Sim, PlacedSim
from tests.support.fleet.planner_history import history

HISTORIES, BLOCK = 30, 10


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_random_history_over_ec2s_liberties_is_safe_and_ends_with_the_wanted_hosts(first: int):
    for seed in range(first, first + BLOCK):
        history(seed, Ec2Sim, EC2_TROUBLES, EC2_KINDS)


@pytest.mark.parametrize("first", range(0, HISTORIES, BLOCK))
def test_a_fleet_that_stays_together_ends_with_the_wanted_hosts_of_one_type_in_one_zone(first: int):
    for seed in range(first, first + BLOCK):
        world = history(seed, PlacedSim, PLACED_TROUBLES, EC2_KINDS).world
        assert len({world.pool_of(name).rpartition("/")[0] for name in world.living()}) <= 1, f"seed {seed}"


def test_these_histories_have_every_trouble_and_hosts_in_pools_that_were_not_asked_for_first():
    log, placed = set(), 0
    for seed in range(HISTORIES):
        sim = history(seed, Ec2Sim, EC2_TROUBLES, EC2_KINDS)
        log |= set(sim.log)
        placed += sim.world.count(HostPlaced)
    assert log >= EC2_TROUBLES.keys() | {"killed"}
    assert placed > 10
