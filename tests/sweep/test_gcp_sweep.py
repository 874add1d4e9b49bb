"""On Google Cloud, too: killed at any request, nothing is left in the project. `python -m tests.sweep.gcp_sweep` tries
all."""

from __future__ import annotations

import os
import random

import pytest

from spotfleet.providers.gcp import network
from tests.support.sweep.gcp_sweep_world import DISPATCHER, LAPTOP, GcpSweepWorld
from tests.sweep.gcp_sweep import FLOWS, SWEEP, Point, kill, points

LONG = bool(os.environ.get("SPOTFLEET_LONG"))


@pytest.mark.timeout(0 if LONG else 600)  # its seconds of work may take minutes on a busy machine
def test_wherever_a_flow_on_google_cloud_is_killed_the_next_run_leaves_nothing_in_the_project():
    """All states in the long form; else one each of a few flows, in each run others."""
    flows = FLOWS if LONG else random.sample(FLOWS, 4)
    lines: list[object] = []
    bad = SWEEP.table(flows, 0 if LONG else 1, lines.append, (0.0, 3.0) if LONG else (random.choice((0.0, 3.0)),))
    print("\n" + "\n".join(map(str, lines)))
    assert not bad, "\n\n".join(bad)


def test_a_launch_whose_answer_is_never_read_is_found_again_on_google_cloud():
    """By its request id and its operation, not by a second machine."""
    kill(point(DISPATCHER, "up", "gcp compute.regionInstances.bulkInsert", after=True))


def test_the_sweep_finds_a_firewall_rule_that_nobody_removes(monkeypatch):
    monkeypatch.setattr(network, "listed", lambda *_: [])
    with pytest.raises(AssertionError, match=r"left in the project: .*firewall"):
        kill(point(LAPTOP, "up", "gcp compute.instances.insert", after=True))


def test_a_killed_process_asks_google_nothing_more():
    with GcpSweepWorld() as world:
        flow = next(f for f in FLOWS if (f.victim, f.name) == (LAPTOP, "up"))
        world.fuse.light(LAPTOP, 5)
        asked = len(world.gcp.calls)
        flow.act(world)
        assert len(world.gcp.calls) - asked == 4
        assert world.fuse.lives == 1


def point(victim: str, name: str, what: str, after: bool) -> Point:
    """At the first `what` of that flow."""
    flow = next(f for f in FLOWS if (f.victim, f.name) == (victim, name))
    return next(p for p in points(flow) if p.after is after and p.what == what)
