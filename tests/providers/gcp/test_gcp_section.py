"""Section `gcp` of the fleet file, and the configuration that holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from spotfleet.catalog import load as catalog
from spotfleet.config import load as fleet_file
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.plugins import FileFacts, NamedPlace, load
from spotfleet.providers.gcp.plugin import GCP
from spotfleet.providers.gcp.section import GcpSection, read
from spotfleet.providers.gcp.session import settings_of
from spotfleet.providers.gcp.spec import GcpSpec, parsed

EXAMPLES = Path(__file__).parents[3] / "examples"


def problems(facts: FileFacts = FileFacts(), **keys: object) -> list[str]:
    found: list[str] = []
    read(GcpSection(**keys), facts, lambda at, text: found.append(f"{'.'.join(map(str, at))}: {text}"))
    return found


@pytest.mark.parametrize("keys, text", [
    ({"project": "My Project"}, "the id of a project"),
    ({"regions": ["us-central1-a"]}, "that is a zone of us-central1"),
    ({"regions": []}, "a list of regions"),
    ({"network": "a/b"}, "global/networks/NAME"),
    ({"subnetworks": {"here": "s"}}, "REGION: NAME pairs"),
    ({"image": "ubuntu"}, "projects/PROJECT/global/images"),
    ({"disk": 5}, "from 10 to 65536"),
    ({"disk_type": "floppy"}, "one of pd-standard"),
    ({"service_account": "me"}, "iam.gserviceaccount.com"),
    ({"ssh_from": "0.0.0.0/0"}, "whole world"),
    ({"local_ssds": -1}, "from 0 to 24"),
    ({"zone": "x"}, "zone"),
])
def test_a_value_that_cannot_be_names_what_is_expected(keys, text):
    with pytest.raises(ValidationError, match=text):
        GcpSection(**keys)


def test_the_disk_and_the_image_of_resources_are_the_hosts_unless_the_section_has_its_own():
    image, other = "projects/p-12345/global/images/mine", "projects/p-12345/global/images/family/other"
    facts = FileFacts(disk_gib=512, image=image)
    spec = read(GcpSection(), facts, lambda at, text: pytest.fail(text))
    assert (spec.disk_gib, spec.image, spec.dispatcher_disk_gib, spec.dispatcher_image) == (512, image, 30, "")
    own = read(GcpSection(disk=50, image=other), facts, lambda at, text: pytest.fail(text))
    assert (own.disk_gib, own.image) == (50, other)
    assert problems(FileFacts(disk_gib=5, image="ami-1")) == [
        "resources.image_id: expected spotfleet, projects/PROJECT/global/images/NAME or .../images/family/FAMILY, "
        "got 'ami-1'",
        "resources.disk_size: expected a number of GiB from 10 to 65536, got 5"]


def test_no_note_claims_that_a_disk_size_changes_nothing(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("resources: {infra: gcp/us-central1, accelerators: 'L4:1', disk_size: 256}\nrun: hostname\n")
    loaded = fleet_file(file, {})
    assert not [note for note in loaded.notes if "disk_size" in note]
    assert parsed(loaded.spec.section).disk_gib == 256


def test_values_that_exclude_each_other_are_named_with_their_place():
    assert "cannot be stopped" in problems(FileFacts(interruption_behavior="stop"), local_ssds=1)[0]
    assert problems(FileFacts(placement="cluster"))[0].startswith("placement: a fleet on Google Cloud has no compact")
    assert problems(public_addresses=False)[0].startswith("gcp.ssh_from: is missing")
    assert problems(network="projects/host-project/global/networks/n")[0].startswith("gcp.subnetworks: is missing")
    assert problems(FileFacts(tags={"Team": "x"}))[0].startswith("tags.Team: Google Cloud takes labels of small")
    assert problems(FileFacts(tags={"spotfleet-role": "x"}))[0].startswith("tags.spotfleet-role: begins with spotfleet")
    away = FileFacts(places=(NamedPlace(("resources",), "europe-west4", "us-central1-a"),
                             NamedPlace(("dispatcher",), "", "europe-west4-a")))
    assert problems(away, regions=["us-central1"]) == [
        "resources.zone: us-central1-a is a zone of us-central1, not of europe-west4",
        "dispatcher.zone: is in europe-west4, which is none of gcp.regions: us-central1"]
    assert problems(regions=["us-central1"], network="training", subnetworks={"us-central1": "a"}) == []


def test_a_fleet_goes_where_its_needs_say():
    needs = (Need(region="us-central1"), Need(zone="europe-west4-b"))
    assert read(GcpSection(), FileFacts(needs=needs), print).regions == ("us-central1", "europe-west4")
    assert read(GcpSection(), FileFacts(needs=(*needs, Need())), print).regions == ()


def test_the_plugin_is_found_by_its_name_and_settles_project_and_regions():
    plugin = load("gcp")
    assert plugin is GCP
    spec = FleetSpec("f", provider="gcp", section={"regions": ["us-central1", "us-east1"]})
    config = plugin.config(spec, {"GOOGLE_CLOUD_PROJECT": "p-1", "SPOTFLEET_GCP_ENDPOINT": "http://127.0.0.1:1"}, "")
    assert parsed(config["section"]).project == "p-1" and config["endpoint_url"] == "http://127.0.0.1:1"
    here = plugin.in_region(config, "us-east1")
    moved = plugin.moved(here, FleetSpec("f", provider="gcp", section={"project": "p-2", "disk_gib": 50}))
    assert parsed(moved["section"]) == GcpSpec(project="p-1", regions=("us-east1",), disk_gib=50)
    assert plugin.region(moved) == "us-east1" and plugin.account_key(moved) == (
        ("endpoint_url", "http://127.0.0.1:1"), ("project", "p-1"))
    assert plugin.for_dispatcher(moved)["side"] == "dispatcher"


def test_what_only_a_laptop_uses_makes_no_two_specs_differ():
    spec = FleetSpec("f", section={"ssh_from": ["192.0.2.1/32"]})
    assert GCP.portable(spec) == GCP.portable(FleetSpec("f"))
    assert parsed(GCP.with_access(GCP.portable(spec), spec).section).ssh_from == ("192.0.2.1/32",)


def test_a_configuration_that_cannot_be_read_says_so():
    with pytest.raises(UsageError, match="configuration cannot be read"):
        settings_of({"section": {"regions": 5}})


def test_credentials_are_looked_for_in_environment_and_files(tmp_path):
    assert not GCP.may_have_credentials({"CLOUDSDK_CONFIG": str(tmp_path)})
    assert GCP.may_have_credentials({"GOOGLE_APPLICATION_CREDENTIALS": "key.json"})
    (tmp_path / "application_default_credentials.json").write_text("{}")
    assert GCP.may_have_credentials({"CLOUDSDK_CONFIG": str(tmp_path)})


@pytest.mark.parametrize("role", ["laptop", "dispatcher"])
def test_a_role_is_a_definition_that_gcloud_reads(role):
    assert GCP.policies is not None
    found = GCP.policies.document(role, None, "")
    assert found["stage"] == "GA" and "compute.instances.create" in found["includedPermissions"]
    assert ("compute.firewalls.create" in found["includedPermissions"]) is (role == "laptop")
    with pytest.raises(UsageError, match="checkpoint bucket"):
        GCP.policies.document("host", None, "")


@pytest.mark.parametrize("name", ["gcp-l4.yaml", "gcp-a3-gang.yaml"])
def test_an_example_is_a_fleet_file_whose_types_are_on_sale_where_it_may_go(name):
    spec = fleet_file(EXAMPLES / name).spec
    assert spec.provider == "gcp"
    known = catalog().matching(replace(spec.any_of[0], region=""), "gcp")
    assert {p.region for p in known} & set(parsed(spec.section).regions)
