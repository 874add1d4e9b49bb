"""Mistakes in variables: the module itself refuses them, with a text that says what to write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.terraform.conftest import module

KEY = 'ssh_public_key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA"'
BOTH = {
    "open SSH": ('ssh_cidrs = ["0.0.0.0/0"]', "opens SSH to the world: write the networks that you come from, such as "
                                               '["203.0.113.0/24"]'),
    "bad name": ('name = "My Base"', "name is 'My Base': write 2 to 16 small letters, digits and -, a letter first and "
                                     'no - at the end, such as "research"'),
    "wrong CIDR": ('cidr = "10.60.0.1/20"', "cidr is '10.60.0.1/20': write a network of /8 to /28 whose address ends "
                                            'in zero bits, such as "10.60.0.0/20"'),
}
MISTAKES = {
    "aws": {
        "open SSH": ('ssh_cidrs = ["0.0.0.0/0"]', "SSH from everywhere is refused. Name the networks that you come from"
                                                  ', such as ssh_cidrs = ["203.0.113.7/32"]'),
        "bad name": ('name = "My Base"', 'such as name = "research"'),
        "wrong CIDR": ('cidr = "10.64.0.1/16"', 'such as cidr = "10.64.0.0/16"'),
        "zero hosts": ('worker_group = { image = "ami-0a1b2c3d4e5f67890", hosts = 0, gpu = "A10G" }',
                       "Write 1 or more hosts, such as hosts = 2. For no group at all leave worker_group out."),
        "unknown GPU": ('worker_group = { image = "ami-0a1b2c3d4e5f67890", hosts = 2, gpu = "T5" }',
                        "Unknown GPU. Write one of A100, "),
        "missing region": ("region = null", 'Name the region, such as region = "us-east-1"'),
    },
    "gcp": BOTH | {
        "zero hosts": (f"worker_group = {{ hosts = 0, {KEY} }}",
                       "worker_group.hosts is 0: write a whole number from 1 to 1000, or leave worker_group out"),
        "unknown GPU": ('machine_type = "n1-standard-8"\n  gpu = { type = "nvidia-tesla-t5" }',
                        "gpu.type is 'nvidia-tesla-t5', which cannot be attached: write nvidia-tesla-t4,"),
        "missing region": ("region = null", 'region is missing: write one such as "us-central1"'),
        "zone as region": ('region = "us-central1-a"', "region is 'us-central1-a': write a region such as "
                                                       '"us-central1", without the letter of a zone'),
    },
    "azure": BOTH | {
        "zero hosts": (f'worker_group = {{ hosts = 0, gpu = "T4", {KEY} }}',
                       "worker_group.hosts is 0: write a whole number from 1 to 100, or leave worker_group out"),
        "unknown GPU": (f'worker_group = {{ hosts = 2, gpu = "T5", {KEY} }}',
                        "worker_group.gpu is 'T5', which is unknown: write one of A10, A100,"),
        "missing region": ("region = null", 'region is missing: write one such as "eastus"'),
        "region with spaces": ('region = "East US"', "region is 'East US': write the short name of a region such as "
                                                     '"eastus"'),
    },
}
TRY = """%s
variables {
%s
}
run "try" {
  command = plan
}
"""
RIGHT = {"aws": {"name": '"research"', "region": '"us-east-1"'},
         "gcp": {"name": '"research"', "project": '"my-project-123"', "region": '"us-central1"'},
         "azure": {"name": '"research"', "region": '"eastus"', "image": '"/subscriptions/1/resourceGroups/g/providers/'
                                                                        'Microsoft.Compute/images/gpu"'}}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_refused_with_what_to_write(terraform, tmp_path, name):
    folder = Path(shutil.copytree(module(name), tmp_path / name, ignore=shutil.ignore_patterns("tests", "examples")))
    mocked = (module(name) / "tests" / "validation.tftest.hcl").read_text().partition("\nvariables {")[0]
    tests = folder / "tests"
    tests.mkdir()
    for number, (wrong, _) in enumerate(MISTAKES[name].values()):  # a failed run ends its file
        right = "\n".join(f"  {k} = {v}" for k, v in RIGHT[name].items() if not wrong.startswith(f"{k} ="))
        (tests / f"{number}.tftest.hcl").write_text(TRY % (mocked, f"{right}\n  {wrong}"))
    found = terraform.tested(folder).errors_by_file()
    for number, (kind, (_, text)) in enumerate(MISTAKES[name].items()):
        answers = found.get(f"tests/{number}.tftest.hcl", [])
        assert len(answers) == 1 and text in " ".join(answers[0].split()), f"{kind}: {answers}"
