"""`ray:` of the fleet file, and the packages that machines get by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfleet.config import parse
from spotfleet.errors import UsageError
from spotfleet.model import RaySpec, is_ray

FILE = Path("t.yaml")
SSH = "provider: ssh\nssh: {dispatcher: a, hosts: [b]}\n"


@pytest.mark.parametrize(("text", "spec"), [
    ("ray: true", RaySpec()), ("ray: {}", RaySpec()), ("run: x", None),
    ("ray: {version: 2.60.1, object_store: 0.3, port: 7000}", RaySpec("2.60.1", 0.3, 7000)),
    ("ray: {version: 2.6}", RaySpec("2.6")),
])
def test_ray_is_read_with_its_defaults(text, spec):
    assert parse(f"provider: local\n{text}", FILE, {}).spec.ray == spec


@pytest.mark.parametrize(("text", "said"), [
    ("ray: 2.60", "ray: expected true, or {version: 2.60.*, object_store: 0.1, port: 6379}"),
    ("ray: {version: '>=2'}", "ray.version: expected a version of Ray such as 2.60.0 or 2.60.*"),
    ("ray: {object_store: 0}", "ray.object_store: expected a share of each host's memory"),
    ("ray: {object_store: 90}", "ray.object_store: expected a share of each host's memory"),
    ("ray: {port: 70000}", "ray.port: expected a port"),
    ("ray: {versoin: 2.60.0}", "ray.versoin: unknown key; did you mean 'version'?"),
])
def test_a_wrong_value_is_named_with_what_is_right(text, said):
    with pytest.raises(UsageError) as refused:
        parse(f"provider: local\n{text}", FILE, {})
    assert said in str(refused.value)


@pytest.mark.parametrize(("text", "packages"), [
    ("ray: {version: 2.60.1}", ("ray==2.60.1",)),
    ("ray: true\nenvironment: {packages: [torch==2.13.0]}", ("torch==2.13.0", "ray==2.60.*")),
    ("ray: true\nenvironment: {packages: ['ray[default]==2.60.0']}", ("ray[default]==2.60.0",)),
    ("environment: {packages: [torch==2.13.0]}", ("torch==2.13.0",)),
])
def test_machines_get_ray_with_their_packages_unless_the_file_names_it_there(text, packages):
    assert parse(SSH + text, FILE, {}).spec.environment.packages == packages


@pytest.mark.parametrize(("requirement", "ray"), [
    ("ray", True), ("ray==2.60.0", True), ("Ray[default]>=2", True), ("ray ~=2.60", True), ("ray-cli", False),
    ("ray_lightning", False), ("raydp==1", False), ("rayon", False), ("xray", False)])
def test_a_requirement_for_ray_is_known_from_others(requirement, ray):
    assert is_ray(requirement) is ray
