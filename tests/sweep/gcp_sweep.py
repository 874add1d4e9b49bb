"""Kill each flow on Google Cloud before and after each request to it, and print what was left in the project: nothing.

    python -m tests.sweep.gcp_sweep [--most N] [--at N] [--flow NAME] [--victim laptop]
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from tests.sweep.kill_sweep import HEAD, Line, trouble

STOPPED = replace(SPEC, interruption_behavior="stop")
TOGETHER = replace(SPEC, all_or_nothing=True, placement="cluster", any_of=(Need(instance_type=GANG),))
LAGS_S = (0.0, 3.0)  # how late listings are
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


def sweep(flows: Sequence[Flow], most: int, tell: Callable[[object], None], lags_s: Sequence[float] = LAGS_S,
          at: int = 0) -> list[Line]:
    """Kill each of `flows` at all of its points, or at `most` of them, drawn by lot, 0: all; or at number `at` only."""
    lines = []
    for flow in flows:
        line, found = Line(flow), [p for lag_s in lags_s for p in points(flow, lag_s) if at in (0, p.at)]
        line.points = len(found)
        for point in found if not most else random.sample(found, min(most, len(found))):
            line.tried += 1
            if why := trouble(kill, point):
                line.bad.append((point, why))
                print(f"{point}\n{why}", file=sys.stderr, flush=True)
        lines.append(line)
        tell(line)
    return lines


def table(flows: Sequence[Flow] = FLOWS, most: int = 0, tell: Callable[[object], None] = print,
          lags_s: Sequence[float] = LAGS_S, at: int = 0) -> list[str]:
    """Sweep, told line by line; the answer is every trouble in full."""
    begun = time.monotonic()
    tell(HEAD)
    lines = sweep(flows, most, tell, lags_s, at)
    total, tried = sum(line.points for line in lines), sum(line.tried for line in lines)
    bad = [f"{point}\n{why}" for line in lines for point, why in line.bad]
    late = " and ".join(f"{s:g}" for s in lags_s)
    tell(f"{total} points (each request to Google Cloud x before/after, listings late by {late} s), {tried} tried in "
         f"{time.monotonic() - begun:.0f} s: {len(bad)} leaks or losses")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=0, metavar="N", help="try N points of each flow only")
    parser.add_argument("--flow", default="", help="flows of this name only")
    parser.add_argument("--victim", default="", help="laptop or dispatcher only")
    parser.add_argument("--at", type=int, default=0, metavar="N", help="request number N only")
    given = parser.parse_args()
    logging.disable()  # what dispatchers say about their deaths
    flows = [f for f in FLOWS if given.flow in ("", f.name) and given.victim in ("", f.victim)]
    bad = table(flows, given.most, lambda line: print(line, flush=True), at=given.at)
    print("\n".join(bad), end="")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
