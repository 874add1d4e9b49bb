"""On AWS, too: killed at any request, nothing is left in the account. `python -m tests.sweep.aws_sweep` tries all."""

from __future__ import annotations

import os
import random

import pytest

from spotfleet.providers.aws import terminate
from spotfleet.providers.aws.account import resources
from tests.support.sweep.aws_sweep_world import AwsWorld
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP
from tests.sweep.aws_sweep import FLOWS, SWEEP, Point, kill, points

LONG = bool(os.environ.get("SPOTFLEET_LONG"))


@pytest.mark.timeout(0 if LONG else 600)  # its seconds of work may take minutes on a busy machine
def test_wherever_a_flow_on_aws_is_killed_the_next_run_leaves_nothing_in_the_account():
    """All states in the long form; else one each of a few flows, in each run others."""
    flows = FLOWS if LONG else random.sample(FLOWS, 4)
    lines: list[object] = []
    bad = SWEEP.table(flows, 0 if LONG else 1, lines.append, (0.0, 3.0) if LONG else (random.choice((0.0, 3.0)),))
    print("\n" + "\n".join(map(str, lines)))
    assert not bad, "\n\n".join(bad)


def test_a_launch_whose_answer_is_never_read_is_found_again():
    """By its tag, not by a second one."""
    kill(point(DISPATCHER, "up", "aws ec2:CreateFleet", after=True))


def test_the_sweep_finds_a_launch_template_that_nobody_removes(monkeypatch):
    monkeypatch.setattr(terminate, "drop_template", lambda *_: None)
    listed = resources.listed

    def blind(*args, **options):
        return [b for b in listed(*args, **options) if b.kind != "launch-template"]

    monkeypatch.setattr(resources, "listed", blind)
    with pytest.raises(AssertionError, match="left in the account: launch-template"):
        kill(point(LAPTOP, "up", "aws ec2:RunInstances", after=True))


def test_a_killed_process_asks_nothing_more():
    with AwsWorld() as world:
        flow = next(f for f in FLOWS if (f.victim, f.name) == (LAPTOP, "up"))
        world.fuse.light(LAPTOP, 5)
        asked = len(world.aws.calls)
        flow.act(world)
        assert len(world.aws.calls) - asked == 4
        assert world.fuse.lives == 1


def point(victim: str, name: str, what: str, after: bool) -> Point:
    """At the first `what` of that flow."""
    flow = next(f for f in FLOWS if (f.victim, f.name) == (victim, name))
    return next(p for p in points(flow) if p.after is after and p.what == what)
