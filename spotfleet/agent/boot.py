"""What a host knows at its start: `boot.json` and three words of the environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.addresses import host_of, is_loopback
from spotfleet.codec import from_json
from spotfleet.errors import UsageError


@dataclass(frozen=True)
class Boot:
    fleet: str
    host: str  # the host's request_id
    provider: str
    slots: int
    dispatcher: str  # https://ADDRESS:PORT
    ca: str  # PEM; the only authority this agent trusts
    token: str = field(repr=False)
    orphan_after_s: float = 0.0  # without a dispatcher for so long this host ends itself; 0: never
    lifetime_s: float = 0.0  # from the first start of the agent on; 0: no limit
    target: str = ""  # CheckpointSpec.target


def read_boot(home: Path) -> Boot:
    """DIR/boot.json, checked; UsageError names the field that does not fit."""
    path = home / "boot.json"
    try:
        boot = from_json(Boot, json.loads(path.read_text()))
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
    """The address to advertise, if the provider gave the host one of its own; else ""."""
    return os.environ.get("SPOTFLEET_HOST_ADDRESS", "")


def local_source(asked: str, dispatcher: str) -> str:
    """The address to dial a dispatcher on this very machine from, of all that are loopback's; "": as the kernel says.

    Elsewhere an address that was asked for may stand in another network than the one that the dispatcher is reached by.
    """
    return asked if is_loopback(asked) and is_loopback(host_of(dispatcher)) else ""


def metadata_url() -> str:
    return os.environ.get("SPOTFLEET_METADATA_URL", "")
