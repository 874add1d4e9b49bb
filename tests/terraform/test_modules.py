"""The modules by Terraform itself: format, names and types of all arguments, and their own tests."""

from __future__ import annotations

import subprocess

import pytest

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
def test_the_tests_of_a_module_pass(module_tests, name):
    report = module_tests(name)
    assert report.failed == [] and report.passed >= HARDLY_ANY
