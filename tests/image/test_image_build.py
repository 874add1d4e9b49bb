"""`spotfleet image build`, with a stand-in for Packer: what it is given, and what a user reads where it is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotfleet.cli.app import run

FLEET = """
name: f
provider: aws
nodes: 1
resources: {instance_type: m5.large, region: eu-west-1, use_spot: true}
aws: {ssh_from: 192.0.2.7, profile: builds}
"""
PACKER = """#!/bin/sh
echo "$1 $2 profile=$AWS_PROFILE $(ls | tr '\\n' ' ')" >>"$NOTES"
cp values.auto.pkrvars.json "$NOTES.values"
exit ${FAILS:-0}
"""


@pytest.fixture
def packer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where it writes down how it was called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "packer").write_text(PACKER)
    (tmp_path / "bin" / "packer").chmod(0o755)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    monkeypatch.setenv("SPOTFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


@pytest.mark.processes
def test_packer_gets_all_files_and_values_and_the_profile_of_the_fleet_file(packer: Path, tmp_path: Path, capfd):
    assert run(["image", "build", "aws", "-f", str(tmp_path / "fleet.yaml"), "--gpus"]) == 0
    files = ("efa.sh image.pkr.hcl plugins.pkr.hcl provision.sh spotfleet-0.1.0-py3-none-any.whl "
             "values.auto.pkrvars.json ")
    assert packer.read_text() == f"init . profile=builds {files}\nbuild . profile=builds {files}\n"
    values = json.loads(Path(f"{packer}.values").read_text())
    assert (values["region"], values["ssh_from"], values["kind"]) == ("eu-west-1", ["192.0.2.7/32"], "gpu")
    assert "aws: {image: spotfleet}" in capfd.readouterr().err


@pytest.mark.processes
def test_a_failed_build_is_an_error(packer: Path, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setenv("FAILS", "7")
    assert run(["image", "build", "aws", "-f", str(tmp_path / "fleet.yaml")]) == 1
    assert "packer init ended with status 7" in capfd.readouterr().err
    assert packer.read_text().count("\n") == 1


def test_without_packer_the_error_names_the_command_that_installs_it(packer: Path, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["image", "build", "aws", "-f", str(tmp_path / "fleet.yaml")]) == 2
    said = capfd.readouterr().err
    assert "Packer, which is not installed here" in said and "brew install hashicorp/tap/packer" in said
    made = tmp_path / "made"
    assert run(["image", "build", "aws", "-f", str(tmp_path / "fleet.yaml"), "--folder", str(made)]) == 0
    assert (made / "provision.sh").exists() and f"cd {made} && packer init ." in capfd.readouterr().err


def test_a_provider_without_images_is_refused(packer: Path, capfd):
    assert run(["image", "build", "local"]) == 2
    assert "machines of provider local start from no image that spotfleet builds" in capfd.readouterr().err
