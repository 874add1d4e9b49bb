"""Replacement of hosts whose agents have another protocol version."""

from __future__ import annotations

import logging

from spotfleet.dispatcher.core import Core

log = logging.getLogger(__name__)
REPLACED = 3


def replace_host(core: Core, host: str, why: str) -> None:
    """Replace `host`: at once for the first REPLACED hosts, as another machine may fit. Replace later ones only when
    their time to join is over: all machines may have the same image, and each new one costs its minimum."""
    incompatible = core.incompatible
    if host not in incompatible:
        log.warning("%s: %s", host, why)
        incompatible[host] = why
    if host in [*incompatible][:REPLACED]:
        core.drains[host] = why
        core.tick_soon()
