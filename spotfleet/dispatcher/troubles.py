"""What is wrong with the dispatcher's machine and does not go away by itself: said in the fleet's `why`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotfleet.fleet.events import HistoryLost
from spotfleet.fleet.plan import clock

if TYPE_CHECKING:
    from spotfleet.dispatcher.state import Dispatcher


class Troubles:
    def __init__(self, dispatcher: Dispatcher) -> None:
        events = [event for _, event in dispatcher.journal.after(0)]
        self._lost = next((e for e in reversed(events) if isinstance(e, HistoryLost)), None)

    def lines(self) -> list[str]:
        return [] if self._lost is None else [
            f"the ledger was damaged and is kept as {self._lost.kept_as}: what had ended before {clock(self._lost.at)} "
            "may be missing"]
