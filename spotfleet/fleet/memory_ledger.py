"""Ledger in memory, with the methods of `fleet.ledger.Ledger` that a reconciler calls."""

from __future__ import annotations

from spotfleet.fleet.domain.events import Event
from spotfleet.fleet.domain.state import FleetState, apply


class MemoryLedger:
    def __init__(self) -> None:
        self.rows: list[Event] = []
        self._state = FleetState()

    def append(self, *events: Event) -> int:
        for event in events:
            self.rows.append(event)
            self._state = apply(self._state, event)
        return len(self.rows)

    def state(self) -> FleetState:
        return self._state
