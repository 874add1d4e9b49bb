"""Protocol versions of CLI, agent and dispatcher, and the message when two differ. Pure.

Every request of the command line under /v1 and every answer to it carry `HEADER: PROTOCOL RELEASE`. A request without
the header, such as curl's, is accepted. The calls that `down` needs are frozen: they are answered for every version,
and these meanings never change:

    POST /v1/down       {} -> any answer below 400
    GET  /v1/status     {"state": "down" once no worker host is left, "why", "hosts": [{"host", "role", "state"}]}
    GET  /v1/archive    a .tar.gz
    GET  /v1/archive/manifest, GET /v1/archive/files/KEY by range, POST /v1/archive/ranges    see `archive.py`; with a
                        dispatcher that does not have them (404), `down` fetches the .tar.gz
    the header itself, /healthz, and errors as {"error", "hint", "kind"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spotfleet.protocol.messages import PROTOCOL
from spotfleet.version import __version__, upgrade

HEADER = "X-Spotfleet"
FROZEN = frozenset({("POST", "/v1/down"), ("GET", "/v1/status"), ("GET", "/v1/archive"),
                    ("GET", "/v1/archive/manifest"), ("GET", "/v1/archive/files/{key:(?s:.+)}"),
                    ("POST", "/v1/archive/ranges")})


@dataclass(frozen=True)
class SpokenVersion:
    """Protocol and release of one side."""

    protocol: int
    release: str

    def __str__(self) -> str:
        return f"{self.protocol} {self.release}"


@dataclass(frozen=True)
class VersionMismatch:
    """A version conflict: its reason, and the fix."""

    why: str
    hint: str


def own_version() -> SpokenVersion:
    """Return the version of this process."""
    return SpokenVersion(PROTOCOL, __version__)


def parse_version(header: str) -> SpokenVersion | None:
    """Parse the other side's version header; None when it is missing or malformed."""
    found = re.fullmatch(r"(\d{1,9}) ([\w.+-]{1,40})", header.strip())
    return SpokenVersion(int(found[1]), found[2]) if found else None


def compare(cli: SpokenVersion, dispatcher: SpokenVersion) -> VersionMismatch | None:
    """Compare two versions; None when they are compatible: releases of one protocol are."""
    if cli.protocol == dispatcher.protocol:
        return None
    order = "older" if cli.protocol < dispatcher.protocol else "newer"
    why = (f"this spotfleet ({_name(cli)}) is {order} than the fleet's dispatcher ({_name(dispatcher)}), "
           "and they are not compatible")
    fix = (f"install spotfleet {dispatcher.release} to go on with this fleet" if order == "newer" else
           upgrade())
    return VersionMismatch(why, f"{fix}; or end the fleet with `spotfleet down`, which works between all versions")


def agent_differs(agent: int, dispatcher: SpokenVersion) -> str:
    """Explain why an agent of another protocol cannot stay; "" when it can."""
    if agent == dispatcher.protocol:
        return ""
    order = "older" if agent < dispatcher.protocol else "newer"
    return (f"its agent (protocol {agent}) is {order} than the dispatcher ({_name(dispatcher)}); its machine image "
            f"needs spotfleet {dispatcher.release}")


def _name(one: SpokenVersion) -> str:
    return f"{one.release}, protocol {one.protocol}"
