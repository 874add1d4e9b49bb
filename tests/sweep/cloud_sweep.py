"""Sweep of the flows of one cloud: what flows do on every cloud, table and command line, for `aws_sweep` and
`gcp_sweep`."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spotfleet.api.account import leaks
from spotfleet.api.lifecycle.down import take_down
from spotfleet.api.lifecycle.up import bring_up
from spotfleet.config import FleetFile
from spotfleet.fleet.domain.events import FleetDown
from spotfleet.fleet.ledger import read_events
from spotfleet.model import FleetSpec, Nodes, Role
from tests.support.sweep import sweep_flows
from tests.support.sweep.cloud_world import CloudWorld
from tests.support.sweep.sweep_flows import NAME, SECRET, Flow, Point, distinct, lives, settled
from tests.sweep.kill_sweep import HEAD, Line, trouble

LAGS_S = (0.0, 3.0)  # how late listings are
UP_S = 600.0
Act = Callable[[Any], None]  # acts in the world of its cloud


def up(hosts: int, spec: FleetSpec) -> Act:
    file = FleetFile(replace(spec, nodes=Nodes(hosts, hosts, hosts)), {"PASSWORD": SECRET})
    return lambda world: world.laptop(lambda: bring_up(world.house, file, lambda _line: None, UP_S))


def discard(world: CloudWorld) -> None:
    folder = world.house.folder(NAME)
    world.laptop(lambda: take_down(folder, lambda _line: None, discard=True, why="asked by `down`"))


def taken(take: Callable[[Any, Any], None], after_s: float) -> Act:
    """The cloud takes a host, and the dispatcher replaces it."""
    def act(world: CloudWorld) -> None:
        take(world, world.instance(world.living(Role.WORKER)[0]))
        world.sleep(after_s)
        settled(world, 2)

    return act


def orphaned(spec: FleetSpec, end: Callable[[Any, Any], None]) -> Act:
    """A fleet whose dispatcher's machine is gone."""
    def act(world: CloudWorld) -> None:
        up(2, spec)(world)
        end(world, world.instance(world.living(Role.DISPATCHER)[0]))
        world.sleep(6.0)

    return act


@dataclass(frozen=True)
class CloudSweep:
    """How the flows of one cloud are killed."""

    cloud: str  # as a reader calls it
    place: str  # the account
    world: type[Any]
    flows: Sequence[Flow]
    further: Callable[[Any], None] = lambda _world: None  # what else must hold at the end

    def points(self, flow: Flow, lag_s: float = 0.0) -> list[Point]:
        """Where `flow` can be killed."""
        return sweep_flows.points(flow, lag_s, self.world)

    def kill(self, point: Point) -> None:
        """Kill there, let the next run converge, end the fleet. AssertionError for anything lost, doubled or left."""
        sweep_flows.kill_in(self.world, point, self.nothing_is_left)

    def nothing_is_left(self, world: CloudWorld, _jobs: int) -> None:
        """The account is empty, by its own state and by ours; each ledger tells one end."""
        fake = world.fake
        world.sleep(max(fake.lag_s, fake.new_lag_s) + 10.0)
        left = [str(t) for t in fake.everything()]
        assert not left, f"left in the {self.place}: {', '.join(left)}"
        found = world.laptop(lambda: leaks.search(world.house, everywhere=True))
        assert (found.suspects, found.things, found.notes) == ((), (), ()), found
        for life in lives(world):
            assert life.record.down_at, "a fleet that is down is not known to be"
            ends = Counter(type(e) for e in read_events(life.ledger))[FleetDown]
            assert ends == 1, f"down {ends} times"
        self.further(world)
        assert not fake.bugs, fake.bugs[0]
        assert not fake.findings, fake.findings[:10]

    def sweep(self, flows: Sequence[Flow], most: int, tell: Callable[[object], None],
              lags_s: Sequence[float] = LAGS_S, at: int = 0, whole: bool = False) -> list[Line]:
        """Kill each of `flows` in all of its states, or in `most` of them, drawn by lot, 0: all; or at request number
        `at` only. `whole`: at all of its points."""
        lines = []
        for flow in flows:
            line, everywhere = Line(flow), [p for lag_s in lags_s for p in self.points(flow, lag_s) if at in (0, p.at)]
            line.points, line.states = len(everywhere), len(distinct(everywhere))
            found = everywhere if whole else distinct(everywhere)
            for point in found if not most else random.sample(found, min(most, len(found))):
                line.tried += 1
                if why := trouble(self.kill, point):
                    line.bad.append((point, why))
                    print(f"{point}\n{why}", file=sys.stderr, flush=True)
            lines.append(line)
            tell(line)
        return lines

    def table(self, flows: Sequence[Flow], most: int = 0, tell: Callable[[object], None] = print,
              lags_s: Sequence[float] = LAGS_S, at: int = 0, whole: bool = False) -> list[str]:
        """Sweep, told line by line; the answer is every trouble in full."""
        begun = time.monotonic()
        tell(HEAD)
        lines = self.sweep(flows, most, tell, lags_s, at, whole)
        total, tried = sum(line.points for line in lines), sum(line.tried for line in lines)
        states = sum(line.states for line in lines)
        bad = [f"{point}\n{why}" for line in lines for point, why in line.bad]
        late = " and ".join(f"{s:g}" for s in lags_s)
        tell(f"{total} points (each request to {self.cloud} x before/after, listings late by {late} s), {states} "
             f"states, {tried} tried in {time.monotonic() - begun:.0f} s: {len(bad)} leaks or losses")
        return bad

    def main(self, doc: str | None) -> int:
        parser = argparse.ArgumentParser(description=doc)
        parser.add_argument("--most", type=int, default=0, metavar="N", help="try N states of each flow only")
        parser.add_argument("--flow", default="", help="flows of this name only")
        parser.add_argument("--victim", default="", help="laptop or dispatcher only")
        parser.add_argument("--at", type=int, default=0, metavar="N", help="request number N only")
        parser.add_argument("--whole", action="store_true", help="try every point, also those of one state")
        given = parser.parse_args()
        logging.disable()  # what dispatchers say about their deaths
        flows = [f for f in self.flows if given.flow in ("", f.name) and given.victim in ("", f.victim)]
        bad = self.table(flows, given.most, lambda line: print(line, flush=True), at=given.at, whole=given.whole)
        print("\n".join(bad), end="")
        return 1 if bad else 0
