"""How addresses are written, read and compared: IPv4, IPv6 and names. Layer 0."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def plain(address: str) -> str:
    """The one way to write an address: a kernel may write an IPv4 one as ::ffff:10.0.0.7, a user 2001:DB8:0:0::7. What
    is no address stays as it is."""
    number = _number(address)
    return str(number) if number is not None else address


def is_number(address: str) -> bool:
    """Is it an address, not a name?"""
    return _number(address) is not None


def is_loopback(address: str) -> bool:
    number = _number(address)
    return number is not None and number.is_loopback


def joined(address: str, port: int | str) -> str:
    """ "ADDRESS:PORT", with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split(text: str) -> tuple[str, int]:
    """What `joined` made; ValueError if there is no port."""
    address, _, port = text.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), int(port)


def url(address: str, port: int) -> str:
    return f"https://{joined(address, port)}"


def host_of(url: str) -> str:
    """The address or name in https://ADDRESS:PORT, or in ADDRESS:PORT; empty if there is none."""
    place = url.rpartition("://")[2].partition("/")[0]
    name, colon, _ = place.rpartition(":")
    return (name if colon and not place.endswith("]") else place).removeprefix("[").removesuffix("]")


@lru_cache(maxsize=4096)
def unfit(advertised: str, dispatcher: str) -> str:
    """Why no other host can reach one that advertises this address, as far as the address itself tells; "" if they may.

    `dispatcher`: where the hosts reach the dispatcher. What is no address is not judged.
    """
    mine, theirs = _number(advertised), _number(dispatcher)
    if mine is None or theirs is None:
        return ""
    if mine.is_loopback and not theirs.is_loopback:
        return f"it advertises {mine}, which every machine takes for itself; {FIX}"
    if mine.is_link_local and not (mine.version == 4 and theirs.is_link_local):
        return f"it advertises {mine}, which means nothing beyond one link; {FIX}"
    if mine.is_unspecified or mine.is_multicast:
        return f"it advertises {mine}, which is no machine's address; {FIX}"
    return ""


FIX = "name another address of the host in the fleet file, as `address` in section `ssh`"


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
