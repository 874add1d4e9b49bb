"""Kill each flow on AWS before and after each request to AWS, and print what was left in the account: nothing.

Points between which nothing changed but the memory of the process that dies have one state, and are tried once.

    python -m tests.sweep.aws_sweep [--most N] [--at N] [--flow NAME] [--victim laptop] [--whole]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from spotfleet.codec import to_json
from spotfleet.model import CheckpointSpec, FleetSpec, Need, Nodes, Role
from spotfleet.providers.aws.section.spec import AwsSpec
from tests.support.sweep.aws_sweep_world import AwsWorld
from tests.support.sweep.sweep_flows import NAME, Flow, Point, down, settled
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP
from tests.sweep import cloud_sweep
from tests.sweep.cloud_sweep import Act, CloudSweep, discard, orphaned, taken

AWS = AwsSpec(regions=("us-east-1",), ssh_from=("192.0.2.0/24",))
SPEC = FleetSpec(NAME, provider="aws", nodes=Nodes(2, 2, 2), any_of=(Need(instance_type="g5.xlarge"),),
                 section=to_json(AWS), dispatcher=Need(instance_type="t3.small", use_spot=False),
                 tags={"team": "vision"})
STOPPED = replace(SPEC, interruption_behavior="stop")
GANG = replace(SPEC, all_or_nothing=True, placement="cluster", any_of=(Need(instance_type="g5.12xlarge"),))
RICH = replace(SPEC, section=to_json(replace(AWS, event_queue=True)),
               checkpoint=CheckpointSpec(target="s3://somewhere/else"))
KINDS = ("g5.xlarge", "g5.12xlarge")


def up(hosts: int, spec: FleetSpec = SPEC) -> Act:
    return cloud_sweep.up(hosts, spec)


def noticed(world: AwsWorld, instance: Any) -> None:
    """After a notice; EC2 has no more room there."""
    world.aws.interrupt(instance.id, notice_s=20.0)


def lost(world: AwsWorld, instance: Any) -> None:
    world.aws.take(instance.id)


def ended(world: AwsWorld, instance: Any) -> None:
    world.aws.client("ec2", "us-east-1").terminate_instances(InstanceIds=[instance.id])


def revived(world: AwsWorld) -> None:
    """EC2 stops a persistent host, and has room again after it was replaced."""
    stopped = world.instance(world.living(Role.WORKER)[0])
    world.aws.interrupt(stopped.id, notice_s=10.0)
    world.sleep(15.0)
    world.aws.set_room(stopped.order.zone, stopped.order.type, None)
    world.sleep(10.0)
    settled(world, 2)


def no_room(world: AwsWorld) -> None:
    """Two of three zones have none."""
    for zone in ("us-east-1a", "us-east-1b"):
        world.aws.set_room(zone, "g5.xlarge", 0)


FLOWS = (
    Flow("up", LAPTOP, up(2), 2),
    Flow("up, given up", LAPTOP, up(2), 0, again=down),
    Flow("up, with a queue and S3", LAPTOP, up(1, RICH), 1),
    Flow("down", LAPTOP, down, 0, before=up(2)),
    Flow("down, with a queue and S3", LAPTOP, down, 0, before=up(1, RICH)),
    Flow("down --discard", LAPTOP, discard, 0, before=orphaned(SPEC, ended)),
    Flow("up", DISPATCHER, up(2), 2),
    Flow("up, no room", DISPATCHER, up(2), 2, before=no_room),
    Flow("up, all or nothing", DISPATCHER, up(2, GANG), 2),
    Flow("up, to be stopped", DISPATCHER, up(2, STOPPED), 2),
    Flow("replace after a notice", DISPATCHER, taken(noticed, 25.0), 2, before=up(2)),
    Flow("replace after a loss", DISPATCHER, taken(lost, 6.0), 2, before=up(2)),
    Flow("stopped and revived", DISPATCHER, revived, 2, before=up(2, STOPPED)),
    Flow("down", DISPATCHER, down, 0, before=up(2)),
    Flow("down, to be stopped", DISPATCHER, down, 0, before=up(2, STOPPED)),
)


SWEEP = CloudSweep("AWS", "account", AwsWorld, FLOWS)
points, kill = SWEEP.points, SWEEP.kill
__all__ = ["FLOWS", "SWEEP", "Point", "kill", "points"]


if __name__ == "__main__":
    sys.exit(SWEEP.main(__doc__))
