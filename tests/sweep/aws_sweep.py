"""Kill each flow on AWS before and after each request to AWS, and print what was left in the account: nothing.

Points between which nothing changed but the memory of the process that dies have one state, and are tried once.

    python -m tests.sweep.aws_sweep [--most N] [--at N] [--flow NAME] [--victim laptop] [--whole]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from spotfleet.api.account import leaks
from spotfleet.api.lifecycle.down import take_down
from spotfleet.api.lifecycle.up import bring_up
from spotfleet.codec import to_json
from spotfleet.config import FleetFile
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.ledger import read_events
from spotfleet.model import CheckpointSpec, FleetSpec, Need, Nodes, Role
from spotfleet.providers.aws.section.spec import AwsSpec
from tests.support.sweep import sweep_flows
from tests.support.sweep.aws_sweep_world import AwsWorld
from tests.support.sweep.sweep_flows import NAME, SECRET, Flow, Point, down, lives, settled
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP
from tests.sweep.cloud_sweep import CloudSweep

AWS = AwsSpec(regions=("us-east-1",), ssh_from=("192.0.2.0/24",))
SPEC = FleetSpec(NAME, provider="aws", nodes=Nodes(2, 2, 2), any_of=(Need(instance_type="g5.xlarge"),),
                 section=to_json(AWS), dispatcher=Need(instance_type="t3.small", use_spot=False),
                 tags={"team": "vision"})
STOPPED = replace(SPEC, interruption_behavior="stop")
GANG = replace(SPEC, all_or_nothing=True, placement="cluster", any_of=(Need(instance_type="g5.12xlarge"),))
RICH = replace(SPEC, section=to_json(replace(AWS, event_queue=True)),
               checkpoint=CheckpointSpec(target="s3://somewhere/else"))
KINDS = ("g5.xlarge", "g5.12xlarge")
UP_S = 600.0
Act = Callable[[AwsWorld], None]


def up(hosts: int, spec: FleetSpec = SPEC) -> Act:
    file = FleetFile(replace(spec, nodes=Nodes(hosts, hosts, hosts)), {"PASSWORD": SECRET})
    return lambda world: world.laptop(lambda: bring_up(world.house, file, lambda _line: None, UP_S))


def notice(world: AwsWorld) -> None:
    """EC2 takes a host after a notice, and has no more room there."""
    world.aws.interrupt(world.instance(world.living(Role.WORKER)[0]).id, notice_s=20.0)
    world.sleep(25.0)
    settled(world, 2)


def loss(world: AwsWorld) -> None:
    world.aws.take(world.instance(world.living(Role.WORKER)[0]).id)
    world.sleep(6.0)
    settled(world, 2)


def revived(world: AwsWorld) -> None:
    """EC2 stops a persistent host, and has room again after it was replaced."""
    taken = world.instance(world.living(Role.WORKER)[0])
    world.aws.interrupt(taken.id, notice_s=10.0)
    world.sleep(15.0)
    world.aws.set_room(taken.order.zone, taken.order.type, None)
    world.sleep(10.0)
    settled(world, 2)


def no_room(world: AwsWorld) -> None:
    """Two of three zones have none."""
    for zone in ("us-east-1a", "us-east-1b"):
        world.aws.set_room(zone, "g5.xlarge", 0)


def discard(world: AwsWorld) -> None:
    folder = world.house.folder(NAME)
    world.laptop(lambda: take_down(folder, lambda _line: None, discard=True, why="asked by `down`"))


def orphaned(world: AwsWorld) -> None:
    """A fleet whose dispatcher's machine is gone."""
    up(2)(world)
    dispatcher = world.instance(world.living(Role.DISPATCHER)[0])
    world.aws.client("ec2", "us-east-1").terminate_instances(InstanceIds=[dispatcher.id])
    world.sleep(6.0)


FLOWS = (
    Flow("up", LAPTOP, up(2), 2),
    Flow("up, given up", LAPTOP, up(2), 0, again=down),
    Flow("up, with a queue and S3", LAPTOP, up(1, RICH), 1),
    Flow("down", LAPTOP, down, 0, before=up(2)),
    Flow("down, with a queue and S3", LAPTOP, down, 0, before=up(1, RICH)),
    Flow("down --discard", LAPTOP, discard, 0, before=orphaned),
    Flow("up", DISPATCHER, up(2), 2),
    Flow("up, no room", DISPATCHER, up(2), 2, before=no_room),
    Flow("up, all or nothing", DISPATCHER, up(2, GANG), 2),
    Flow("up, to be stopped", DISPATCHER, up(2, STOPPED), 2),
    Flow("replace after a notice", DISPATCHER, notice, 2, before=up(2)),
    Flow("replace after a loss", DISPATCHER, loss, 2, before=up(2)),
    Flow("stopped and revived", DISPATCHER, revived, 2, before=up(2, STOPPED)),
    Flow("down", DISPATCHER, down, 0, before=up(2)),
    Flow("down, to be stopped", DISPATCHER, down, 0, before=up(2, STOPPED)),
)


def points(flow: Flow, lag_s: float = 0.0) -> list[Point]:
    """Where `flow` can be killed."""
    return sweep_flows.points(flow, lag_s, AwsWorld)


def kill(point: Point) -> None:
    """Kill there, let the next run converge, end the fleet. AssertionError for anything lost, doubled or left."""
    sweep_flows.kill_in(AwsWorld, point, nothing_is_left)


def nothing_is_left(world: AwsWorld, _jobs: int) -> None:
    """The account is empty, by its own state and by ours; each ledger tells one end."""
    world.sleep(max(world.aws.lag_s, world.aws.new_lag_s) + 10.0)
    left = [str(t) for t in world.aws.everything()]
    assert not left, f"left in the account: {', '.join(left)}"
    found = world.laptop(lambda: leaks.search(world.house, everywhere=True))
    assert (found.suspects, found.things, found.notes) == ((), (), ()), found
    for life in lives(world):
        assert life.record.down_at, "a fleet that is down is not known to be"
        ends = Counter(type(e) for e in read_events(life.ledger))[FleetDown]
        assert ends == 1, f"down {ends} times"
    assert not world.aws.bugs, world.aws.bugs[0]
    assert not world.aws.findings, world.aws.findings[:10]


SWEEP = CloudSweep("AWS", FLOWS, points, kill)


if __name__ == "__main__":
    sys.exit(SWEEP.main(__doc__))
