"""Who speaks which version, and what to do when two differ. Pure; layer 0.

Every request of the command line under /v1 and every answer to it bear `HEADER: PROTOCOL RELEASE`. A caller without the
header, such as curl, speaks for itself. What `down` needs is frozen: it is answered to every version, and these
meanings never change:

    POST /v1/down       {} -> any answer below 400
    GET  /v1/status     {"state": "down" once no worker host is left, "why", "hosts": [{"host", "role", "state"}]}
    GET  /v1/archive    a .tar.gz
    the header itself, /healthz, and errors as {"error", "hint", "kind"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spotfleet import __version__
from spotfleet.messages import PROTOCOL

HEADER = "X-Spotfleet"
FROZEN = frozenset({("POST", "/v1/down"), ("GET", "/v1/status"), ("GET", "/v1/archive")})


@dataclass(frozen=True)
class Spoken:
    protocol: int
    release: str

    def __str__(self) -> str:
        return f"{self.protocol} {self.release}"


@dataclass(frozen=True)
class Differ:
    """Why two versions cannot work together, and the way out."""

    why: str
    hint: str


def ours() -> Spoken:
    return Spoken(PROTOCOL, __version__)


def spoken(header: str) -> Spoken | None:
    """What the other side speaks; None when it does not say, or says something else."""
    found = re.fullmatch(r"(\d{1,9}) ([\w.+-]{1,40})", header.strip())
    return Spoken(int(found[1]), found[2]) if found else None


def differ(cli: Spoken, dispatcher: Spoken) -> Differ | None:
    """None when they understand each other: releases of one protocol do."""
    if cli.protocol == dispatcher.protocol:
        return None
    order = "older" if cli.protocol < dispatcher.protocol else "newer"
    why = (f"this spotfleet ({_name(cli)}) is {order} than the fleet's dispatcher ({_name(dispatcher)}), "
           "and they do not understand each other")
    fix = (f"`pip install spotfleet=={dispatcher.release}` to go on with this fleet" if order == "newer" else
           "`pip install --upgrade spotfleet`")
    return Differ(why, f"{fix}; or end the fleet with `spotfleet down`, which works between all versions")


def agent_differs(agent: int, dispatcher: Spoken) -> str:
    """Why an agent of another protocol cannot stay; "" when it can."""
    if agent == dispatcher.protocol:
        return ""
    order = "older" if agent < dispatcher.protocol else "newer"
    return (f"its agent (protocol {agent}) is {order} than the dispatcher ({_name(dispatcher)}); its machine image "
            f"needs spotfleet {dispatcher.release}")


def _name(one: Spoken) -> str:
    return f"{one.release}, protocol {one.protocol}"
