"""What is the matter with the dispatcher's machine and does not go away by itself: said in the fleet's `why`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfleet.dispatcher import disk
from spotfleet.fleet.events import HistoryLost
from spotfleet.fleet.plan import clock

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher


class Troubles:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        events = [event for _, event in dispatcher.journal.after(0)]
        self._lost = next((e for e in reversed(events) if isinstance(e, HistoryLost)), None)

    def lines(self) -> list[str]:
        full = disk.why(self._dispatcher.home)
        if not full and self._dispatcher.journal.full is not None:
            full = disk.full(self._dispatcher.home)
        lines = [f"{full}; new jobs, logs and checkpoints wait for room, training goes on"] if full else []
        if self._lost is not None:
            lines.append(f"the ledger was damaged and is kept as {self._lost.kept_as}: what had ended before "
                         f"{clock(self._lost.at)} may be missing")
        if self._dispatcher.machines.stays and self._dispatcher.journal.state.down is not None:
            lines.append("its results wait on the dispatcher's machine: `spotfleet down` brings them home")
        return lines
