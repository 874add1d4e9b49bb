"""The reconciler on a machine whose clock is set."""

from __future__ import annotations

import pytest

from spotfleet.fleet.domain.events import ClockSetBack
from tests.support.fleet.fleet_world import World


@pytest.mark.parametrize("back_s", [90.0, 86_400.0])
def test_a_clock_that_is_set_back_makes_no_launch_wait_until_it_has_caught_up(back_s):
    world = World(hosts=1)
    world.cloud.faults.lose("launch", "before")
    world.tick()
    world.skew_s = -back_s
    world.run(40)
    assert world.up() == ["f-0"]
    assert world.count(ClockSetBack) == 1


def test_a_tick_that_took_long_is_no_clock_that_was_set():
    world = World(hosts=1)
    world.run(60)
    world.skew_s = -50.0
    world.run(40)
    assert world.count(ClockSetBack) == 0
