"""The kill sweep on the example of a small cloud: killed anywhere, nothing of a fleet is lost, doubled or left."""

from __future__ import annotations

import os
import re

import pytest

from spotfleet.model import Autostop, Role
from tests.support.sweep.lambda_sweep_world import SPEC, LambdaSweepWorld, spec
from tests.support.sweep.sweep_flows import (
    Flow,
    Point,
    down,
    kill_in,
    loss,
    nothing_is_left,
    points,
    settled,
    up,
)
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP
from tests.support.sweep.sweep_world import World
from tests.sweep.kill_sweep import nothing_bad_is_left, trouble

PART = 1 if os.environ.get("SPOTFLEET_LONG") else 32  # one state of so many, in each run others
IDLE = spec(autostop=Autostop(idle_s=8.0))


def idle_then_down(world: World) -> None:
    """Its hosts end by themselves; the dispatcher's machine stays for a day, until `down` has fetched the results."""
    world.until("its hosts have ended", lambda: not world.living(Role.WORKER) and any(
        h.order.role is Role.WORKER for h in world.market.hosts.values()))
    down(world)


FLOWS = (
    Flow("up", LAPTOP, up(2, SPEC), 2),
    Flow("scale up", LAPTOP, up(3, SPEC), 3, before=up(2, SPEC)),
    Flow("scale down", LAPTOP, up(1, SPEC), 1, before=up(3, SPEC)),
    Flow("down", LAPTOP, down, 0, before=up(2, SPEC)),
    Flow("up", DISPATCHER, up(2, SPEC), 2),
    Flow("scale down", DISPATCHER, lambda w: (up(1, SPEC)(w), settled(w, 1)), 1, before=up(3, SPEC)),
    Flow("replace after a loss", DISPATCHER, loss, 2, before=up(2, SPEC)),
    Flow("down", DISPATCHER, down, 0, before=up(2, SPEC)),
    Flow("autostop", DISPATCHER, idle_then_down, 0, before=up(2, IDLE)),
)


def test_wherever_a_flow_on_the_example_is_killed_the_next_run_leaves_nothing_lost_doubled_or_orphaned():
    nothing_bad_is_left(FLOWS, LambdaSweepWorld, killed, PART)


def killed(point: Point) -> None:
    kill_in(LambdaSweepWorld, point, nothing_is_left)


def test_a_launch_whose_answer_is_never_read_is_found_by_its_tags_and_not_repeated():
    killed(at("up", DISPATCHER, "call /instance-operations/launch", after=True))


def test_the_sweep_finds_a_machine_that_the_example_does_not_end(monkeypatch: pytest.MonkeyPatch):
    point = at("down", DISPATCHER, "call /instance-operations/terminate", after=False)
    killed(point)
    with LambdaSweepWorld():
        from spotfleet_lambda import LambdaProvider  # found by the world's path

    monkeypatch.setattr(LambdaProvider, "terminate", lambda self, request_id: None)
    assert re.search("there are still digits-....-0, digits-....-1", trouble(killed, point))


def at(name: str, victim: str, what: str, after: bool) -> Point:
    """At the first `what` of that flow."""
    flow = next(flow for flow in FLOWS if (flow.name, flow.victim) == (name, victim))
    return next(p for p in points(flow, made=LambdaSweepWorld) if p.what == what and p.after is after)
