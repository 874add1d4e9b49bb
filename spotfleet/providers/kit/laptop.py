"""This laptop as a cloud's firewall sees it: its address, and the name on its own rules."""

from __future__ import annotations

import getpass
import ipaddress
import re
import socket
import urllib.request

from spotfleet.errors import NeedsPerson, UsageError

CHECKIP_URL = "https://checkip.amazonaws.com"  # answers with the caller's address
CHECKIP_S = 10.0


def own_address(section: str, *, public: bool = True) -> str:
    """Return this machine's address on the internet, as a CIDR of one address. Raises NeedsPerson if it is unknown.

    `section`: of the fleet file, with keys `ssh_from` and `public_addresses`.
    """
    name_it = f"name the networks that you come from under `{section}.ssh_from`"
    if not public:
        raise NeedsPerson(f"`{section}.public_addresses: false`, so your address at the dispatcher is unknown",
                          hint=name_it)
    try:
        with urllib.request.urlopen(CHECKIP_URL, timeout=CHECKIP_S) as answer:
            address = ipaddress.ip_address(answer.read(100).decode(errors="replace").strip())
    except (OSError, ValueError) as error:
        raise NeedsPerson(f"{CHECKIP_URL} does not return your address: {error}", hint=name_it) from None
    return f"{address}/{address.max_prefixlen}"


def rule_name() -> str:
    """Return the name of this machine, which marks its own rules."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"
    return re.sub(r"[^\w .:/()#,@\[\]+=&;{}!$*-]", "_", f"spotfleet {user}@{socket.gethostname()}", flags=re.A)[:255]


def refuse_the_world(section: str, cidr: str) -> None:
    """Raise UsageError for a network of `ssh_from` that lets everybody in."""
    try:
        prefix = ipaddress.ip_network(cidr).prefixlen
    except ValueError as error:
        raise UsageError(f"{section}.ssh_from: {error}", hint="write ADDRESS/BITS, as 198.51.100.0/24") from None
    if prefix == 0:
        raise UsageError(f"{section}.ssh_from: {cidr} is the whole world", hint="name the networks that you come from")
