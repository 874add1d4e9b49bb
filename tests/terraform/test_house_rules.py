"""Rules for the text of all modules: files, descriptions, validations, rights, generated parts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import terraform_files
from spotfleet.version import __version__
from tests.terraform.conftest import module
from tests.terraform.test_modules import EXAMPLES, MODULES

EVERY_MODULE = ("main.tf", "variables.tf", "outputs.tf", "versions.tf", "README.md", "examples/minimal",
                "examples/existing-network", "examples/complete")
VARIABLE = re.compile(r'^variable "(\w+)" \{\n(.*?)^\}', re.M | re.S)
OUTPUT = re.compile(r'^output "(\w+)" \{\n(.*?)^\}', re.M | re.S)
LISTS_OF_RIGHTS = re.compile(r'"?(?:not_)?(?:data_|include|included)?(?:[aA]ctions?|[pP]ermissions)"?\s*[=:]\s*'
                             r'(\[[^\]]*\]|"[^"]*")')
GIVES_ALL = re.compile(r".*\*.*|roles/(?:owner|editor|viewer)|Owner|Contributor")


def variables(folder: Path) -> Iterator[tuple[str, str]]:
    yield from VARIABLE.findall((folder / "variables.tf").read_text())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_the_files_of_all_modules(name):
    missing = [file for file in EVERY_MODULE if not (module(name) / file).exists()]
    assert missing == [] and list(module(name).glob("tests/*.tftest.hcl"))


@pytest.mark.parametrize("name", MODULES)
def test_each_variable_is_described_typed_and_refuses_wrong_values(name):
    for variable, body in variables(module(name)):
        kind = re.search(r"^  type += (\w+)", body, re.M)
        assert kind, f"{variable} has no type"
        assert re.search(r'^  description += ".{15,}"$', body, re.M), f"{variable} has no description"
        assert kind[1] == "bool" or "validation {" in body, f"{variable} takes any value"
        assert "nullable    = false" in body or re.search(r"^  default += null$", body, re.M), f"{variable}: null?"


@pytest.mark.parametrize("name", MODULES)
def test_each_validation_of_a_variable_is_tried(name):
    """By a run that expects it to fail: a validation that accepts all would be none."""
    tried = " ".join(file.read_text() for file in module(name).glob("tests/*.tftest.hcl"))
    untried = [variable for variable, body in variables(module(name))
               if "validation {" in body and not re.search(rf"\[var\.{variable}\]", tried)]
    assert untried == []


@pytest.mark.parametrize("name", [*MODULES, *EXAMPLES])
def test_each_variable_and_output_of_a_folder_is_described(name):
    for file in module(name).glob("*.tf"):
        for found, body in [*VARIABLE.findall(file.read_text()), *OUTPUT.findall(file.read_text())]:
            assert re.search(r'^  description += ".+"$', body, re.M), f"{file}: {found}"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_leaves_provider_and_backend_to_its_user(name):
    for file in module(name).glob("*.tf"):
        assert not re.search(r'^provider "|^\s+backend "', file.read_text(), re.M), file


@pytest.mark.parametrize("name", MODULES)
def test_no_role_gives_rights_by_wildcard(name):
    found = list(rights(module(name)))
    assert found and [right for right in found if GIVES_ALL.fullmatch(right)] == []


def rights(folder: Path) -> Iterator[str]:
    """Yield every right that a module's text and data name."""
    for file in [*folder.glob("*.tf"), *folder.glob("data/*.json")]:
        text = file.read_text()
        if file.name == "roles.json":
            yield from (right for role in json.loads(text).values() for right in role)
        for listed in LISTS_OF_RIGHTS.findall(text):
            yield from re.findall(r'"([^"]+)"', listed)
        yield from re.findall(r'"(Microsoft\.[\w./*]+)"', text)
        yield from re.findall(r'"(roles/[\w.]+)"', text)


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name.startswith("azure")])
def test_an_owner_can_apply_the_module_for_azure_though_the_storage_account_takes_no_keys(example):
    """Owner and Contributor may not read in a storage account; the provider reads there by default."""
    for text in ((module(example) / "versions.tf").read_text(), (module("azure") / "README.md").read_text()):
        assert re.search(r"^  storage_use_azuread = true ", text, re.M)
        assert re.search(r"^      data_plane_available = false ", text, re.M)


KEPT_DATA = {
    "aws": {"aws_s3_bucket": "force_destroy = var.empty_bucket_on_destroy",
            "aws_ebs_volume": "final_snapshot    = true"},
    "gcp": {"google_storage_bucket": "force_destroy               = false",
            "google_compute_disk": "create_snapshot_before_destroy = true"},
    "azure": {kind: "prevent_destroy = true" for kind in (
        "azurerm_storage_account", "azurerm_storage_container", "azurerm_managed_disk")}}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KEPT_DATA.items() for kind in kinds])
def test_neither_destroy_nor_a_replacement_ends_checkpoints_or_the_dispatchers_state(name, kind):
    text = "".join(file.read_text() for file in module(name).glob("*.tf"))
    blocks = re.findall(rf'^resource "{kind}" "\w+" \{{\n(.*?)^\}}', text, re.M | re.S)
    assert blocks and [block for block in blocks if KEPT_DATA[name][kind] not in block] == []


def test_a_right_by_wildcard_is_found(tmp_path):
    (tmp_path / "roles.tf").write_text('permissions {\n  actions = ["Microsoft.Compute/disks/*", "a/b/read"]\n}\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "base.json").write_text('{"Action": "ec2:*", "Resource": "*"}')
    assert {r for r in rights(tmp_path) if GIVES_ALL.fullmatch(r)} == {"Microsoft.Compute/disks/*", "ec2:*"}


@pytest.mark.parametrize("name", [n for n in MODULES if n != "aws"])
def test_a_module_has_the_release_of_the_package(name):
    assert re.search(rf'^  version +=\s+"{re.escape(__version__)}" ', (module(name) / "main.tf").read_text(), re.M)


@pytest.mark.parametrize("name", [n for n in MODULES if n != "aws"])
def test_a_readme_admits_that_the_module_was_never_applied(name):
    assert "**never applied**" in (module(name) / "README.md").read_text()


def test_the_generated_parts_are_those_of_the_sources(capsys):
    assert terraform_files.main(["--check"]) == 0, capsys.readouterr().out


def test_a_table_that_is_not_up_to_date_is_named_and_written_anew(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(terraform_files, "TOP", tmp_path)
    shutil.copytree(module("gcp").parent, tmp_path / "terraform", ignore=shutil.ignore_patterns(".terraform"))
    readme = tmp_path / "terraform" / "gcp" / "README.md"
    wanted = readme.read_text()
    readme.write_text(wanted.replace("| `bool` |", "| `number` |"))
    assert terraform_files.main(["--check"]) == 1 and readme.read_text() != wanted
    assert "terraform/gcp/README.md is not up to date: run `python scripts/terraform_files.py`" in (
        capsys.readouterr().out)
    assert terraform_files.main([]) == 0 and readme.read_text() == wanted
