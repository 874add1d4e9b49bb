"""Boot configuration of the dispatcher's process: `boot.json` in its home, and environment variables."""

from __future__ import annotations

import json
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotfleet.codec import from_json
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec
from spotfleet.transport.certs import server_context


@dataclass(frozen=True)
class DispatcherBoot:
    """`boot.json`. Holds every secret of the fleet: mode 0600, never printed (see `__repr__`)."""

    fleet: str
    host: str  # our own request_id
    spec: FleetSpec
    fleet_secret: str  # keys the tokens of hosts
    admin_token: str
    ca: str  # PEM, also given to agents
    cert: str
    key: str
    provider_config: dict[str, Any] = field(default_factory=dict)  # only the provider's plugin reads it
    admin_from_here: bool = False  # accept the admin token only from this machine: people connect through its sshd
    webhook: str = field(default="", repr=False)  # URL for notifications; empty: none
    archive: str = ""  # folder for ledger, logs and outputs at an autostop; empty: `archive` in the home

    def __repr__(self) -> str:
        return f"DispatcherBoot(fleet={self.fleet!r}, host={self.host!r})"


def read_boot(home: Path) -> DispatcherBoot:
    """Read the boot file in `home`; UsageError names the invalid field."""
    path = home / "boot.json"
    try:
        return from_json(DispatcherBoot, json.loads(path.read_text()))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint="--home names the folder of the dispatcher") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint="start the fleet again with the same version of spotfleet") from None


def listen_at() -> tuple[str, int]:
    """Return (address, port) from the environment set by the provider; port 0 lets the kernel choose."""
    return os.environ.get("SPOTFLEET_HOST_ADDRESS", "127.0.0.1"), int(os.environ.get("SPOTFLEET_HOST_PORT", "0"))


def server_tls(boot: DispatcherBoot) -> ssl.SSLContext:
    """Make the dispatcher's TLS context. OpenSSL reads keys only from files, so two exist briefly, mode 0600."""
    with tempfile.TemporaryDirectory(prefix="spotfleet-tls-") as folder:  # the folder itself is 0700
        cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        for path, text in ((cert, boot.cert), (key, boot.key)):
            path.touch(mode=0o600)
            path.write_text(text)
        return server_context(cert, key)
