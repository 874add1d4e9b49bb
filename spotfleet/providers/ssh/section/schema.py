"""Keys of section `ssh`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from spotfleet.config import machine_values
from spotfleet.config.sections import HostFolder, MachineName, Port, Price, Section, Slots, Text, User


class MachineSection(Section):
    """A machine that exists already."""

    host: MachineName
    slots: Slots = 1
    port: Port = 0
    user: User = ""
    host_key: Annotated[str, BeforeValidator(machine_values.host_key)] = ""
    address: Annotated[str, BeforeValidator(machine_values.address)] = ""
    accelerator: Annotated[str, BeforeValidator(machine_values.accelerator)] = ""
    hourly_cost: Price = 0
    folder: HostFolder = ""


class SshSection(Section):
    dispatcher: Annotated[MachineSection, BeforeValidator(machine_values.dispatcher)] | None = None
    hosts: Annotated[list[Annotated[MachineSection, BeforeValidator(machine_values.machine)]],
                     BeforeValidator(machine_values.machine_list)] = Field(default_factory=list)
    user: User = ""
    port: Port = 22
    identity_file: Text = ""
    known_hosts: Text = ""
    discovery_script: Text = ""
    discovery_timeout: Annotated[float, BeforeValidator(machine_values.timeout)] = 10.0
    slots: Slots = 1
    folder: HostFolder = "~/.spotfleet-host"
