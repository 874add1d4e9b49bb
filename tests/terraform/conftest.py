"""Terraform with recorded schemas, started once; each module's own tests run once for all that read their plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.terraform.schema import used
from tests.terraform.schema.run import SchemaRun, TestReport, started, why_not


@pytest.fixture(scope="session")
def terraform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRun]:
    if reason := why_not():
        pytest.skip(reason)
    with started(tmp_path_factory.mktemp("schemas")) as run:
        yield run


@pytest.fixture(scope="session")
def module_tests(terraform: SchemaRun) -> Callable[[str], TestReport]:
    """Return what `terraform test` reports of a module: module_tests("gcp")."""
    known: dict[str, TestReport] = {}

    def report(name: str) -> TestReport:
        if name not in known:
            known[name] = terraform.tested(module(name))
        return known[name]

    return report


def module(name: str) -> Path:
    return used.MODULES / name
