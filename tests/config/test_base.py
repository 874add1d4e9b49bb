"""A base that Terraform made, as `up --from-terraform` reads it, and the fleet file on top of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotfleet.config import Given, base, parse
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec
from spotfleet.plugins import Base
from spotfleet.providers.aws.section.spec import AwsNetwork, AwsSpec, parsed

FILE = Path("/work/fleet.yaml")
CONTRACT: dict[str, Any] = {
    "version": 1, "module": "0.1.0", "provider": "aws", "name": "research", "account": "123456789012",
    "region": "us-east-1", "network": "vpc-0123456789abcdef0", "subnets": ["subnet-01234567", "subnet-89abcdef"],
    "public_addresses": False, "firewall": {"hosts": ["sg-01234567"], "dispatcher": ["sg-89abcdef"]},
    "identities": {"hosts": "spotfleet-research-us-east-1-host",
                   "dispatcher": "spotfleet-research-us-east-1-dispatcher"},
    "checkpoints": "s3://acme/spotfleet", "queue": "spotfleet-research", "image": "", "dispatcher_image": "",
    "disk_gib": 150, "dispatcher_disk_gib": 30, "disk_key": "", "launch_template": {"id": "lt-1", "version": "1"},
    "dispatcher": None, "worker_group": None, "tags": {"spotfleet-base": "research"},
}


def given(**changed: Any) -> Base:
    return base.parse(json.dumps(CONTRACT | changed), "x.json")


def spec(text: str, on: Base | None = None) -> FleetSpec:
    return parse(text, FILE, {}, given=Given(base=on or given())).spec


def problem(text: str, on: Base | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        spec(text, on)
    return str(caught.value)


def test_a_base_sets_what_lasts_and_the_file_what_a_run_decides():
    found = spec("nodes: 2\nresources: {accelerators: A10G:1}\ntags: {team: vision}")
    assert (found.provider, found.nodes.target, found.checkpoint.target) == ("aws", 2, "s3://acme/spotfleet")
    assert found.tags == {"team": "vision", "spotfleet-base": "research"}
    assert parsed(found.section) == AwsSpec(
        regions=("us-east-1",),
        networks=(AwsNetwork("us-east-1", "vpc-0123456789abcdef0", ("subnet-01234567", "subnet-89abcdef"),
                             ("sg-01234567",), ("sg-89abcdef",)),),
        public_addresses=False, disk_gib=150, host_profile="spotfleet-research-us-east-1-host",
        dispatcher_profile="spotfleet-research-us-east-1-dispatcher", interruption_queue="spotfleet-research")


@pytest.mark.parametrize("text", [json.dumps({"spotfleet": {"value": CONTRACT, "type": "object", "sensitive": False}}),
                                  json.dumps({"value": CONTRACT}), json.dumps(CONTRACT | {"of a newer module": 1})])
def test_all_forms_in_which_terraform_prints_the_output_are_read(text: str):
    assert base.parse(text, "x.json") == given()


@pytest.mark.parametrize(("text", "words"), [
    ("nonsense", "x.json: is not JSON"),
    ("{}", "x.json: has no output `spotfleet`"),
    ("[]", "x.json: has no output `spotfleet`"),
    (json.dumps(CONTRACT | {"version": 2}), "version 2 of the contract, and spotfleet 0.1.0 reads version 1"),
    (json.dumps(CONTRACT | {"subnets": "subnet-1"}), "x.json: subnets: "),
    (json.dumps(CONTRACT | {"tags": {}}), "x.json: tags: has no spotfleet-base"),
])
def test_what_is_no_contract_is_refused(text: str, words: str):
    with pytest.raises(UsageError, match=r"x\.json") as caught:
        base.parse(text, "x.json")
    assert words in str(caught.value) and caught.value.hint


def test_the_outputs_of_a_network_alone_are_answered_with_how_to_use_it():
    with pytest.raises(UsageError, match="has no output `spotfleet`") as caught:
        base.parse(json.dumps({"vpc_id": {"value": "vpc-0a1b2c3d4e5f67890"}}), "x.json")
    assert "it takes a network that you have" in caught.value.hint and "in the fleet file" in caught.value.hint


def test_a_newer_contract_asks_for_a_newer_spotfleet_and_an_older_one_for_a_newer_module():
    hints = []
    for version in (0, 2):
        with pytest.raises(UsageError) as caught:
            given(version=version)
        hints.append(caught.value.hint)
    assert "terraform apply" in hints[0] and "pip install" in hints[1]


def test_what_lasts_stands_in_one_place_only():
    assert f"{FILE}:1: aws.host_profile: base research sets it, too" in problem("aws: {host_profile: mine}")
    assert "checkpoint.target: base research sets it, too" in problem("checkpoint: {target: s3://other}")
    assert "provider: is gcp, and base research is for aws: correct it" in problem("provider: gcp")


def test_a_run_chooses_its_image_its_disk_and_a_folder_of_the_bucket():
    found = spec("aws: {disk: 300, image: ami-01234567, profile: mine}\ncheckpoint: {target: s3://acme/spotfleet/run1}",
                 given(image="ami-89abcdef"))
    aws = parsed(found.section)
    assert (aws.disk_gib, aws.image, aws.profile) == (300, "ami-01234567", "mine")
    assert found.checkpoint.target == "s3://acme/spotfleet/run1"
    assert "checkpoint.target" in problem("checkpoint: {target: s3://acme/spotfleets}")
    assert parsed(spec("aws: {interruption_queue: ''}").section).interruption_queue == ""  # another fleet reads it


def test_a_base_of_a_provider_that_uses_none_is_refused():
    assert "provider local uses no base" in problem("nodes: 2", given(provider="local"))


def test_a_module_of_another_release_is_reported():
    assert base.difference(given()) == ""
    assert base.difference(given(module="0.0.9")) == (
        "base research was made by the module of spotfleet 0.0.9, and this is 0.1.0")
