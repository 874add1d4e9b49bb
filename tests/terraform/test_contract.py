"""The contract of a base: each module's output has the keys that the command line reads, and the docs describe them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spotfleet.config import base
from spotfleet.plugins import BASE_TAG, BASE_VERSION

TOP = Path(__file__).parents[2]
MODULES = sorted(path.parent.name for path in TOP.glob("terraform/*/outputs.tf"))
FOR_OTHERS = {"launch_template", "dispatcher", "worker_group"}  # other tools read these
KEYS = set(base._Contract.model_fields) | FOR_OTHERS


def contract(name: str) -> str:
    """The object of the output `spotfleet`, as the module has it among its locals."""
    found = re.findall(r"^  \w+ = \{\n(.*?)^  \}$", (TOP / "terraform" / name / "outputs.tf").read_text(), re.M | re.S)
    (text,) = (one for one in found if re.search(r"^    worker_group +=", one, re.M))
    return text


@pytest.mark.parametrize("name", MODULES)
def test_a_module_s_output_has_the_keys_that_are_read(name: str):
    assert set(re.findall(r"^    (\w+) +=", contract(name), re.M)) == KEYS
    for inner in ("hosts", "dispatcher"):
        assert re.search(rf"identities += \{{[^}}]*{inner} +=", contract(name), re.S), inner
        assert re.search(rf"firewall += \{{[^}}]*{inner} +=", contract(name), re.S), inner


def test_the_docs_describe_every_key_and_the_tag():
    text = (TOP / "docs" / "clouds" / "terraform.md").read_text()
    table = text.partition("## The contract")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", table)) >= KEYS
    assert f"contract: {BASE_VERSION} |" in table and f"`{BASE_TAG}`" in text
