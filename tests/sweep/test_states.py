"""Crash points are one only where all that outlives the process is the same, and each has the verdict of its state."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from spotfleet.fleet.domain.events import LaunchIntended
from spotfleet.fleet.ledger import Ledger
from spotfleet.providers.aws import terminate
from spotfleet.providers.aws.account import resources
from tests.support.sweep import sweep_flows
from tests.support.sweep.aws_sweep_world import AwsWorld
from tests.support.sweep.sweep_flows import Flow, Point, distinct, points
from tests.support.sweep.sweep_fuse import DISPATCHER, LAPTOP
from tests.support.sweep.sweep_states import digest
from tests.support.sweep.sweep_world import World
from tests.sweep import aws_sweep
from tests.sweep.kill_sweep import trouble


def two_reads(between: Callable[[World], object], made: type[World] = World) -> list[int]:
    """The states before and after each of two reads of the account, with something between them."""
    def act(world: World) -> None:
        def command() -> None:
            read(world)
            between(world)
            read(world)

        world.laptop(command)

    def read(world: World) -> None:
        if isinstance(world, AwsWorld):
            world.aws.client("ec2").describe_vpcs()
        else:
            world.provider.hosts("digits")

    found = [p.state for p in points(Flow("reads", LAPTOP, act, 0, before=read), made=made)]
    return found[:2] + found[-2:]


@pytest.mark.parametrize("made", [World, AwsWorld])
def test_reads_that_change_nothing_have_one_state(made: type[World]):
    assert two_reads(lambda world: None, made) == [1, 1, 1, 1]


@pytest.mark.parametrize("made", [World, AwsWorld])
@pytest.mark.parametrize(("what", "between"), [
    ("the disk", lambda world: (world.root / "file").write_text("")),
    ("the time", lambda world: world.clock.advance(0.001)),
    ("memory of another process", lambda world: world.turn(nothing())),
])
def test_a_change_between_two_reads_keeps_both_states(what: str, between: Callable[[World], object],
                                                      made: type[World]):
    assert two_reads(between, made) == [1, 1, 2, 2]


def test_a_change_of_the_account_between_two_reads_keeps_both_states():
    def refused(world: World) -> None:
        world.market.refuse("local/local-a/cpu.small/spot", "pool", world.clock.now, for_s=20.0)

    assert two_reads(refused) == [1, 1, 2, 2]
    for change in (lambda ec2: ec2.create_security_group(GroupName="a", Description="b"),
                   lambda ec2: ec2.create_tags(Resources=[ec2.describe_vpcs()["Vpcs"][0]["VpcId"]],
                                               Tags=[{"Key": "a", "Value": "b"}])):
        assert two_reads(lambda world, do=change: do(world.aws.client("ec2")), AwsWorld) == [1, 1, 2, 2]


async def nothing() -> None:
    """Another process had its turn."""


# ---- the digest


@dataclass
class Node:
    name: str
    held: list[object] = field(default_factory=list)


def test_a_digest_is_of_values_however_deep_and_ends_where_objects_hold_each_other():
    def graph(deep: object) -> Node:
        first, second = Node("a"), Node("b")
        first.held += [second, {"x": {"3", "1", "2"}}, lambda: deep]
        second.held += [first, (deep,)]
        return first

    assert digest(graph(1)) == digest(graph(1))
    assert digest(graph(1)) != digest(graph(2))
    assert digest([1, 2], [3]) != digest([1], [2, 3])
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})  # the order of things is seen, too
    one = Node("a")
    assert digest([one, one]) != digest([one, Node("a")])
    assert digest(Node("a", [one]), opaque=(one,)) == digest(Node("a", [one]), opaque=(one,))
    seen = digest(Node("a", [one]), opaque=(one,))
    one.name = "changed"
    assert digest(Node("a", [one]), opaque=(one,)) == seen


# ---- verdicts


def test_the_points_of_a_flow_are_the_same_in_each_run():
    flow = next(f for f in sweep_flows.FLOWS if f.name == "up once more")
    found = points(flow)
    assert [(p.what, p.state) for p in points(flow)] == [(p.what, p.state) for p in found]
    moved = next(p for p in found if p.what.startswith("file replace digits-"))
    sweep_flows.kill(moved)


def verdicts(kill: Callable[[Point], None], everywhere: list[Point]) -> tuple[set[int], set[int]]:
    """The bad states by a sweep of the states, and those by a sweep of every point; each point of a state agrees."""
    whole = [(p, bool(trouble(kill, p))) for p in everywhere]
    by_state: dict[int, set[bool]] = {}
    for point, bad in whole:
        by_state.setdefault(point.state, set()).add(bad)
    mixed = {state: [str(p) for p, _ in whole if p.state == state] for state, found in by_state.items()
             if len(found) > 1}
    assert not mixed, f"points of one state with several verdicts: {mixed}"
    first = dict((p, bad) for p, bad in whole)
    return {p.state for p in distinct(everywhere) if first[p]}, {p.state for p, bad in whole if bad}


def test_a_sweep_of_the_states_finds_what_a_sweep_of_every_point_finds(monkeypatch: pytest.MonkeyPatch):
    append = Ledger.append

    def forgetful(ledger: Ledger, *events: object) -> int:
        return append(ledger, *(e for e in events if not isinstance(e, LaunchIntended) or e.why.startswith("adopted")))

    flow = next(f for f in sweep_flows.FLOWS if (f.victim, f.name) == (DISPATCHER, "up"))
    everywhere = points(flow)
    assert len(distinct(everywhere)) < len(everywhere)
    assert verdicts(sweep_flows.kill, everywhere) == (set(), set())
    monkeypatch.setattr(Ledger, "append", forgetful)
    states, whole = verdicts(sweep_flows.kill, points(flow))
    assert states == whole
    assert states


@pytest.mark.timeout(0)
@pytest.mark.skipif(not os.environ.get("SPOTFLEET_LONG"), reason="the long form: SPOTFLEET_LONG=1")
def test_a_sweep_of_the_states_finds_what_a_sweep_of_every_request_to_aws_finds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminate, "drop_template", lambda *_: None)
    listed = resources.listed
    monkeypatch.setattr(resources, "listed", lambda *args, **options: [
        b for b in listed(*args, **options) if b.kind != "launch-template"])
    flow = next(f for f in aws_sweep.FLOWS if (f.victim, f.name) == (LAPTOP, "up"))
    everywhere = aws_sweep.points(flow)
    states, whole = verdicts(aws_sweep.kill, everywhere)
    assert states == whole
    assert states and len(states) < len(distinct(everywhere))
