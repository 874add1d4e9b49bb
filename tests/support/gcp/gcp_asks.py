"""Requests to Compute Engine as tests of the fake make them: with the real google-cloud-compute."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ZONE, REGION = "us-central1-a", "us-central1"
KIND = "g2-standard-4"
UBUNTU = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
SPOT: dict[str, Any] = {"provisioning_model": "SPOT", "instance_termination_action": "STOP",
                        "on_host_maintenance": "TERMINATE", "automatic_restart": False,
                        "preemption_notice_duration": {"seconds": 120}}
UNNOTICED = {k: v for k, v in SPOT.items() if k != "preemption_notice_duration"}
DELETED = SPOT | {"instance_termination_action": "DELETE"}
STANDARD: dict[str, Any] = {"on_host_maintenance": "TERMINATE"}


def instance(name: str = "f-1", zone: str = ZONE, kind: str = KIND, scheduling: dict[str, Any] | None = None,
             **more: Any) -> dict[str, Any]:
    """The resource of an instance."""
    return {
        "name": name, "machine_type": f"zones/{zone}/machineTypes/{kind}", "labels": {"spotfleet": "f"},
        "disks": [boot_disk(zone)],
        "network_interfaces": [{"network": "global/networks/default",
                                "access_configs": [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}]}],
        "scheduling": SPOT if scheduling is None else scheduling, **more}


def boot_disk(zone: str = ZONE, kind: str = "pd-balanced", size_gb: int = 50, **more: Any) -> dict[str, Any]:
    return {"boot": True, "auto_delete": True, **more, "initialize_params": {
        "source_image": UBUNTU, "disk_size_gb": size_gb, "disk_type": f"zones/{zone}/diskTypes/{kind}"}}


def local_ssd(zone: str = ZONE) -> dict[str, Any]:
    return {"type_": "SCRATCH", "auto_delete": True, "interface": "NVME",
            "initialize_params": {"disk_type": f"zones/{zone}/diskTypes/local-ssd"}}


def card(name: str = "nvidia-tesla-t4", count: int = 1, zone: str = ZONE) -> dict[str, Any]:
    return {"accelerator_type": f"zones/{zone}/acceleratorTypes/{name}", "accelerator_count": count}


def of_many(**more: Any) -> dict[str, Any]:
    """Properties of a bulk insert: as an instance, without zones in the names of types."""
    found = copy.deepcopy(instance(**more))
    del found["name"]
    found["machine_type"] = found["machine_type"].rpartition("/")[2]
    for disk in found["disks"]:
        disk["initialize_params"]["disk_type"] = disk["initialize_params"]["disk_type"].rpartition("/")[2]
    for one in found.get("guest_accelerators", ()):
        one["accelerator_type"] = one["accelerator_type"].rpartition("/")[2]
    return found


def insert(cloud: Any, resource: dict[str, Any] | None = None, zone: str = ZONE, request_id: str = "") -> Any:
    """The operation as it was accepted."""
    return cloud.client("InstancesClient").insert(request={
        "project": cloud.project, "zone": zone, "instance_resource": resource or instance(),
        "request_id": request_id or str(uuid.uuid4())})


def made(cloud: Any, resource: dict[str, Any] | None = None, zone: str = ZONE) -> Any:
    """The instance, once its operation is done without an error."""
    resource = resource or instance(zone=zone)
    done = waited(cloud, insert(cloud, resource, zone), zone)
    assert not done.error.errors, done.error
    return get(cloud, resource["name"], zone)


def bulk(cloud: Any, names: list[str], least: int | None = None, shape: str = "ANY_SINGLE_ZONE",
         zones: tuple[str, ...] = (), properties: dict[str, Any] | None = None, **more: Any) -> Any:
    """The operation of a bulk insert, done."""
    accepted = cloud.client("RegionInstancesClient").bulk_insert(request={
        "project": cloud.project, "region": REGION, "bulk_insert_instance_resource_resource": {
            "count": len(names), "instance_properties": properties or of_many(),
            "per_instance_properties": {n: {} for n in names},
            "location_policy": {"target_shape": shape,
                                "locations": {f"zones/{z}": {"preference": "ALLOW"} for z in zones}},
            **({"min_count": least} if least is not None else {}), **more}})
    return cloud.client("RegionOperationsClient").wait(project=cloud.project, region=REGION, operation=accepted.name)


def waited(cloud: Any, operation: Any, zone: str = ZONE) -> Any:
    """The operation as it is after a wait: done, or not yet."""
    return cloud.client("ZoneOperationsClient").wait(project=cloud.project, zone=zone, operation=operation.name)


def is_done(operation: Any) -> bool:
    return operation.status.name == "DONE"


def errors(operation: Any) -> list[str]:
    return [e.code for e in operation.error.errors]


def get(cloud: Any, name: str = "f-1", zone: str = ZONE) -> Any:
    return cloud.client("InstancesClient").get(project=cloud.project, zone=zone, instance=name)


def act(cloud: Any, verb: str, name: str = "f-1", zone: str = ZONE, **more: Any) -> Any:
    """start, stop, delete ...: the operation, after a wait."""
    accepted = getattr(cloud.client("InstancesClient"), verb)(
        request={"project": cloud.project, "zone": zone, "instance": name, **more})
    return waited(cloud, accepted, zone)


def status(cloud: Any, name: str = "f-1", zone: str = ZONE) -> str:
    return get(cloud, name, zone).status


def listed(cloud: Any, filter: str = "labels.spotfleet=f") -> list[Any]:
    """Instances, over all zones."""
    found = cloud.client("InstancesClient").aggregated_list(request={"project": cloud.project, "filter": filter})
    return [i for _, scope in found for i in scope.instances]


def operations(cloud: Any, filter: str = "targetLink eq .*/instances/f-.*") -> list[tuple[str, str]]:
    """(type, user) of each."""
    found = cloud.client("GlobalOperationsClient").aggregated_list(request={"project": cloud.project, "filter": filter})
    return [(o.operation_type, o.user) for _, scope in found for o in scope.operations]


@contextmanager
def refused(reason: str, words: str = "") -> Iterator[None]:
    """The block gets an error answer with this reason; `words` stand in its message."""
    from google.api_core.exceptions import GoogleAPICallError

    with pytest.raises(GoogleAPICallError) as caught:
        yield
    assert caught.value.errors[0]["reason"] == reason, caught.value
    assert words in caught.value.message, caught.value.message
