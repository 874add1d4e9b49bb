"""The kill sweep on a third party's cloud: killed anywhere, nothing of a fleet is lost, doubled or left there."""

from __future__ import annotations

import os

import pytest

from spotfleet.model import Autostop
from tests.support.sweep.sweep_flows import (
    Flow,
    Point,
    down,
    idle_and_closed,
    kill_in,
    loss,
    nothing_is_left,
    notice,
    points,
    settled,
    up,
)
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP
from tests.support.sweep.toy_sweep_world import SPEC, ToySweepWorld, spec
from tests.sweep.kill_sweep import nothing_bad_is_left, trouble

PART = 1 if os.environ.get("SPOTFLEET_LONG") else 32  # one state of so many, in each run others
IDLE = spec(autostop=Autostop(idle_s=8.0))
FLOWS = (
    Flow("up", LAPTOP, up(2, SPEC), 2),
    Flow("scale up", LAPTOP, up(3, SPEC), 3, before=up(2, SPEC)),
    Flow("scale down", LAPTOP, up(1, SPEC), 1, before=up(3, SPEC)),
    Flow("down", LAPTOP, down, 0, before=up(2, SPEC)),
    Flow("up", DISPATCHER, up(2, SPEC), 2),
    Flow("scale down", DISPATCHER, lambda w: (up(1, SPEC)(w), settled(w, 1)), 1, before=up(3, SPEC)),
    Flow("replace after a notice", DISPATCHER, notice, 2, before=up(2, SPEC)),
    Flow("replace after a loss", DISPATCHER, loss, 2, before=up(2, SPEC)),
    Flow("down", DISPATCHER, down, 0, before=up(2, SPEC)),
    Flow("autostop", DISPATCHER, idle_and_closed, 0, before=up(2, IDLE)),
)


def test_wherever_a_flow_on_the_toy_is_killed_the_next_run_leaves_nothing_lost_doubled_or_orphaned():
    nothing_bad_is_left(FLOWS, ToySweepWorld, killed, PART)


def killed(point: Point) -> None:
    kill_in(ToySweepWorld, point, nothing_is_left)


def test_the_sweep_finds_a_machine_that_the_toy_does_not_end(monkeypatch: pytest.MonkeyPatch):
    ending = next(flow for flow in FLOWS if flow.name == "down")
    point = next(p for p in points(ending, made=ToySweepWorld) if p.what == "call terminate")
    killed(point)
    from spotfleet_toy import ToyProvider  # found by the world's path

    monkeypatch.setattr(ToyProvider, "terminate", lambda self, request_id: None)
    assert "there are still digits-0, digits-1" in trouble(killed, point)
