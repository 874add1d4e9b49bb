"""What an instance is given at its birth, and what becomes of it: interfaces, addresses, volumes."""

from __future__ import annotations

import base64
import ipaddress
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.state import Machine, Order, RegionState, when

if TYPE_CHECKING:
    from tests.support.fakes.aws.cloud import AwsCloud


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(9)[:17]}"


def connect(cloud: AwsCloud, state: RegionState, machine: Machine) -> None:
    order, backend = machine.order, machine.ec2_backend
    specs = order.interfaces or [{"DeviceIndex": 0, "NetworkCardIndex": 0}]
    for number, spec in enumerate(specs):
        card, device = int(spec.get("NetworkCardIndex", 0)), int(spec.get("DeviceIndex", 0))
        primary = card == 0 and device == 0
        public = spec.get("AssociatePublicIpAddress")
        if public is None:
            public = order.subnet.map_public_ip_on_launch if primary and len(specs) == 1 else False
        groups = spec.get("Groups") or [g.id for g in order.groups]
        eni = backend.create_network_interface(
            order.subnet,
            spec.get("PrivateIpAddress") or _address(cloud, state, order.subnet),
            device_index=device,
            public_ip_auto_assign=bool(public),
            group_ids=groups,
            description=spec.get("Description"),
            tags=order.tags.get("network-interface", {}),
            delete_on_termination=spec.get("DeleteOnTermination", True) not in (False, "false"),
        )
        eni.interface_type = spec.get("InterfaceType", "interface")
        eni.card = card
        eni.instance, eni.attachment_id, eni.attach_time = machine, new_id("eni-attach"), when(cloud.now())
        eni.status = "in-use"
        machine.nics[0 if primary else number + 1] = eni


def _address(cloud: AwsCloud, state: RegionState, subnet: Any) -> str:
    taken = {a["PrivateIpAddress"] for e in cloud.backend(state.name).enis.values() for a in e.private_ip_addresses}
    network = ipaddress.ip_network(subnet.cidr_block)
    size = network.num_addresses
    first = min(10, size // 2)
    number = state.next_ip.get(subnet.id, first)
    for _ in range(size):
        address = str(network[number])
        number = number + 1 if number + 2 < size else 4
        if address not in taken:
            state.next_ip[subnet.id] = number
            return address
    raise AwsError("InsufficientFreeAddressesInSubnet", f"subnet {subnet.id} is full")


def disks(cloud: AwsCloud, machine: Machine) -> None:
    backend, order = machine.ec2_backend, machine.order
    for spec in order.volumes:
        volume = backend.create_volume(
            size=int(spec.get("VolumeSize", 8)),
            zone_name=order.zone,
            encrypted=bool(spec.get("Encrypted", False)),
            kms_key_id=spec.get("KmsKeyId"),
            volume_type=spec.get("VolumeType"),
            iops=spec.get("Iops"),
            throughput=spec.get("Throughput"),
        )
        volume.create_time = when(cloud.now())
        backend.attach_volume(volume.id, machine.id, spec["DeviceName"], bool(spec.get("DeleteOnTermination", True)))
        backend.tags[volume.id].update(order.tags.get("volume", {}))


def unplug(machine: Machine, eni: Any) -> None:
    backend = machine.ec2_backend
    for address in backend.addresses:
        if address.instance is machine or address.eni is eni:
            address.instance = address.eni = address.association_id = None
    eni.stop()
    machine.history[-1:] = [replace(machine.history[-1], public_ip="")]
    eni.instance = eni.attachment_id = eni.attach_time = None
    eni.status = "available"
    if eni.delete_on_termination:
        backend.delete_network_interface(eni.id)
        backend.tags.pop(eni.id, None)


def discard_disks(machine: Machine) -> None:
    backend = machine.ec2_backend
    for device in machine.block_device_mapping.values():
        volume = backend.volumes.get(device.volume_id)
        if volume is None:
            continue
        volume.attachment = None
        if device.delete_on_termination:
            backend.volumes.pop(volume.id)
            backend.tags.pop(volume.id, None)
    machine.block_device_mapping = {}


def addresses_free(order: Order, count: int) -> None:
    """AwsError if the subnet has too few."""
    each = max(1, len([n for n in order.interfaces if n.get("InterfaceType") != "efa-only"]))
    if order.subnet.available_ip_address_count < count * each:
        raise AwsError(
            "InsufficientFreeAddressesInSubnet",
            f"There are not enough free addresses in subnet '{order.subnet.id}' to satisfy the requested number of "
            "instances.",
        )


def user_data(order: Order) -> bytes:
    return base64.b64decode(order.user_data) if order.user_data else b""
