"""Bodies of launches, as the real SDK takes them."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from spotfleet.model import Market, Offer, Role
from spotfleet.providers.gcp.mapping import machine, names
from spotfleet.providers.gcp.mapping.machine import MachineOrder

ZONE = "us-central1-a"
OFFER = Offer("gcp", "us-central1", ZONE, "g2-standard-4", Market.SPOT, 1, 300_000, 700_000, "L4")
ORDER = MachineOrder("f", Role.WORKER, OFFER, "terminate", {"team": "vision", "url": "https://a"}, b"data", "1 L4",
                     "projects/p/global/images/i", 100, "projects/p/global/networks/default")


def wire(order: MachineOrder, zone: str = ZONE) -> dict[str, Any]:
    """The body as JSON, made by the SDK: it refuses a field that it does not know."""
    from google.cloud import compute_v1

    return compute_v1.Instance.to_dict(compute_v1.Instance(machine.instance(order, "f-1-s000", zone)),
                                       preserving_proto_field_name=False, always_print_fields_with_no_presence=False)


def test_a_spot_machine_has_two_minutes_of_notice_and_is_deleted_when_it_is_taken():
    assert wire(ORDER)["scheduling"] == {
        "provisioningModel": "SPOT", "automaticRestart": False, "onHostMaintenance": "TERMINATE",
        "instanceTerminationAction": "DELETE", "preemptionNoticeDuration": {"seconds": "120"}}
    assert wire(replace(ORDER, behavior="stop"))["scheduling"]["instanceTerminationAction"] == "STOP"


def test_a_dispatcher_moves_with_its_machine_and_is_restarted_by_the_cloud():
    plain = replace(OFFER, instance_type="e2-medium", market=Market.ON_DEMAND, accelerator="")
    body = wire(replace(ORDER, role=Role.DISPATCHER, offer=plain, lifetime_s=60.0, service_account="default"))
    assert body["scheduling"] == {"provisioningModel": "STANDARD", "automaticRestart": True,
                                  "onHostMaintenance": "MIGRATE"}
    assert body["tags"]["items"] == ["spotfleet-f", "spotfleet-f-door"]
    assert body["serviceAccounts"] == [{"email": "default", "scopes": [machine.CLOUD_PLATFORM]}]
    host = wire(replace(ORDER, offer=replace(OFFER, market=Market.ON_DEMAND)))["scheduling"]
    assert (host["onHostMaintenance"], host["automaticRestart"]) == ("TERMINATE", False)  # it has a GPU


def test_the_cloud_itself_ends_a_host_whose_lifetime_is_over():
    found = wire(replace(ORDER, lifetime_s=600.0))["scheduling"]
    assert found["maxRunDuration"] == {"seconds": "4200"} and found["instanceTerminationAction"] == "DELETE"
    stopped = wire(replace(ORDER, lifetime_s=600.0, behavior="stop"))["scheduling"]
    assert stopped["maxRunDuration"] == {"seconds": "4200"} and stopped["instanceTerminationAction"] == "STOP"
    a3 = replace(ORDER, lifetime_s=600.0, behavior="stop", offer=replace(OFFER, instance_type="a3-highgpu-8g"))
    assert wire(a3)["scheduling"]["onInstanceStopAction"] == {"discardLocalSsd": True}  # it cannot be stopped otherwise
    assert wire(replace(ORDER, lifetime_s=1e9))["scheduling"]["maxRunDuration"] == {"seconds": str(120 * 86_400)}


def test_labels_hold_what_they_can_and_metadata_all_tags():
    body = wire(ORDER)
    assert body["labels"] == {"team": "vision", "spotfleet": "f", "spotfleet-role": "worker", "spotfleet-host": "f-1"}
    assert body["disks"][0]["initializeParams"]["labels"] == body["labels"]
    items = {item["key"]: item["value"] for item in body["metadata"]["items"]}
    assert base64.b64decode(items.pop("user-data")) == b"data"
    assert items == {"team": "vision", "url": "https://a", "spotfleet-pool": "1 L4",
                     "spotfleet-behavior": "terminate", "user-data-encoding": "base64",
                     "enable-oslogin": "FALSE", "block-project-ssh-keys": "TRUE", "shutdown-script": machine.GOING,
                     "install-nvidia-driver": "True"}


def test_an_n1_machine_gets_its_gpus_beside_its_type():
    body = wire(replace(ORDER, offer=replace(OFFER, instance_type="n1-standard-8+nvidia-tesla-t4x2")))
    assert body["machineType"] == f"zones/{ZONE}/machineTypes/n1-standard-8"
    assert body["guestAccelerators"] == [
        {"acceleratorType": f"zones/{ZONE}/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 2}]
    assert "guestAccelerators" not in wire(ORDER)


@pytest.mark.parametrize("kind, disk, ssds", [("g2-standard-4", "pd-balanced", 2), ("a3-megagpu-8g",
                                              "hyperdisk-balanced", 0), ("a4-highgpu-8g", "hyperdisk-balanced", 0)])
def test_a_machine_gets_a_disk_type_that_its_series_takes_and_the_local_ssds_that_it_lacks(kind, disk, ssds):
    disks = wire(replace(ORDER, offer=replace(OFFER, instance_type=kind), local_ssds=2))["disks"]
    assert disks[0]["initializeParams"]["diskType"] == f"zones/{ZONE}/diskTypes/{disk}"
    assert [d["type"] for d in disks[1:]] == ["SCRATCH"] * ssds


def test_a_private_machine_in_a_subnet_has_no_public_address():
    [nic] = wire(replace(ORDER, subnetwork="projects/h/regions/r/subnetworks/s", public_address=False))[
        "networkInterfaces"]
    assert nic == {"subnetwork": "projects/h/regions/r/subnetworks/s"}
    [nic] = wire(ORDER)["networkInterfaces"]
    assert nic["accessConfigs"] == [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]


def test_a_gang_is_all_or_nothing_in_one_zone_and_names_no_zone_in_its_links():
    from google.cloud import compute_v1

    body = machine.bulk(ORDER, ["f-1-s000", "f-2-s000"], [ZONE, "us-central1-b"], ["us-central1-c"], together=True)
    found = compute_v1.BulkInsertInstanceResource.to_dict(
        compute_v1.BulkInsertInstanceResource(body), preserving_proto_field_name=False,
        always_print_fields_with_no_presence=False)
    assert (found["count"], found["minCount"]) == ("2", "2")
    assert found["perInstanceProperties"] == {"f-1-s000": {}, "f-2-s000": {}}  # their `name` is for answers only
    assert found["locationPolicy"] == {"targetShape": "ANY_SINGLE_ZONE", "locations": {
        "zones/us-central1-a": {"preference": "ALLOW"}, "zones/us-central1-b": {"preference": "ALLOW"},
        "zones/us-central1-c": {"preference": "DENY"}}}
    assert found["instanceProperties"]["machineType"] == "g2-standard-4"
    assert found["instanceProperties"]["disks"][0]["initializeParams"]["diskType"] == "pd-balanced"
    assert names.HOST not in found["instanceProperties"]["labels"]
