"""The modules by Terraform itself: format, names and types of all arguments, and their own tests."""

from __future__ import annotations

import re
import subprocess

import pytest

from spotfleet.version import __version__
from tests.terraform.conftest import module
from tests.terraform.schema import used
from tests.terraform.schema.run import why_not

MODULES = sorted(file.parent.name for file in used.MODULES.glob("*/variables.tf"))
EXAMPLES = [f"{name}/examples/{file.parent.name}" for name in MODULES
            for file in sorted(module(name).glob("examples/*/main.tf"))]
HARDLY_ANY = 20  # runs; a module with fewer leaves variables or wrong values untried


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_the_files_are_formatted():
    done = subprocess.run(["terraform", "fmt", "-check", "-recursive", "-diff", str(used.MODULES)], text=True,
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [*MODULES, *EXAMPLES])
def test_a_module_and_its_examples_are_valid(terraform, name):
    assert terraform.findings(module(name)) == []


@pytest.mark.parametrize("name", MODULES)
def test_the_first_use_in_a_readme_is_valid(terraform, tmp_path, name):
    """As a user copies it, with the module from this folder and a key in the place of the user's file."""
    used_so = (module(name) / "README.md").read_text().partition("```hcl\n")[2].partition("```")[0]
    released = f'"github.com/OWNER/spotfleet//terraform/{name}?ref=v{__version__}"'
    assert used_so.count(released) == 1
    text = used_so.replace(released, f'"{module(name)}"')
    (tmp_path / "main.tf").write_text(re.sub(r'file\("[^"]*\.pub"\)', '"ssh-ed25519 AAAA"', text))
    assert terraform.findings(tmp_path) == []


@pytest.mark.parametrize("name", MODULES)
def test_the_tests_of_a_module_pass(module_tests, name):
    report = module_tests(name)
    assert report.failed == [] and report.passed >= HARDLY_ANY
