"""Bodies of requests that make machines. Pure.

Fields have the SDK's names. `zone`: for one machine, whose links name its zone; "" for a bulk request, which names
machine, disk and GPU types alone.
Sources: Compute Engine API v1, instances.insert and regionInstances.bulkInsert; "Create Spot VMs"; "GPU machine types";
"Hyperdisk: machine series support".
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spotfleet.model import Market, Offer, Role
from spotfleet.providers.gcp.mapping import listing, names

NOTICE_S = 120  # seconds of notice before a preemption; the other possible value is 0
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
HYPERDISK_ONLY = ("a3-ultragpu", "a3-megagpu", "a3-edgegpu", "a4-", "a4x-", "g4-", "n4-", "c4-", "c4a-", "c4d-", "m4-")
OWN_SSDS = ("a3-", "a2-ultragpu", "a4-")  # types that come with local SSDs
# The shutdown script, which runs when the machine gets the signal to power off: interruptions/gcp.py reads the file.
GOING = "#!/bin/sh\n: >/run/spotfleet-going\n"
FORGOTTEN_S = 3600  # added to a host's lifetime, after which the cloud ends its machine
LONGEST_RUN_S = 120 * 86_400  # Compute Engine takes no later end


@dataclass(frozen=True)
class MachineOrder:
    """Everything about the machines of one request."""

    fleet: str
    role: Role
    offer: Offer
    behavior: str  # "terminate" or "stop"
    tags: Mapping[str, str]  # the user's and the planner's
    user_data: bytes = field(repr=False)
    pools: str  # text of the POOL tag
    image: str
    disk_gib: int
    network: str
    subnetwork: str = ""
    public_address: bool = True
    disk_type: str = ""
    local_ssds: int = 0
    service_account: str = ""
    lifetime_s: float = 0.0
    network_tags: tuple[str, ...] = ()  # besides the fleet's own
    disk_key: str = ""


def instance(order: MachineOrder, name: str, zone: str) -> dict[str, Any]:
    """Return the body of instances.insert."""
    return {**_properties(order, zone, [name]), "name": name}


def bulk(order: MachineOrder, machines: Sequence[str], zones: Sequence[str], closed: Iterable[str], *,
         together: bool) -> dict[str, Any]:
    """Return the body of regionInstances.bulkInsert: all machines or none. `closed`: zones that they may not go to.

    `together`: all of them in one zone.
    """
    allowed = {f"zones/{zone}": {"preference": "ALLOW"} for zone in zones}
    return {
        "count": len(machines), "min_count": len(machines),
        "instance_properties": _properties(order, "", machines),
        "per_instance_properties": {name: {} for name in machines},
        "location_policy": {
            "locations": {**allowed, **{f"zones/{zone}": {"preference": "DENY"} for zone in closed}},
            "target_shape": "ANY_SINGLE_ZONE" if together else "ANY"},
    }


def _properties(order: MachineOrder, zone: str, machines: Sequence[str]) -> dict[str, Any]:
    kind, accelerator, gpus = listing.split(order.offer.instance_type)
    labels = {**names.labels(order.tags), names.FLEET: order.fleet, names.ROLE: order.role.value}
    if len(machines) == 1:  # those of a gang share their labels
        labels[names.HOST] = names.host_of(machines[0])
    tags = [names.network_tag(order.fleet)]
    if order.role is Role.DISPATCHER:
        tags.append(names.network_tag(order.fleet, door=True))
    tags += order.network_tags
    account = order.service_account
    return {
        "machine_type": _typed("machineTypes", kind, zone),
        "labels": labels,
        "tags": {"items": tags},
        "metadata": {"items": [{"key": k, "value": v} for k, v in metadata(order).items()]},
        "disks": [_boot_disk(order, kind, labels, zone), *_local_ssds(order, kind, zone)],
        "network_interfaces": [_interface(order)],
        "scheduling": scheduling(order),
        **({"guest_accelerators": [{"accelerator_type": _typed("acceleratorTypes", accelerator, zone),
                                    "accelerator_count": gpus}]} if accelerator else {}),
        **({"service_accounts": [{"email": account, "scopes": [CLOUD_PLATFORM]}]} if account else {}),
    }


def metadata(order: MachineOrder) -> dict[str, str]:
    """Return the metadata items of a machine. Its host reads the tags there; OS Login would hide our SSH keys."""
    return {
        **order.tags, names.POOL: order.pools, names.BEHAVIOR: order.behavior, names.ENCODING: "base64",
        names.USER_DATA: base64.b64encode(order.user_data).decode(), "enable-oslogin": "FALSE",
        "block-project-ssh-keys": "TRUE",
        **({"shutdown-script": GOING} if order.role is Role.WORKER else {}),
        **({"install-nvidia-driver": "True"} if order.offer.accelerator and order.role is Role.WORKER else {}),
    }


def scheduling(order: MachineOrder) -> dict[str, Any]:
    """Return how it is sold, and what happens when the cloud takes it or maintains its machine."""
    spot, gpu = order.offer.market is Market.SPOT, bool(order.offer.accelerator)
    found: dict[str, Any] = {
        "provisioning_model": "SPOT" if spot else "STANDARD",
        "automatic_restart": not spot and order.role is Role.DISPATCHER,
        "on_host_maintenance": "TERMINATE" if spot or gpu else "MIGRATE"}
    stops = order.behavior == "stop"
    if spot:
        found |= {"instance_termination_action": "STOP" if stops else "DELETE",
                  "preemption_notice_duration": {"seconds": NOTICE_S}}
    if order.lifetime_s and order.role is Role.WORKER:
        found |= {"max_run_duration": {"seconds": min(int(order.lifetime_s) + FORGOTTEN_S, LONGEST_RUN_S)},
                  "instance_termination_action": "STOP" if stops else "DELETE"}
        if stops and order.offer.instance_type.startswith(OWN_SSDS):
            found["on_instance_stop_action"] = {"discard_local_ssd": True}
    return found


def _boot_disk(order: MachineOrder, kind: str, labels: Mapping[str, str], zone: str) -> dict[str, Any]:
    own = order.disk_type if order.role is Role.WORKER else ""
    wanted = own or ("hyperdisk-balanced" if kind.startswith(HYPERDISK_ONLY) else "pd-balanced")
    disk: dict[str, Any] = {"boot": True, "auto_delete": True, "initialize_params": {
        "source_image": order.image, "disk_size_gb": order.disk_gib, "disk_type": _typed("diskTypes", wanted, zone),
        "labels": dict(labels)}}
    return disk | ({"disk_encryption_key": {"kms_key_name": order.disk_key}} if order.disk_key else {})


def _local_ssds(order: MachineOrder, kind: str, zone: str) -> list[dict[str, Any]]:
    count = 0 if kind.startswith(OWN_SSDS) or order.role is Role.DISPATCHER else order.local_ssds
    return [{"type_": "SCRATCH", "interface": "NVME", "auto_delete": True,
             "initialize_params": {"disk_type": _typed("diskTypes", "local-ssd", zone)}}] * count


def _interface(order: MachineOrder) -> dict[str, Any]:
    return {
        **({"subnetwork": order.subnetwork} if order.subnetwork else {"network": order.network}),
        **({"access_configs": [{"type_": "ONE_TO_ONE_NAT", "name": "External NAT"}]} if order.public_address else {}),
    }


def _typed(what: str, name: str, zone: str) -> str:
    return f"zones/{zone}/{what}/{name}" if zone else name
