"""Interface between a member of a job and its engine: one generation's communication, over any transport.

    make_world(assignment, address) -> form() -> open --retire()--> gone
                                         '-- abort() --> aborted, for good

An engine gives `Member` a factory of these: torch makes process groups (backends.py).

Threads: the main thread forms and retires. The control thread reads `forming`, `aborted` and `generation`, and sets
`change_waits`. Any thread may call `abort`, at any time and repeatedly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from spotfleet.protocol.messages import Assignment


class World(Protocol):
    """One generation's communication."""

    generation: int
    forming: bool  # an abort is repeated until this is False
    aborted: bool
    change_waits: bool  # a planned change: leave at the next boundary that all ranks agree on
    listens: str  # "address:port" of this worker's own bootstrap store
    on_unreached: Callable[[tuple[str, ...]], None]  # called with the peers that cannot be reached while it forms

    def form(self) -> None:
        """Connect to the other members; CommBroken when one is missing, or the world is aborted meanwhile."""

    def abort(self) -> None:
        """Unblock every call in flight. Never blocks."""

    def retire(self) -> threading.Thread:
        """Free everything in another thread, and return that thread."""

    def descriptors(self) -> list[int]:
        """File descriptors that a forked child must not keep."""


W = TypeVar("W", bound=World)
MakeWorld = Callable[[Assignment, str], W]  # the second argument is the address that this host advertises
