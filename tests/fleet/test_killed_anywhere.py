"""The process that reconciles dies at any row it writes and any call it makes; the next one goes on."""

from __future__ import annotations

import pytest

from tests.support.fleet.fleet_world import POOLS, Killed, World


def story(world: World) -> None:
    """Up, a notice, a loss, fewer, more, down, up: every kind of row and call."""
    world.run(40)
    world.market.interrupt(world.up()[0], 30.0, world.now)
    world.run(60)
    world.market.interrupt(world.up()[0], None, world.now)
    world.run(60)
    world.hosts = 1
    world.run(60)
    world.market.refuse(POOLS[0], "pool", world.now, for_s=30.0)
    world.hosts = 3
    world.run(60)
    world.hosts = 0
    world.run(60)
    world.hosts = 2
    world.run(40)


def effects_of(story) -> int:
    world = World(hosts=2)
    world.fuse.light(10_000, False)
    story(world)
    return 10_000 - world.fuse.left


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_row_or_call_the_next_tick_goes_on(after):
    effects = effects_of(story)
    assert effects > 40
    for n in range(1, effects + 1):
        world = World(hosts=2)
        world.fuse.light(n, after)
        tick_or_die(world)
        story(world)
        world.run(300)
        assert sorted(world.living()) == sorted(world.up()), f"killed at effect {n}"
        assert len(world.up()) == 2, f"killed at effect {n}"


def tick_or_die(world: World) -> None:
    """From now on a kill is a crash of the reconciler alone: the next tick is a new process's."""
    whole = world.tick

    def tick(after_s: float = 0.0):
        try:
            return whole(after_s)
        except Killed:
            return whole(0.0)

    world.tick = tick
