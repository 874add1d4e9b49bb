"""Packer templates: each is whole, and Packer takes it with the values that `spotfleet image build` writes.

Debian's Packer is 1.6.6, the last one with the clouds' builders compiled in. It lacks `required_plugins` and
`metadata_options`, so it gets the templates without these; python-hcl2 reads them unchanged. No image was ever built.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spotfleet.api.account.images import write
from spotfleet.bootstrap import wheel
from spotfleet.model import FleetSpec
from spotfleet.providers.kit import images
from spotfleet.providers.plugin import ImageRecipe, plugin_of

PROVIDERS = Path(__file__).parents[2] / "spotfleet" / "providers"
CLOUDS = ("aws", "azure", "gcp")
SECTIONS: dict[str, dict[str, Any]] = {"aws": {"ssh_from": ["192.0.2.0/24"]}, "gcp": {"project": "my-project-1"}}
REGIONS = {"aws": "us-east-1", "gcp": "us-central1"}
NOT_IN_1_6 = re.compile(r"\n  metadata_options \{.*?\n  \}\n", re.S)


def recipe(cloud: str, gpus: bool) -> ImageRecipe:
    if cloud == "azure":  # no provider yet: the values are those of docs/clouds/images.md
        return images.recipe("spotfleet.providers.azure", ("image.pkr.hcl", "plugins.pkr.hcl"), gpus,
                             location="westeurope", subscription="11111111-2222-3333-4444-555555555555",
                             resource_group="images")
    plugin = plugin_of(cloud)
    spec = FleetSpec("", provider=cloud, section=SECTIONS[cloud])
    found = plugin.image_recipe(plugin.config(spec, {}, ""), gpus=gpus, region=REGIONS[cloud])
    assert found is not None
    return found


def blocks(cloud: str, kind: str) -> dict[str, dict[str, Any]]:
    """Blocks of a template by their label."""
    hcl2 = pytest.importorskip("hcl2", reason="python-hcl2 reads the templates: pip install python-hcl2")
    found = hcl2.loads((PROVIDERS / cloud / "image.pkr.hcl").read_text())
    return {label.strip('"'): body for one in found.get(kind, []) for label, body in one.items()
            if not label.startswith("__")}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_variable_has_a_type_and_a_description_and_is_used(cloud: str):
    declared = blocks(cloud, "variable")
    bare = [name for name, body in declared.items() if not body.get("type") or not body.get("description")]
    used = set(re.findall(r"var\.(\w+)", (PROVIDERS / cloud / "image.pkr.hcl").read_text()))
    assert (bare, used) == ([], set(declared))


@pytest.mark.parametrize("gpus", [True, False], ids=["gpus", "cpus"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_values_are_those_that_the_template_declares_and_none_is_missing(cloud: str, gpus: bool):
    declared, given = blocks(cloud, "variable"), recipe(cloud, gpus).variables.keys()
    assert given <= declared.keys()
    assert {name for name, body in declared.items() if "default" not in body} <= given


@pytest.mark.parametrize("gpus", [True, False], ids=["gpus", "cpus"])
@pytest.mark.parametrize("cloud", CLOUDS)
@pytest.mark.processes  # a cheaper test would not know Packer's arguments
def test_packer_takes_the_template_with_its_values(cloud: str, gpus: bool, tmp_path: Path):
    packer = shutil.which("packer")
    if packer is None:
        pytest.skip("templates are validated by Packer, which is not installed: apt-get install packer")
    made = recipe(cloud, gpus)
    write(made, tmp_path)
    version = re.search(r"(\d+)\.(\d+)", subprocess.run([packer, "version"], capture_output=True, text=True).stdout)
    if version and (int(version[1]), int(version[2])) < (1, 7):
        (tmp_path / "plugins.pkr.hcl").unlink()
        template = tmp_path / "image.pkr.hcl"
        template.write_text(NOT_IN_1_6.sub("\n", template.read_text()))
    done = subprocess.run([packer, "validate", "."], cwd=tmp_path, capture_output=True, text=True, timeout=120, env={
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x",
        "CHECKPOINT_DISABLE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    formatted = subprocess.run([packer, "fmt", "-check", "."], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert formatted.returncode == 0, formatted.stdout


@pytest.mark.parametrize("cloud", CLOUDS)
def test_what_lies_beside_a_template_is_what_it_uploads(cloud: str, tmp_path: Path):
    made = recipe(cloud, False)
    write(made, tmp_path)
    uploaded = set(re.findall(r'source\s+= "\$\{path\.root\}/(.*)"', made.files["image.pkr.hcl"]))
    there = {path.name.replace(wheel.running().name, "${var.wheel}") for path in tmp_path.iterdir()}
    assert uploaded == there - {"image.pkr.hcl", "plugins.pkr.hcl", "values.auto.pkrvars.json"}
    assert json.loads((tmp_path / "values.auto.pkrvars.json").read_text()) == made.variables


def test_no_image_leaves_packer_without_being_sealed_and_no_machine_is_open_to_everybody():
    for cloud in CLOUDS:
        assert re.search(r"provision\.sh [^\n]* --seal", (PROVIDERS / cloud / "image.pkr.hcl").read_text())
    aws = (PROVIDERS / "aws" / "image.pkr.hcl").read_text()
    for line in (r'http_tokens += "required"', r"temporary_security_group_source_cidrs += var\.ssh_from",
                 r"encrypt_boot += true", r"http_put_response_hop_limit += 1"):
        assert re.search(line, aws), line
