"""Kill each flow on Google Cloud before and after each request to it, and print what was left in the project: nothing.

Points between which nothing changed but the memory of the process that dies have one state, and are tried once.

    python -m tests.sweep.gcp_sweep [--most N] [--at N] [--flow NAME] [--victim laptop] [--whole]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spotfleet.api.account import leaks
from spotfleet.api.lifecycle.down import take_down
from spotfleet.api.lifecycle.up import bring_up
from spotfleet.config import FleetFile
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.ledger import read_events
from spotfleet.model import FleetSpec, Need, Nodes, Role
from tests.support.sweep import sweep_flows
from tests.support.sweep.gcp_sweep_world import DISPATCHER, GANG, KIND, LAPTOP, SPEC, GcpSweepWorld
from tests.support.sweep.sweep_flows import NAME, SECRET, Flow, Point, down, lives, settled
from tests.sweep.cloud_sweep import CloudSweep

STOPPED = replace(SPEC, interruption_behavior="stop")
TOGETHER = replace(SPEC, all_or_nothing=True, placement="cluster", any_of=(Need(instance_type=GANG),))
UP_S = 600.0
Act = Callable[[GcpSweepWorld], None]


def up(hosts: int, spec: FleetSpec = SPEC) -> Act:
    file = FleetFile(replace(spec, nodes=Nodes(hosts, hosts, hosts)), {"PASSWORD": SECRET})
    return lambda world: world.laptop(lambda: bring_up(world.house, file, lambda _line: None, UP_S))


def notice(world: GcpSweepWorld) -> None:
    """Compute Engine takes a host after a notice, and has no more room there."""
    world.gcp.preempt(world.instance(world.living(Role.WORKER)[0]).name, notice_s=20.0)
    world.sleep(25.0)
    settled(world, 2)


def loss(world: GcpSweepWorld) -> None:
    world.gcp.preempt(world.instance(world.living(Role.WORKER)[0]).name, notice_s=None)
    world.sleep(6.0)
    settled(world, 2)


def returned(world: GcpSweepWorld) -> None:
    """Compute Engine stops a host and has room again, so that the dispatcher starts it."""
    taken = world.instance(world.living(Role.WORKER)[0])
    world.gcp.preempt(taken.name, notice_s=10.0)
    world.sleep(40.0)
    world.gcp.set_room(taken.zone, taken.kind.name, None)
    world.sleep(40.0)
    settled(world, 2)


def no_room(world: GcpSweepWorld) -> None:
    """Two of three zones have none."""
    for zone in ("us-central1-a", "us-central1-b"):
        world.gcp.set_room(zone, KIND, 0)


def discard(world: GcpSweepWorld) -> None:
    folder = world.house.folder(NAME)
    world.laptop(lambda: take_down(folder, lambda _line: None, discard=True, why="asked by `down`"))


def orphaned(world: GcpSweepWorld) -> None:
    """A fleet whose dispatcher's machine is gone."""
    up(2)(world)
    dispatcher = world.instance(world.living(Role.DISPATCHER)[0])
    world.gcp.life.end(dispatcher, None, True, world.gcp.owner)
    world.sleep(6.0)


FLOWS = (
    Flow("up", LAPTOP, up(2), 2),
    Flow("up, given up", LAPTOP, up(2), 0, again=down),
    Flow("down", LAPTOP, down, 0, before=up(2)),
    Flow("down --discard", LAPTOP, discard, 0, before=orphaned),
    Flow("up", DISPATCHER, up(2), 2),
    Flow("up, no room", DISPATCHER, up(2), 2, before=no_room),
    Flow("up, all or nothing", DISPATCHER, up(2, TOGETHER), 2),
    Flow("replace after a notice", DISPATCHER, notice, 2, before=up(2)),
    Flow("replace after a loss", DISPATCHER, loss, 2, before=up(2)),
    Flow("stopped and returned", DISPATCHER, returned, 2, before=up(2, STOPPED)),
    Flow("down", DISPATCHER, down, 0, before=up(2)),
    Flow("down, to be stopped", DISPATCHER, down, 0, before=up(2, STOPPED)),
)


def points(flow: Flow, lag_s: float = 0.0) -> list[Point]:
    """Where `flow` can be killed."""
    return sweep_flows.points(flow, lag_s, GcpSweepWorld)


def kill(point: Point) -> None:
    """Kill there, let the next run converge, end the fleet. AssertionError for anything lost, doubled or left."""
    sweep_flows.kill_in(GcpSweepWorld, point, nothing_is_left)


def nothing_is_left(world: GcpSweepWorld, _jobs: int) -> None:
    """The project is empty, by its own state and by ours; each ledger tells one end; the roles' rights suffice."""
    world.sleep(max(world.gcp.lag_s, world.gcp.new_lag_s) + 10.0)
    left = [str(t) for t in world.gcp.everything()]
    assert not left, f"left in the project: {', '.join(left)}"
    found = world.laptop(lambda: leaks.search(world.house, everywhere=True))
    assert (found.suspects, found.things, found.notes) == ((), (), ()), found
    for life in lives(world):
        assert life.record.down_at, "a fleet that is down is not known to be"
        ends = Counter(type(e) for e in read_events(life.ledger))[FleetDown]
        assert ends == 1, f"down {ends} times"
    refused = sorted({f"{c.principal}: {c.action}" for c in world.gcp.calls if c.status in (401, 403)})
    assert not refused, f"not in the roles that `check --policy` prints: {refused}"
    assert not world.gcp.bugs, world.gcp.bugs[0]
    assert not world.gcp.findings, world.gcp.findings[:10]


SWEEP = CloudSweep("Google Cloud", FLOWS, points, kill)


if __name__ == "__main__":
    sys.exit(SWEEP.main(__doc__))
