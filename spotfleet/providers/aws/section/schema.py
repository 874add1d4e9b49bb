"""Keys of section `aws`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from spotfleet.config.sections import Flag, Section, Text, User
from spotfleet.providers.aws.section import values

Image = Annotated[str, BeforeValidator(values.image)]
Disk = Annotated[int, BeforeValidator(values.disk)]
InstanceProfile = Annotated[str, BeforeValidator(values.instance_profile)]


class AwsNetworkSection(Section):
    vpc: Annotated[str, BeforeValidator(values.vpc)] = ""
    subnets: Annotated[tuple[str, ...], BeforeValidator(values.subnets)] = ()
    security_groups: Annotated[tuple[str, ...], BeforeValidator(values.security_groups)] = ()
    dispatcher_security_groups: Annotated[tuple[str, ...], BeforeValidator(values.security_groups)] = ()


class AwsSection(Section):
    regions: Annotated[tuple[str, ...], BeforeValidator(values.regions)] = ()
    joined: Flag = False
    networks: Annotated[dict[str, AwsNetworkSection],
                        BeforeValidator(values.networks)] = Field(default_factory=dict)
    profile: Text = ""
    public_addresses: Flag = True
    ssh_from: Annotated[tuple[str, ...], BeforeValidator(values.networks_from)] = ()
    image: Image = ""
    dispatcher_image: Image = ""
    user: User = "ubuntu"
    disk: Disk = 100
    dispatcher_disk: Disk = 30
    kms_key: Annotated[str, BeforeValidator(values.kms_key)] = ""
    key_pair: Annotated[str, BeforeValidator(values.key_pair)] = ""
    dispatcher_profile: InstanceProfile = ""
    host_profile: InstanceProfile = ""
    dispatcher_credentials: Text = ""
    event_queue: Flag = False
    interruption_queue: Annotated[str, BeforeValidator(values.queue)] = ""
    permissions_boundary: Annotated[str, BeforeValidator(values.policy)] = ""
    capacity_reservation: Annotated[tuple[str, ...], BeforeValidator(values.reservations)] = ()
