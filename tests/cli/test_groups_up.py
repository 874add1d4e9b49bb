"""Groups of hosts and hosts that come with jobs, as the command line shows and asks for them."""

from __future__ import annotations

import pytest

from spotfleet.api.lifecycle.preview import changes
from spotfleet.api.lifecycle.up import up_hosts
from spotfleet.api.train import TrainRequest as Request
from spotfleet.api.train import default_hosts, default_np, refuse_group
from spotfleet.cli import render
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, GroupSpec, Need, Nodes, all_nodes
from spotfleet.protocol.messages import FleetStatus, GroupStatus, HostStatus

GROUPS = """name: digits
groups:
  cpu: {nodes: 1..2, instance_type: cpu.small}
  gpu: {nodes: {min: 0, max: 2, idle_after: 90s}, accelerators: EMU:1}
"""
CPU = GroupSpec("cpu", Nodes(1, 2, 2), (Need(instance_type="cpu.small"),))
GPU = GroupSpec("gpu", Nodes(0, 2, 2), (Need(accelerator="EMU", accelerator_count=1),))


def spec(*groups: GroupSpec) -> FleetSpec:
    return FleetSpec("f", any_of=tuple(n for g in groups for n in g.any_of), nodes=all_nodes(g.nodes for g in groups),
                     groups=groups)


STATUS = FleetStatus("f", "up", "", 1, 4, 4, hosts=(
    HostStatus("f-d-0", "dispatcher", "up", "p", 0, 0, 0),
    HostStatus("f-cpu-0", "worker", "up", "p", 1, 0, 0, group="cpu"),
), groups=(GroupStatus("cpu", 1, 2, 2, 1, slots=1), GroupStatus("gpu", 0, 2, 2, 0, slots=8)))


def test_the_plan_of_a_fleet_that_begins_with_no_host_has_the_dispatcher_alone(user):
    user.write("fleet.yaml", "name: digits\nnodes: 0..3\nresources: {instance_type: cpu.small}\n")
    out = user.ok("up fleet.yaml --plan").out
    lines = out.splitlines()
    assert lines[:2] == ["fleet digits on local: to be made; 0..3 hosts, target 3",
                         "with a min of 0 hosts come when a job needs them, and go when idle for 5m00s"]
    assert "about $0.0850/h in all" in out and "problem" not in out


def test_the_plan_shows_each_group_and_the_hosts_that_it_begins_with(user):
    user.write("fleet.yaml", GROUPS + "work: 48h\n")
    out = user.ok("up fleet.yaml --plan").out
    assert "of work will cost" not in out  # a job has the hosts of one group, and nobody knows of which
    assert "group cpu: 1..2 hosts, target 2\ngroup gpu: 0..2 hosts, target 2\n" in out
    assert "go when idle for 1m30s" in out
    rows = [line.split() for line in out.splitlines() if line[:6] in ("1 host", "2 host")]
    assert sum(int(row[0]) for row in rows) == 2 and {row[2] for row in rows} == {"cpu.small"}


def test_a_group_for_which_nothing_is_on_sale_is_named_before_anything_is_made(user):
    user.write("fleet.yaml", GROUPS.replace("EMU:1", "EMV:1"))
    said = user.fails("up fleet.yaml -y", code=2).err
    assert "groups.gpu: accelerators 'EMV' is unknown; there is EMU" in said
    assert user.cloud.living() == []


def test_status_lists_the_groups_and_the_group_of_each_host():
    text = render.fleet_status(STATUS)
    assert "group gpu: 0..2 hosts, target 2; 0 wanted now" in text
    (row,) = (line.split()[:3] for line in text.splitlines() if line.startswith("f-cpu"))
    assert row == ["f-cpu-0", "worker", "cpu"]
    assert [h.host for h in up_hosts(STATUS, "cpu")] == ["f-cpu-0"] and not up_hosts(STATUS, "gpu")


def test_a_job_of_a_group_gets_by_default_all_slots_of_its_hosts_also_before_there_is_one():
    assert default_np(STATUS, "gpu") == (8, 16) and default_np(STATUS, "cpu") == (1, 2)
    assert default_hosts(STATUS, Request(group="gpu")) == (1, 2) and default_hosts(STATUS, Request()) == (1, 4)


@pytest.mark.parametrize(("groups", "group", "said"), [
    ((CPU, GPU), "", "the fleet's groups have different machines, and the job names none of them: cpu, gpu"),
    ((CPU, GPU), "tpu", "--group tpu: the fleet has the groups cpu, gpu"),
    ((), "gpu", "--group gpu: the fleet has no groups"),
])
def test_a_job_names_a_group_that_there_is(groups, group, said):
    with pytest.raises(UsageError) as caught:
        refuse_group(spec(*groups) if groups else FleetSpec("f"), group)
    assert str(caught.value) == said


def test_a_job_needs_no_group_where_all_have_the_same_machines():
    refuse_group(spec(CPU, GroupSpec("more", Nodes(0, 1, 1), CPU.any_of)), "")
    refuse_group(FleetSpec("f"), "")
    refuse_group(spec(CPU, GPU), "gpu")


def test_a_running_fleet_changes_the_ranges_of_its_groups_and_nothing_else_of_them():
    wider = GroupSpec("gpu", Nodes(0, 9, 9), GPU.any_of)
    other = GroupSpec("gpu", GPU.nodes, (Need(accelerator="EMV", accelerator_count=1),))
    assert changes(spec(CPU, GPU), spec(CPU, wider)) == []
    assert changes(spec(CPU, GPU), spec(CPU, other)) == ["groups"]
    assert changes(spec(CPU), spec(CPU, GPU)) == ["groups"]
