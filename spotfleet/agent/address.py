"""Address at which peers reach this host: for control, bootstrap stores, gloo and NCCL.

    requested by the provider, and on one of the host's interfaces --> that one
    else --> the local address of the connection to the dispatcher: the kernel chose it for the route there

The choice is repeated for each report: it follows a dispatcher that moves, and an interface whose address changes.
"""

from __future__ import annotations

import logging
import socket

from spotfleet.addresses import is_number, plain

log = logging.getLogger("spotfleet.agent")


class AdvertisedAddress:
    """The advertised address, and the reason if it is not the requested one."""

    def __init__(self, asked: str) -> None:
        """`asked`: SPOTFLEET_HOST_ADDRESS, or ""."""
        self.address = plain(asked) if asked and is_held(asked) else ""  # "": unknown until the first connection
        self.why = ""  # why it is not the requested one
        self._asked = asked

    def connected(self, local: str) -> str:
        """Return the address to advertise while `local` is the local address of the connection to the dispatcher."""
        self.why = why_not(self._asked) if self._asked else ""
        found = plain(local if self.why or not self._asked else self._asked)
        if found != self.address:
            log.info("peers are told to reach this host at %s%s", found, f"; {self.why}" if self.why else "")
        self.address = found
        return found


def why_not(asked: str) -> str:
    """Explain why this host cannot advertise the requested address; "" if it can."""
    if not is_number(asked):
        return f"{asked!r} cannot be advertised: it is a name, not an IP address"
    if not is_held(asked):
        return f"{plain(asked)} cannot be advertised: no interface of this host has that address"
    return ""


def is_held(address: str) -> bool:
    """Return whether an interface of this machine has `address` now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in plain(address) else socket.AF_INET) as probe:
            probe.bind((plain(address), 0))
    except OSError:
        return False
    return True
