"""What Compute Engine refuses, and the fake with it: by its discovery document, and by limits that it documents."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.support.gcp.gcp_asks import (
    SPOT,
    STANDARD,
    ZONE,
    boot_disk,
    card,
    insert,
    instance,
    local_ssd,
    made,
    of_many,
    refused,
)

H100_ZONE = "us-central1-a"


def items(**values: str) -> dict[str, Any]:
    return {"items": [{"key": k.replace("_", "-"), "value": v} for k, v in values.items()]}


def spot(**more: Any) -> dict[str, Any]:
    return SPOT | more


def without_address() -> list[dict[str, Any]]:
    return [{"network": "global/networks/default"}]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # names and labels: RFC 1035, label requirements
    ("a name in capitals", instance("F-1"), "Must be a match of regex"),
    ("a name that ends with a dash", instance("f-"), "Must be a match of regex"),
    ("a name of 64 characters", instance("f" * 64), "Must be a match of regex"),
    ("65 labels", instance(labels={f"l{n}": "" for n in range(65)}), "At most 64 labels"),
    ("a label's key in capitals", instance(labels={"Team": "vision"}), "Label keys must start with a lowercase letter"),
    ("a label's key that begins with a digit", instance(labels={"1st": "x"}), "Label keys"),
    ("a label's value in capitals", instance(labels={"team": "Vision"}), "Label values"),
    ("a label's value with a slash", instance(labels={"team": "a/b"}), "Label values"),
    ("a label's value of 64 characters", instance(labels={"team": "v" * 64}), "Label values"),
    ("a network tag in capitals", instance(tags={"items": ["Web"]}), "each a match of regex"),
    # metadata: 256 KiB a value, 512 KiB in all
    ("a value of metadata above 256 KiB", instance(metadata=items(startup_script="x" * 262_145)), "too large"),
    ("metadata above 512 KiB", instance(metadata=items(**{f"k{n}": "x" * 200_000 for n in range(3)})), "524288 bytes"),
    ("a key of metadata with a dot", instance(metadata={"items": [{"key": "a.b", "value": ""}]}), "Must be a match"),
    ("a key of metadata that comes twice", instance(metadata={"items": [{"key": "a", "value": ""}] * 2}), "Duplicate"),
    # scheduling
    ("Spot that migrates", instance(scheduling=spot(on_host_maintenance="MIGRATE")), "isn't TERMINATE"),
    ("Spot that restarts", instance(scheduling=spot(automatic_restart=True)), "AutomaticRestart is true"),
    ("Spot that is not preemptible", instance(scheduling=spot(preemptible=False)), "preemptible be true"),
    ("a GPU with live migration", instance(scheduling={"on_host_maintenance": "MIGRATE"}),
     "do not support live migration"),
    ("a GPU with live migration by default", instance(scheduling={"automatic_restart": True}),
     "do not support live migration"),
    ("a termination action of a standard VM",
     instance(scheduling=STANDARD | {"instance_termination_action": "STOP"}), "termination action"),
    ("a notice of 60 seconds", instance(scheduling=spot(preemption_notice_duration={"seconds": 60})), "0 or 120"),
    ("a notice for a standard VM", instance(scheduling=STANDARD | {"preemption_notice_duration": {"seconds": 120}}),
     "only be specified for Spot"),
    ("a flexible start without an end", instance(scheduling=STANDARD | {"provisioning_model": "FLEX_START"}),
     "needs a limited run time"),
    ("a run of ten seconds", instance(scheduling=spot(max_run_duration={"seconds": 10})), "between 30 seconds"),
    # machine types and GPUs
    ("a machine type without its zone", instance() | {"machine_type": "g2-standard-4"}, "The URL is malformed"),
    ("a machine type of another zone", instance() | {"machine_type": "zones/us-east4-a/machineTypes/g2-standard-4"},
     "must be in zone"),
    ("a machine type that does not exist", instance(kind="g2-standard-5"), "does not exist in zone"),
    ("GPUs of another kind than the type's", instance(guest_accelerators=[card("nvidia-tesla-t4")]),
     "cannot be attached"),
    ("an accelerator type without its zone", instance(kind="n1-standard-8", guest_accelerators=[
        {"accelerator_type": "nvidia-tesla-t4", "accelerator_count": 1}]), "malformed, or of another zone"),
    ("GPUs on E2", instance(kind="e2-standard-4", guest_accelerators=[card()]), "not compatible"),
    ("three T4", instance(kind="n1-standard-8", guest_accelerators=[card(count=3)]), "must be one of [1, 2, 4]"),
    ("no T4", instance(kind="n1-standard-8", guest_accelerators=[card(count=0)]), "must be one of"),
    ("a T4 with 64 vCPUs", instance(kind="n1-standard-64", guest_accelerators=[card()]), "at most 48 vCPUs"),
    ("two kinds of GPUs", instance(kind="n1-standard-8", guest_accelerators=[card(), card("nvidia-tesla-v100")]),
     "Only one type of accelerator"),
    # disks
    ("no disk", instance() | {"disks": []}, "No disks are specified"),
    ("no boot disk", instance() | {"disks": [boot_disk() | {"boot": False}]}, "Boot disk must be the first"),
    ("a boot disk smaller than its image", instance() | {"disks": [boot_disk(size_gb=5)]}, "cannot be smaller"),
    ("a disk type without its zone", instance() | {"disks": [{"boot": True, "initialize_params": {
        "disk_type": "pd-ssd", "source_image": "projects/debian-cloud/global/images/family/debian-12"}}]}, "malformed"),
    ("two local SSDs on a G2 that has one", instance() | {"disks": [boot_disk(), local_ssd(), local_ssd()]},
     "Number of local SSDs"),
    ("nine local SSDs on an N1", instance(kind="n1-standard-8", scheduling=SPOT) | {
        "disks": [boot_disk(), *[local_ssd()] * 9]}, "should be one of"),
    ("a local SSD on E2", instance(kind="e2-standard-4") | {"disks": [boot_disk(), local_ssd()]},
     "Number of local SSDs"),
    ("three local SSDs on an A2 Ultra that has two", instance(kind="a2-ultragpu-2g") | {
        "disks": [boot_disk(), *[local_ssd()] * 3]}, "always has 2 local SSDs"),
    ("a local SSD that is no scratch disk", instance() | {"disks": [boot_disk(), local_ssd() | {
        "type_": "PERSISTENT"}]}, "must be of type SCRATCH"),
    ("a boot disk of nothing", instance() | {"disks": [{"boot": True, "initialize_params": {"disk_size_gb": 50}}]},
     "needs an image or a source"),
    ("a local SSD to boot from", instance() | {"disks": [local_ssd() | {"boot": True}]}, "cannot be a boot disk"),
    ("Hyperdisk on G2", instance() | {"disks": [boot_disk(kind="hyperdisk-balanced")]}, "not compatible"),
    # network and service account
    ("no interface", instance() | {"network_interfaces": []}, "At least one network interface"),
    ("two external addresses", instance() | {"network_interfaces": [{
        "network": "global/networks/default", "access_configs": [{}, {}]}]}, "At most one access config"),
    ("two service accounts", instance(service_accounts=[{"email": "default", "scopes": ["x"]}] * 2), "At most one"),
    ("a service account without scopes", instance(service_accounts=[{"email": "default"}]), "At least one scope"),
]


@pytest.mark.parametrize(("resource", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_an_instance_that_compute_engine_refuses_is_refused_at_once(cloud, resource, words):
    with refused("invalid", words):
        insert(cloud, resource)
    assert cloud.everything() == []


def test_what_is_refused_is_accepted_when_it_is_right(cloud):
    """Else the refusals above would show nothing."""
    made(cloud, instance("f" * 63, labels={f"l{n}": "v" * 63 for n in range(64)}))
    made(cloud, instance("f-2", metadata=items(startup_script="x" * 262_144)))
    made(cloud, instance("f-3", kind="n1-standard-8", guest_accelerators=[card(count=4)]) | {
        "disks": [boot_disk(), *[local_ssd()] * 8]})
    made(cloud, instance("f-4") | {"disks": [boot_disk(), local_ssd()], "network_interfaces": without_address()})
    made(cloud, instance("f-5", kind="a3-highgpu-8g") | {"disks": [boot_disk(kind="hyperdisk-balanced")]})
    assert len(cloud.machine("f-5").body["disks"]) == 17  # with the local SSDs that it always has


def test_a_zone_without_the_gpu_does_not_know_its_machine_type(cloud):
    with refused("invalid", "Machine type with name 'a3-highgpu-8g' does not exist in zone 'us-central1-f'"):
        insert(cloud, instance(zone="us-central1-f", kind="a3-highgpu-8g"), "us-central1-f")
    with refused("notFound", "acceleratorTypes/nvidia-tesla-v100' was not found"):
        insert(cloud, instance(zone="us-east4-a", kind="n1-standard-8",
                               guest_accelerators=[card("nvidia-tesla-v100", zone="us-east4-a")]), "us-east4-a")


def test_a_zone_that_does_not_exist_is_named(cloud):
    with refused("invalid", "Unknown zone"):
        insert(cloud, instance(zone="us-central9-a"), "us-central9-a")
    with refused("notFound", "zones/us-central9-a"):
        cloud.client("ZonesClient").get(project=cloud.project, zone="us-central9-a")


def test_an_image_or_a_network_that_does_not_exist_is_not_found(cloud):
    gone = boot_disk()
    gone["initialize_params"]["source_image"] = "projects/debian-cloud/global/images/family/debian-7"
    with refused("notFound", "images/family/debian-7"):
        insert(cloud, instance() | {"disks": [gone]})
    with refused("notFound", "networks/training"):
        insert(cloud, instance() | {"network_interfaces": [{"network": "global/networks/training"}]})


def test_a_disk_that_does_not_exist_or_is_in_use_cannot_be_attached(cloud):
    with refused("notFound", "disks/data"):
        insert(cloud, instance() | {"disks": [{"boot": True, "source": f"zones/{ZONE}/disks/data"}]})
    with refused("notFound", "diskTypes/pd-fast"):
        insert(cloud, instance() | {"disks": [boot_disk(kind="pd-fast")]})
    made(cloud)
    with refused("resourceInUseByAnotherResource", "already being used by"):
        insert(cloud, instance("f-2") | {"disks": [{"boot": True, "source": f"zones/{ZONE}/disks/f-1"}]})


def test_a_subnet_is_of_the_network_that_is_given(cloud):
    cloud.add_network("training", auto=False, regions=("us-central1",))
    with refused("invalid", "not of the network"):
        insert(cloud, instance() | {"network_interfaces": [{
            "network": "global/networks/default", "subnetwork": "regions/us-central1/subnetworks/training"}]})


def test_a_custom_network_wants_a_subnet_of_the_region(cloud):
    cloud.add_network("training", auto=False, regions=("us-central1", "us-east4"))
    with refused("invalid", "Subnetwork should be specified"):
        insert(cloud, instance() | {"network_interfaces": [{"network": "global/networks/training"}]})
    with refused("invalid", "not in region 'us-central1'"):
        insert(cloud, instance() | {"network_interfaces": [
            {"subnetwork": "regions/us-east4/subnetworks/training"}]})
    made(cloud, instance() | {"network_interfaces": [{"subnetwork": "regions/us-central1/subnetworks/training"}]})


def test_an_organization_may_forbid_external_addresses(cloud):
    cloud.no_external_ips = True
    with refused("conditionNotMet", "constraints/compute.vmExternalIpAccess"):
        insert(cloud)
    made(cloud, instance() | {"network_interfaces": without_address()})


def test_stopping_wants_to_know_what_becomes_of_a_local_ssd(cloud):
    made(cloud, instance() | {"disks": [boot_disk(), local_ssd()]})
    ask = {"project": cloud.project, "zone": ZONE, "instance": "f-1"}
    with refused("badRequest", "Local SSD"):
        cloud.client("InstancesClient").stop(request=ask)
    cloud.client("InstancesClient").stop(request=ask | {"discard_local_ssd": True})


def test_a_bulk_insert_wants_names_for_all(cloud):
    with refused("invalid", "as many entries as instances"):
        cloud.client("RegionInstancesClient").bulk_insert(request={
            "project": cloud.project, "region": "us-central1", "bulk_insert_instance_resource_resource": {
                "count": 2, "per_instance_properties": {"f-1": {}}, "instance_properties": of_many()}})


# ---- what the SDK would not send, but other clients do


def raw(cloud: Any, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
    made = urllib.request.Request(f"{cloud.url}/compute/v1/projects/{cloud.project}/{path}", method=verb,
                                  data=json.dumps(body).encode() if body is not None else None,
                                  headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(made, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


PLAIN = {"name": "f-1", "machineType": f"zones/{ZONE}/machineTypes/e2-small",
         "disks": [{"boot": True, "initializeParams": {"sourceImage":
                                                       "projects/debian-cloud/global/images/family/debian-12"}}],
         "networkInterfaces": [{"network": "global/networks/default"}]}


@pytest.mark.parametrize(("body", "words"), [
    (PLAIN | {"machinetype": "x"}, 'Unknown name "machinetype"'),
    (PLAIN | {"scheduling": {"provisioningModel": "SPOTT"}}, "'SPOTT'. Must be one of"),
    (PLAIN | {"scheduling": {"preemptible": "yes"}}, "TYPE_BOOL"),
    (PLAIN | {"disks": {"boot": True}}, "is no list"),
    (PLAIN | {"labels": {"a": 1}}, "TYPE_STRING"),
    ({k: v for k, v in PLAIN.items() if k != "name"}, "resource.name"),
    (PLAIN | {"guestAccelerators": [{"acceleratorCount": "1"}]}, "TYPE_INT32"),
    (PLAIN | {"disks": [{"boot": True, "diskSizeGb": "ten"}]}, "TYPE_INT64"),
    (None, "Required field")])  # fmt: skip
def test_a_body_that_the_discovery_document_does_not_allow_is_refused(cloud, body, words):
    status, error = raw(cloud, "POST", f"zones/{ZONE}/instances", body)
    assert status == 400 and words in error["message"]
    assert raw(cloud, "POST", f"zones/{ZONE}/instances", PLAIN)[0] == 200


@pytest.mark.parametrize(("path", "status", "words"), [
    (f"zones/{ZONE}/instances?maxResults=many", 400, "maxResults"),
    (f"zones/{ZONE}/instances?maxResults=501", 400, "between 0 and 500"),
    (f"zones/{ZONE}/instances?pagetoken=x", 400, 'Unknown name "pagetoken"'),
    (f"zones/{ZONE}/instances?orderBy=status", 400, "orderBy"),
    (f"zones/{ZONE}/instances/F_1", 400, "Must be a match of regex"),
    (f"zones/{ZONE}/instances/f-1", 404, "was not found"),
    (f"zones/{ZONE}/instnces", 404, "was not found on this server"),
    (f"zones/{ZONE}/instances/f-1/screenshot", 501, "this fake has no compute.instances.getScreenshot")])
def test_a_path_or_query_that_is_wrong_is_refused(cloud, path, status, words):
    found, error = raw(cloud, "GET", path)
    assert found == status and words in error["message"]


def test_an_answer_that_the_document_does_not_allow_is_found(cloud):
    """Whatever the fake invents is seen by the fixture of each test."""
    cloud.things[f"projects/{cloud.project}/global/firewalls/default-allow-ssh"]["sourceIPs"] = ["10.0.0.1"]
    assert raw(cloud, "GET", "global/firewalls/default-allow-ssh")[0] == 200
    (finding,) = cloud.findings
    assert finding.startswith("answer to compute.firewalls.get: ") and 'Unknown name "sourceIPs"' in finding
    cloud.findings.clear()
