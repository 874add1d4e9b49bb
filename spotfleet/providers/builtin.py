"""Plugins of the providers without an SDK: `local` and `ssh`.

They lie beside their folders: an agent loads its plugin for the notices, and these folders import what an inherited
environment may lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spotfleet.codec import to_json
from spotfleet.model import FleetSpec
from spotfleet.plugins import FileFacts, Machines, Note, Traits
from spotfleet.providers import Provider
from spotfleet.providers.plugin import BasePlugin, Config

if TYPE_CHECKING:
    from pydantic import BaseModel

    from spotfleet.interruptions import NoticeSource

LOCAL_CLOUD = "SPOTFLEET_LOCAL_CLOUD"  # another home whose emulated cloud is used: that of a second laptop's account


class LocalPlugin(BasePlugin):
    """Plugin of the emulated cloud. Its configuration: `home`, the directory of the emulation."""

    name = "local"
    traits = Traits(Machines.HERE, poll_s=0.25, notice_poll_s=0.5)

    def open(self, config: Config) -> Provider:
        from spotfleet.providers.local import LocalProvider

        return LocalProvider(config)

    def notices(self, metadata_url: str) -> NoticeSource | None:
        """Return the source; None without a URL: each local host has its own."""
        from spotfleet.interruptions.imds import ImdsSource

        return ImdsSource(metadata_url) if metadata_url else None

    def config(self, spec: FleetSpec, environ: Mapping[str, str], home: str) -> Config:
        return {"home": environ.get(LOCAL_CLOUD) or home}

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        return config

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        return ("provider local emulates a cloud on this machine: its prices are invented and nothing is billed; "
                "`provider: aws` and `provider: ssh` are for real machines")


class SshPlugin(BasePlugin):
    """Plugin of machines that exist. Its configuration is made by `api/lifecycle/ssh_machines.py`."""

    name = "ssh"
    # A listing sends a request to every machine. Making an environment is slow, and each step of it has a limit.
    traits = Traits(Machines.EXISTING, poll_s=1.0, boot_limit_s=3600.0, notice_poll_s=0.5)

    def section(self) -> type[BaseModel] | None:
        from spotfleet.providers.ssh.section.schema import SshSection

        return SshSection

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        from spotfleet.providers.ssh.section import reader
        from spotfleet.providers.ssh.section.schema import SshSection

        found = reader.read(given if isinstance(given, SshSection) else None, facts, note)
        return to_json(found) if found is not None else {}

    def adjusted(self, spec: FleetSpec, facts: FileFacts, note: Note) -> FleetSpec:
        from spotfleet.providers.ssh.section import reader
        from spotfleet.providers.ssh.section.spec import parsed

        nodes = reader.nodes(parsed(spec.section), spec.nodes, facts, note) if spec.section else spec.nodes
        return replace(spec, nodes=nodes, any_of=reader.workers(spec.any_of), dispatcher=reader.dispatcher())

    def portable(self, spec: FleetSpec) -> FleetSpec:
        from spotfleet.providers.ssh.section.spec import parsed

        if not spec.section:
            return spec
        own = replace(parsed(spec.section), identity_file="", known_hosts="", discovery_script="")
        return replace(spec, section=to_json(own))

    def with_access(self, spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
        return replace(spec, section=asked.section)

    def open(self, config: Config) -> Provider:
        from spotfleet.providers.ssh import SshProvider

        return SshProvider(config)

    def notices(self, metadata_url: str) -> NoticeSource | None:
        from spotfleet.interruptions.folder import FolderSource

        return FolderSource(metadata_url)


LOCAL, SSH = LocalPlugin(), SshPlugin()
