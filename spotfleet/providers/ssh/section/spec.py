"""Section `ssh` as values: the machines that exist. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spotfleet.codec import from_json

DISPATCHER_TYPE, WORKER_TYPE = "dispatcher", "machine"  # instance types of provider ssh


@dataclass(frozen=True)
class SshMachine:
    """A machine that exists already."""

    host: str  # name or address, as laptop and dispatcher reach it
    slots: int = 1
    port: int = 0  # 0: SshSpec.port
    user: str = ""  # empty: SshSpec.user
    host_key: str = ""  # "ssh-ed25519 AAAA..."; empty: from known_hosts
    address: str = ""  # advertised to other hosts; empty: the source address of its route to the dispatcher
    accelerator: str = ""
    price_micros_h: int = 0
    folder: str = ""  # empty: SshSpec.folder


@dataclass(frozen=True)
class SshSpec:
    """Section `ssh` of the fleet file, for provider ssh."""

    dispatcher: SshMachine | None = None  # runs the dispatcher and no workers
    hosts: tuple[SshMachine, ...] = ()
    user: str = ""  # empty: the user who runs the command line
    port: int = 22
    identity_file: str = ""  # on the laptop: used until the fleet's key is installed; empty: ssh-agent and default keys
    known_hosts: str = ""  # file on the laptop; empty: ~/.ssh/known_hosts
    discovery_script: str = ""  # file on the laptop, run by laptop and dispatcher; prints `host` or `host:slots` lines
    discovery_timeout_s: float = 10.0
    slots: int = 1  # slots of a host for which the script prints none
    folder: str = "~/.spotfleet-host"  # on each machine: all files of spotfleet

    def machine_name(self, machine: SshMachine) -> str:
        """Return the machine's unique name: its host, with the port if that is not the fleet's.

        fleet.json and running fleets hold such names, so the format must not change.
        """
        port = machine.port or self.port
        return machine.host if port == self.port else f"[{machine.host}]:{port}"


def parsed(section: Mapping[str, Any]) -> SshSpec:
    """Return the spec in a `FleetSpec.section`."""
    return from_json(SshSpec, dict(section))
