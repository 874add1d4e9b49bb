"""Hosts whose agents we cannot use, because they speak another version."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher

log = logging.getLogger(__name__)
REPLACED = 3


def give_back(dispatcher: Dispatcher, host: str, why: str) -> None:
    """Replace `host`: at once for the first few, as there is hope in another machine; further ones only when their time
    to join is over, for then all machines may have the same image, and each new one costs its minimum."""
    misfits = dispatcher.misfits
    if host not in misfits:
        log.warning("%s: %s", host, why)
        misfits[host] = why
    if host in [*misfits][:REPLACED]:
        dispatcher.drains[host] = why
        dispatcher.machines.poke()
