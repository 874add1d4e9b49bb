"""Recorded schemas: they have what the modules use, and Terraform refuses what they do not have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.terraform.schema import plugin, used

AGAIN = "write it again: python -m tests.terraform.schema.extract"


@pytest.mark.parametrize("provider", plugin.PROVIDERS)
def test_every_resource_of_the_modules_is_recorded_with_its_source(provider):
    recorded = json.loads((plugin.HERE / f"{provider}.json").read_text())
    assert recorded["source"] and recorded["version"] in recorded["source"]
    for kind, name in used.named(f"{provider}_"):
        group = "resource_schemas" if kind == "resource" else "data_source_schemas"
        assert name in recorded[group], f"{provider}.json has no {kind} {name}: {AGAIN}"


@pytest.mark.parametrize(("right", "wrong", "found"), [
    ("private_ip_google_access ", "private_ip_gogle_access ", 'Did you mean "private_ip_google_access"?'),
    ('  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"\n', "",
     'The argument "source_subnetwork_ip_ranges_to_nat" is required'),
    ('resource "google_compute_router" ', 'resource "google_compute_ruter" ', "google_compute_ruter"),
    ("auto_create_subnetworks = false", "auto_create_subnetworks = []", "bool required"),
    ("  log_config {", "  log_konfig {", 'Blocks of type "log_konfig" are not expected here'),
])
def test_a_mistake_in_a_resource_is_found_by_its_schema(terraform, tmp_path, right, wrong, found):
    folder = Path(shutil.copytree(used.MODULES / "gcp", tmp_path / "gcp", ignore=shutil.ignore_patterns("tests")))
    file = folder / "network.tf"
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))
    findings = terraform.findings(folder)
    assert any(found in finding for finding in findings), findings
