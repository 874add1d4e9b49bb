"""What the fleet's dispatchers have cost, of which the dispatcher's own ledger tells nothing: this machine, lost ones.

The laptop keeps a ledger of them, from the cloud's listing. Here the same code keeps another, in memory: so a limit is
held against the total that `spotfleet cost` shows. A machine that was lost so long ago that the cloud lists it no more
counts as one like this, for as long as the ledger that was copied back tells of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from spotfleet.errors import SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.actions import Wanted
from spotfleet.fleet.events import Event, FleetCreated, HostListed, LaunchIntended, TakenOver
from spotfleet.fleet.fold import FleetState
from spotfleet.fleet.host import Host
from spotfleet.model import CloudState, Role, Run
from spotfleet.providers import Provider
from spotfleet.simulate.ledger import MemoryLedger

LOOK_S = 300.0  # what the cloud lists of dispatchers is looked up again after this: rates and prices change seldom
AGAIN_S = 15.0  # until it has listed this machine


class OwnBill:
    def __init__(self, fleet: str, host: str) -> None:
        """`host`: this machine's request_id."""
        self._fleet, self._host = fleet, host
        self._ledger = MemoryLedger()
        self._due_at = -math.inf  # monotonic

    @property
    def state(self) -> FleetState:
        """The dispatchers' machines, and the prices and rates of where they are."""
        return self._ledger.state()

    @property
    def own(self) -> Host | None:
        """This machine; None before it was listed."""
        return self.state.host(self._host)

    def due(self, now: float) -> bool:
        """Must the listing be looked at? `now` is monotonic."""
        return now >= self._due_at

    def look(self, provider: Provider, now: float, unix: float) -> None:
        """Note what the cloud lists of dispatchers; in a thread. What it raises, the tick that follows tells."""
        with suppress(SpotfleetError, OSError):
            reconcile.look(Wanted(self._fleet, Role.DISPATCHER, 1), self._ledger, provider, unix)  # type: ignore[arg-type]
        self._due_at = now + (LOOK_S if self.own is not None else AGAIN_S)

    def events(self, ledger: Sequence[Event]) -> list[Event]:
        """What a bill needs beside `ledger`, which is the dispatcher's own."""
        return [*self._ledger.rows, *self._lost(ledger)]

    def _lost(self, ledger: Sequence[Event]) -> list[Event]:
        """Those that no listing shows any more: each was there since it made the fleet, or took over, until its last
        word in a ledger that was copied back."""
        own, found, before = self.own, list[Event](), list[Event]()
        since = next((e.at for e in ledger if isinstance(e, FleetCreated)), None)
        for event in ledger:
            if isinstance(event, TakenOver) and own is not None and since is not None:
                began = own.runs[0].started_at if event.host == self._host and own.runs else event.at
                last = max((e.at for e in before if e.at <= began), default=since)
                if event.restored and since < last and not self._listed(since, last, event.host):
                    found += _ended(f"{self._fleet}-d-before-{event.host}", since, last, own)
                since, before = event.at, []
            before.append(event)
        return found

    def _listed(self, since: float, until: float, successor: str) -> bool:
        """Does the cloud's listing have the dispatcher that was there between, or had it when we looked?"""
        others = [*self.state.hosts, *self.state.ended.values()]
        return any(r.started_at < until and (r.ended_at is None or r.ended_at > since) for h in others
                   if h.request_id not in (self._host, successor) for r in h.runs)


def _ended(name: str, since: float, until: float, like: Host) -> list[Event]:
    """A machine like another that was there between."""
    return [LaunchIntended(since, name, Role.DISPATCHER, like.offer, ""),
            HostListed(until, name, name, CloudState.TERMINATED, (Run(since, until),), disk_gib=like.disk_gib,
                       addresses=like.addresses, ended_at=until)]
