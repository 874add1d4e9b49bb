"""Section `gcp` of the fleet file as values, and the configuration of provider gcp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spotfleet.codec import from_json, to_json
from spotfleet.errors import UsageError


@dataclass(frozen=True)
class GcpSpec:
    """Section `gcp` of the fleet file."""

    project: str = ""  # id; empty: the one of the environment or of the credentials
    regions: tuple[str, ...] = ()  # candidates; `up` chooses the cheapest; empty: those of the needs
    network: str = ""  # name, or projects/HOST/global/networks/NAME of a shared VPC; empty: default
    subnetworks: dict[str, str] = field(default_factory=dict, hash=False)  # region -> name or path
    public_addresses: bool = True  # False: private ones only; the laptop needs a VPN, and the network Cloud NAT
    ssh_from: tuple[str, ...] = ()  # CIDRs that may reach the dispatcher; empty: the laptop's own address
    # for hosts: spotfleet, projects/PROJECT/global/images/[family/]NAME; empty: Deep Learning VM, Ubuntu on CPUs
    image: str = ""
    dispatcher_image: str = ""  # empty: plain Ubuntu
    user: str = "ubuntu"  # login user that the machines get
    disk_gib: int = 100
    dispatcher_disk_gib: int = 30
    disk_type: str = ""  # hosts boot from it; empty: pd-balanced, or hyperdisk-balanced where the type needs that
    local_ssds: int = 0  # number of local SSDs of a host whose type does not include any
    service_account: str = ""  # hosts get it; empty: none, or the project's default one if checkpoints go to gs://
    dispatcher_service_account: str = ""  # empty: the project's default one
    network_tags: tuple[str, ...] = ()  # more tags of every machine; `up` makes no firewall rules then
    dispatcher_network_tags: tuple[str, ...] = ()  # more of them for the dispatcher, such as one that lets SSH in
    disk_key: str = ""  # Cloud KMS key of the disks; empty: Google's own
    dispatcher_credentials: str = ""  # a service account's key file on the laptop, for a dispatcher on another cloud


def parsed(section: Mapping[str, Any]) -> GcpSpec:
    """Return the spec in a `FleetSpec.section`; GcpSpec() for an empty one."""
    return from_json(GcpSpec, dict(section))


def spec_in(config: Mapping[str, Any]) -> GcpSpec:
    """Return the spec in a configuration. Raises UsageError for one that cannot be read."""
    try:
        return parsed(config.get("section") or {})
    except (ValueError, TypeError, KeyError) as error:
        raise unreadable(error) from error


def with_spec(config: Mapping[str, Any], spec: GcpSpec) -> dict[str, Any]:
    """Return the configuration with this spec."""
    return {**config, "section": to_json(spec)}


def unreadable(error: Exception) -> UsageError:
    return UsageError(f"provider gcp: its configuration cannot be read: {error}",
                      hint="`spotfleet up` writes it anew from the fleet file")
