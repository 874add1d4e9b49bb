"""What a reader of a simulation is told beside its figures."""

from __future__ import annotations

import json

import pytest

from spotfleet.fleet.policy.lifetimes import BootTime
from spotfleet.model import FleetSpec, GroupSpec, Need, Nodes, all_nodes
from spotfleet.simulate.request import SimulationRequest, prepare
from spotfleet.simulate.tariff import PriceOverrides


def test_another_machine_than_the_records_is_said_once_for_all_records(tmp_path):
    paths = []
    for zone in ("us-west-2a", "us-west-2b"):
        path = tmp_path / f"{zone}_v100_1.json"
        path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1] * 100}))
        paths.append(str(path))
    spec = FleetSpec("f", "aws", (Need(instance_type="p4d.24xlarge"),))
    asked = prepare(spec, SimulationRequest(tuple(paths)), lambda text: None)
    assert asked.notes[0] == "the availability of p3.2xlarge stands in for that of p4d.24xlarge"
    assert len([n for n in asked.notes if "stands in" in n]) == 1
    assert {r.tariff.instance_type for r in asked.records} == {"p4d.24xlarge"}


@pytest.mark.parametrize(("given", "seconds", "source"), [
    ({}, 180.0, "assumed: no boot of this fleet has been measured; --boot sets it"),
    ({"measured": BootTime()}, 180.0, "assumed: no boot of this fleet has been measured; --boot sets it"),
    ({"measured": BootTime(240.0, 7)}, 240.0, "the median of 7 boots of this fleet"),
    ({"measured": BootTime(240.0, 7), "boot_s": 0.0}, 0.0, "as asked for"),
])
def test_a_boot_takes_as_long_as_it_was_measured_unless_it_is_given(tmp_path, given, seconds, source):
    path = tmp_path / "us-west-2a_v100_1.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1] * 100}))
    spec = FleetSpec("f", "aws", (Need(instance_type="p3.2xlarge"),))
    plan = prepare(spec, SimulationRequest((str(path),), work_s=3600.0, **given), lambda text: None).plan
    assert (plan.setting.boot_s, plan.boot_from) == (seconds, source)


def test_a_record_of_prices_says_nothing_about_what_could_be_had(tmp_path):
    path = tmp_path / "us_east.csv"
    path.write_text("Date,NC6\n2/24/2020,$0.12276\n2/25/2020,$0.13\n")
    asked = prepare(FleetSpec("f", "azure"), SimulationRequest((str(path),), overrides=PriceOverrides(0, 900_000)),
                    lambda text: None)
    assert "a record of prices alone says nothing about what could be had: always enough is assumed" in asked.notes


def test_of_a_fleet_with_groups_the_one_with_accelerators_is_simulated(tmp_path):
    path = tmp_path / "us-west-2a_v100_1.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [1] * 100}))
    cpu = GroupSpec("cpu", Nodes(1, 9, 9), (Need(instance_type="c5.xlarge"),))
    gpu = GroupSpec("gpu", Nodes(0, 2, 2), (Need(accelerator="V100", accelerator_count=1),))
    spec = FleetSpec("f", "aws", (*cpu.any_of, *gpu.any_of), all_nodes([cpu.nodes, gpu.nodes]), groups=(cpu, gpu))
    asked = prepare(spec, SimulationRequest((str(path),), work_s=3600.0), lambda text: None)
    assert asked.plan.setting.hosts == 2 and asked.notes[0] == "of the fleet's groups only gpu is simulated"
