"""Names of a fleet's machines and resources on Google Cloud. Pure.

A deleted machine leaves the list at once, and only its operations stay, which hold its name and its zone. So the name
holds all that its line needs: REQUEST_ID-CODE, where CODE stands for market and machine type. The labels of a machine
say the same to people and to filters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from spotfleet.model import GROUP_NAME, Market, Role
from spotfleet.providers.kit.mapping.names import (
    DISPATCHER_PORT,
    FLEET,
    HOST,
    POOL,
    ROLE,
    token_uuid,
)

__all__ = ["DISPATCHER_PORT", "FLEET", "HOST", "METADATA_URL", "POOL", "ROLE", "token_uuid"]

METADATA_URL = "http://metadata.google.internal/computeMetadata/v1"
BEHAVIOR = "spotfleet-behavior"  # metadata item: "stop" or "terminate"; a notice does not tell which of both follows
USER_DATA, ENCODING = "user-data", "user-data-encoding"  # metadata items that cloud-init reads
LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")  # a label's key and value
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
CODE = 4  # characters
MARKETS = {Market.SPOT: "s", Market.ON_DEMAND: "d"}


def code(kind: str, market: Market) -> str:
    """Return the code of a machine type and market."""
    number, text = int(hashlib.sha256(kind.encode()).hexdigest(), 16), ""
    for _ in range(CODE - 1):
        number, digit = divmod(number, len(DIGITS))
        text += DIGITS[digit]
    return MARKETS[market] + text


def machine(request_id: str, kind: str, market: Market) -> str:
    """Return the name of a host's machine."""
    return f"{request_id}-{code(kind, market)}"


def host_of(name: str) -> str:
    """Return the request_id in a machine's name."""
    return name.rpartition("-")[0]


def sold(name: str, kinds: Iterable[str]) -> tuple[str, Market] | None:
    """Return machine type and market of a machine's name; None if no type of `kinds` has its code."""
    ending = name.rpartition("-")[2]
    market = next((m for m, letter in MARKETS.items() if ending.startswith(letter)), None)
    kind = next((k for k in kinds if market is not None and code(k, market) == ending), "")
    return (kind, market) if kind and market is not None else None


def of_fleet(fleet: str, request_id: str) -> Role | None:
    """Return the role of a host by its request_id; None for a host of another fleet."""
    found = re.fullmatch(rf"{re.escape(fleet)}-(?:(d)-|{GROUP_NAME}-)?\d+", request_id)
    return None if found is None else Role.DISPATCHER if found[1] else Role.WORKER


def pattern(request_id: str) -> str:
    """Return the regular expression of the names that a host's machines may have: "x" for what is no host's name."""
    return f"{request_id}-{'.' * CODE}" if re.fullmatch(r"[a-z0-9-]+", request_id) else "x"


def labels(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that a label can hold. A machine has all of them as metadata, too."""
    return {key: value for key, value in tags.items() if LABEL[0].fullmatch(key) and LABEL[1].fullmatch(value)}


def network_tag(fleet: str, door: bool = False) -> str:
    """Return the network tag of a fleet's machines, or of its dispatcher, for the rules of the firewall."""
    return f"spotfleet-{fleet}{'-door' if door else ''}"


def region_of(zone: str) -> str:
    """Return the region of a zone: us-central1 for us-central1-a; "" for a name that is no zone's."""
    found = re.fullmatch(r"([a-z]+-[a-z]+\d+)-[a-z]", zone)
    return found[1] if found else ""


def last(link: str) -> str:
    """Return the last part of a link, which is the name of what it links to."""
    return link.rpartition("/")[2]
