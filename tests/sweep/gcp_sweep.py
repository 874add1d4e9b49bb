"""Kill each flow on Google Cloud before and after each request to it, and print what was left in the project: nothing.

Points between which nothing changed but the memory of the process that dies have one state, and are tried once.

    python -m tests.sweep.gcp_sweep [--most N] [--at N] [--flow NAME] [--victim laptop] [--whole]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from spotfleet.model import FleetSpec, Need, Role
from tests.support.sweep.gcp_sweep_world import DISPATCHER, GANG, KIND, LAPTOP, SPEC, GcpSweepWorld
from tests.support.sweep.sweep_flows import Flow, Point, down, settled
from tests.sweep import cloud_sweep
from tests.sweep.cloud_sweep import Act, CloudSweep, discard, orphaned, taken

STOPPED = replace(SPEC, interruption_behavior="stop")
TOGETHER = replace(SPEC, all_or_nothing=True, placement="cluster", any_of=(Need(instance_type=GANG),))


def up(hosts: int, spec: FleetSpec = SPEC) -> Act:
    return cloud_sweep.up(hosts, spec)


def noticed(world: GcpSweepWorld, instance: Any) -> None:
    """After a notice; Compute Engine has no more room there."""
    world.gcp.preempt(instance.name, notice_s=20.0)


def lost(world: GcpSweepWorld, instance: Any) -> None:
    world.gcp.preempt(instance.name, notice_s=None)


def ended(world: GcpSweepWorld, instance: Any) -> None:
    world.gcp.life.end(instance, None, True, world.gcp.owner)


def returned(world: GcpSweepWorld) -> None:
    """Compute Engine stops a host and has room again, so that the dispatcher starts it."""
    stopped = world.instance(world.living(Role.WORKER)[0])
    world.gcp.preempt(stopped.name, notice_s=10.0)
    world.sleep(40.0)
    world.gcp.set_room(stopped.zone, stopped.kind.name, None)
    world.sleep(40.0)
    settled(world, 2)


def no_room(world: GcpSweepWorld) -> None:
    """Two of three zones have none."""
    for zone in ("us-central1-a", "us-central1-b"):
        world.gcp.set_room(zone, KIND, 0)


FLOWS = (
    Flow("up", LAPTOP, up(2), 2),
    Flow("up, given up", LAPTOP, up(2), 0, again=down),
    Flow("down", LAPTOP, down, 0, before=up(2)),
    Flow("down --discard", LAPTOP, discard, 0, before=orphaned(SPEC, ended)),
    Flow("up", DISPATCHER, up(2), 2),
    Flow("up, no room", DISPATCHER, up(2), 2, before=no_room),
    Flow("up, all or nothing", DISPATCHER, up(2, TOGETHER), 2),
    Flow("replace after a notice", DISPATCHER, taken(noticed, 25.0), 2, before=up(2)),
    Flow("replace after a loss", DISPATCHER, taken(lost, 6.0), 2, before=up(2)),
    Flow("stopped and returned", DISPATCHER, returned, 2, before=up(2, STOPPED)),
    Flow("down", DISPATCHER, down, 0, before=up(2)),
    Flow("down, to be stopped", DISPATCHER, down, 0, before=up(2, STOPPED)),
)


def rights_suffice(world: GcpSweepWorld) -> None:
    refused = sorted({f"{c.principal}: {c.action}" for c in world.gcp.calls if c.status in (401, 403)})
    assert not refused, f"not in the roles that `check --policy` prints: {refused}"


SWEEP = CloudSweep("Google Cloud", "project", GcpSweepWorld, FLOWS, rights_suffice)
points, kill = SWEEP.points, SWEEP.kill
__all__ = ["FLOWS", "SWEEP", "Point", "kill", "points"]


if __name__ == "__main__":
    sys.exit(SWEEP.main(__doc__))
