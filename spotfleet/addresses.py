"""Reading, writing and comparing of addresses: IPv4, IPv6 and names."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=4096)
def plain(address: str) -> str:
    """Return the canonical form of an address; other text is returned unchanged.

    A kernel may write an IPv4 address as ::ffff:10.0.0.7, a user an IPv6 one as 2001:DB8:0:0::7.
    """
    number = _number(address)
    return str(number) if number is not None else address


def is_number(address: str) -> bool:
    """Return whether `address` is an IP address and no name."""
    return _number(address) is not None


def is_loopback(address: str) -> bool:
    number = _number(address)
    return number is not None and number.is_loopback


def joined(address: str, port: int | str) -> str:
    """Format "ADDRESS:PORT", with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def split(text: str) -> tuple[str, int]:
    """Split the output of `joined`; ValueError if there is no port."""
    address, _, port = text.rpartition(":")
    return address.removeprefix("[").removesuffix("]"), int(port)


def url(address: str, port: int) -> str:
    return f"https://{joined(address, port)}"


def host_of(url: str) -> str:
    """Return the address or name in https://ADDRESS:PORT or ADDRESS:PORT; empty if there is none."""
    place = url.rpartition("://")[2].partition("/")[0]
    name, colon, _ = place.rpartition(":")
    return (name if colon and not place.endswith("]") else place).removeprefix("[").removesuffix("]")


@lru_cache(maxsize=4096)
def unfit(advertised: str, dispatcher: str) -> str:
    """Explain why no other host can reach the advertised address, judged by the addresses alone; "" if it may be valid.

    `dispatcher`: the address where hosts reach the dispatcher. Names are not judged.
    """
    own, remote = _number(advertised), _number(dispatcher)
    if own is None or remote is None:
        return ""
    if own.is_loopback and not remote.is_loopback:
        return f"it advertises {own}, which every machine takes for itself; {FIX}"
    if own.is_link_local and not (own.version == 4 and remote.is_link_local):
        return f"it advertises {own}, which means nothing beyond one link; {FIX}"
    if own.is_unspecified or own.is_multicast:
        return f"it advertises {own}, which is no machine's address; {FIX}"
    return ""


FIX = "name another address of the host in the fleet file, as `address` in section `ssh`"


def _number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(address.strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found
