"""`groups` of a fleet file: named groups of hosts, and a range that begins with no host."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.config import Given, parse
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, GroupSpec, Need, Nodes

FILE = Path("/work/fleet.yaml")


def spec(text: str, **given: str) -> FleetSpec:
    return parse(text, FILE, {}, given=Given(**given)).spec


def problem(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(text, FILE, {})
    return str(caught.value).removeprefix(f"{FILE}:")


def test_a_fleet_without_groups_is_one_group_without_a_name():
    found = spec("nodes: 2..3\nresources: {zone: a}")
    assert found.groups == () and found.parts == (GroupSpec("", Nodes(2, 3, 3), (Need(zone="a"),)),)


def test_a_range_may_begin_with_no_host():
    assert spec("nodes: {min: 0, max: 4, idle_after: 90s}").nodes == Nodes(0, 4, 4, 90.0)
    assert spec("nodes: 0..2").nodes == Nodes(0, 2, 2, 300.0)
    assert spec("nodes: {max: 2}").nodes == Nodes(1, 2, 2)


def test_each_group_has_its_range_and_its_machines_on_top_of_the_common_ones():
    found = spec("""
resources: {region: us-east-1, max_hourly_cost: 2}
groups:
  cpu: {nodes: {min: 1, max: 4}, instance_type: cpu.small, use_spot: false}
  gpu:
    nodes: 0..2
    accelerators: V100:8
    any_of: [{zone: us-east-1a}, {use_spot: false}]
""")
    here = Need(region="us-east-1", max_micros_h=2_000_000)
    cpu = Need(region="us-east-1", max_micros_h=2_000_000, instance_type="cpu.small", use_spot=False)
    gpu = {"accelerator": "V100", "accelerator_count": 8}
    card = (Need(**{**vars(here), **gpu, "zone": "us-east-1a"}), Need(**{**vars(here), **gpu, "use_spot": False}))
    assert found.groups == (GroupSpec("cpu", Nodes(1, 4, 4), (cpu,)), GroupSpec("gpu", Nodes(0, 2, 2), card))
    assert found.nodes == Nodes(1, 6, 6) and found.any_of == (cpu, *card)  # those of all, for quotas and regions
    assert not found.shares_jobs


def test_common_alternatives_are_those_of_each_group_without_its_own():
    found = spec("resources: {any_of: [{zone: a}, {zone: b}]}\ngroups: {x: {nodes: 1}, y: {nodes: 1, use_spot: false}}")
    assert found.groups[0].any_of == (Need(zone="a"), Need(zone="b"))
    assert found.groups[1].any_of == (Need(zone="a", use_spot=False), Need(zone="b", use_spot=False))
    assert found.shares_jobs


def test_the_command_line_moves_the_groups_too():
    text = "groups: {x: {nodes: 1, infra: local/r/a}}\nprovider: local"
    assert spec(text).groups[0].any_of == (Need(region="r", zone="a"),)
    assert spec(text, infra="local/r/b").groups[0].any_of == (Need(region="r", zone="b"),)


@pytest.mark.parametrize(("text", "said"), [
    ("groups: {gpu: {accelerators: T4:1}}", "1: groups.gpu: names no range; add `nodes: 0..4`"),
    ("groups: {}", "1: groups: names no group; write `cpu: {nodes: 0..4}`, or remove it"),
    ("nodes: 2\ngroups: {cpu: {nodes: 1}}", "1: nodes: stands in each group of `groups`; remove it here"),
    ("groups:\n  d: {nodes: 1}", "2: groups.d: expected a name of small letters and digits, a letter first, at most "
                                 "12, not 'd', got 'd'"),
    ("groups:\n  a-b: {nodes: 1}", "2: groups.a-b: expected a name of small letters and digits, a letter first, at "
                                   "most 12, not 'd', got 'a-b'"),
    ("groups:\n  cpu:\n    nodes: 3..2", "3: groups.cpu.nodes.min: expected 0 <= min <= target <= max, but min 3 is "
                                         "above max 2"),
    ("groups:\n  cpu: {nodes: 1, acelerators: T4}", "2: groups.cpu.acelerators: unknown key; did you mean "
                                                    "'accelerators'?"),
    ("groups:\n  cpu: {nodes: 1, disk_size: 9}", "2: groups.cpu.disk_size: is of the whole fleet; write it under "
                                                 "`resources`"),
    ("groups:\n  cpu: {nodes: 2}\non_demand_base: 1", "3: on_demand_base: does not go together with `groups`; write "
                                                      "`use_spot: false` in a group whose hosts are to be on demand"),
    (f"name: {'a' * 37}\ngroups:\n  cpu: {{nodes: 2}}",
     f"3: groups.cpu: is too long beside the fleet's name '{'a' * 37}': hosts have names of both, at most 39 "
     "characters together"),
    ("provider: local\ngroups:\n  cpu: {nodes: 2, infra: aws}",
     "3: groups.cpu.infra: names provider 'aws', but the fleet's is 'local'; for a fleet on several clouds write "
     "`provider: [local, aws]`"),
])
def test_a_wrong_group_is_named_with_its_line_and_the_fix(text: str, said: str):
    assert problem(text) == said


def test_machines_that_exist_have_no_groups():
    text = "provider: ssh\nssh: {dispatcher: head, hosts: [a, b], user: u}\ngroups: {cpu: {nodes: 1}}"
    assert "groups: are of machines that are launched, and those of ssh exist" in problem(text)
