"""Boot configuration of a host: `boot.json` and two environment variables."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.addresses import host_of, is_loopback
from spotfleet.codec import from_json
from spotfleet.errors import UsageError


@dataclass(frozen=True)
class AgentBoot:
    fleet: str
    host: str  # the host's request_id
    provider: str
    slots: int
    dispatcher: str  # https://ADDRESS:PORT
    ca: str  # PEM; the only authority this agent trusts
    token: str = field(repr=False)
    orphan_after_s: float = 0.0  # time without a dispatcher after which this host ends itself; 0: never
    lifetime_s: float = 0.0  # counted from the first start of the agent; 0: no limit
    target: str = ""  # CheckpointSpec.target


def read_boot(home: Path) -> AgentBoot:
    """Read and check `home`/boot.json; UsageError names the invalid field."""
    path = home / "boot.json"
    try:
        boot = from_json(AgentBoot, json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}",
                         hint="pass --home DIR, the folder that the provider filled") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint="the provider writes this file when it launches the host") from error
    if not boot.dispatcher.startswith("https://"):
        raise UsageError(f"{path}: Boot.dispatcher is '{boot.dispatcher}'", hint="expected https://ADDRESS:PORT")
    if boot.slots < 1:
        raise UsageError(f"{path}: Boot.slots is {boot.slots}", hint="expected 1 or more")
    return boot


def host_address() -> str:
    """Return the address that the provider requests the host to advertise; "" if it requests none."""
    return os.environ.get("SPOTFLEET_HOST_ADDRESS", "")


def local_source(asked: str, dispatcher: str) -> str:
    """Return the source address of connections to the dispatcher; "": the kernel chooses.

    It is `asked` only where `asked` and the dispatcher's address are both loopback addresses. Elsewhere the requested
    address may belong to another network than the route to the dispatcher.
    """
    return asked if is_loopback(asked) and is_loopback(host_of(dispatcher)) else ""


def metadata_url() -> str:
    return os.environ.get("SPOTFLEET_METADATA_URL", "")
