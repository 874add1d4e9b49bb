"""Plugins of the providers without an SDK: `local` and `ssh`.

They lie beside their folders: an agent loads its plugin for the notices, and these folders import what an inherited
environment may lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spotfleet.model import FleetSpec
from spotfleet.plugins import Machines, Traits
from spotfleet.providers import Provider
from spotfleet.providers.plugin import BasePlugin, Config

if TYPE_CHECKING:
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


class SshPlugin(BasePlugin):
    """Plugin of machines that exist. Its configuration is made by `api/lifecycle/ssh_machines.py`."""

    name = "ssh"
    # A listing sends a request to every machine. Making an environment is slow, and each step of it has a limit.
    traits = Traits(Machines.EXISTING, poll_s=1.0, boot_limit_s=3600.0, notice_poll_s=0.5)

    def open(self, config: Config) -> Provider:
        from spotfleet.providers.ssh import SshProvider

        return SshProvider(config)

    def notices(self, metadata_url: str) -> NoticeSource | None:
        from spotfleet.interruptions.folder import FolderSource

        return FolderSource(metadata_url)


LOCAL, SSH = LocalPlugin(), SshPlugin()
