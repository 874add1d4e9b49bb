"""Cost of the fleet's dispatchers (this machine and lost ones), which the dispatcher's own ledger does not contain.

The laptop keeps a ledger of them, from the cloud's listing. Here the same code keeps another one in memory, so that a
limit applies to the total that `spotfleet cost` shows. A lost machine that the cloud no longer lists is counted as a
machine like this one, for the time that the restored ledger covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from spotfleet.errors import SpotfleetError
from spotfleet.fleet import reconcile
from spotfleet.fleet.domain.actions import Wanted
from spotfleet.fleet.domain.events import Event, FleetCreated, HostListed, LaunchIntended, TakenOver
from spotfleet.fleet.domain.host import Host
from spotfleet.fleet.domain.state import FleetState
from spotfleet.fleet.memory_ledger import MemoryLedger
from spotfleet.model import CloudHost, CloudState, Role, Run
from spotfleet.providers import Provider

LOOK_S = 300.0  # period of reading the dispatchers in the cloud's listing: rates and prices change seldom
AGAIN_S = 15.0  # the same, until the cloud has listed this machine


class DispatcherCost:
    """Ledger in memory of the fleet's dispatchers."""

    def __init__(self, fleet: str, host: str) -> None:
        """`host`: this machine's request_id."""
        self._fleet, self._host = fleet, host
        self._ledger = MemoryLedger()
        self._due_at = -math.inf  # monotonic
        self.machine: CloudHost | None = None  # this machine, as first listed by the cloud

    @property
    def state(self) -> FleetState:
        """The dispatchers' machines, and the prices and rates of their pools and regions."""
        return self._ledger.state()

    @property
    def own(self) -> Host | None:
        """This machine; None until the cloud has listed it."""
        return self.state.host(self._host)

    def find(self, provider: Provider) -> None:
        """Find this machine in the cloud's listing; called in a thread."""
        self.machine = next((h for h in provider.hosts(self._fleet) if h.request_id == self._host), None)

    def due(self, now: float) -> bool:
        """Return whether the listing must be read again. `now` is monotonic."""
        return now >= self._due_at

    def refresh(self, provider: Provider, now: float, unix: float) -> None:
        """Record the dispatchers in the cloud's listing; called in a thread. The tick that follows reports errors."""
        with suppress(SpotfleetError, OSError):
            reconcile.record_listing(Wanted(self._fleet, Role.DISPATCHER, 1), self._ledger, provider, unix)  # type: ignore[arg-type]
        self._due_at = now + (LOOK_S if self.own is not None else AGAIN_S)

    def events(self, ledger: Sequence[Event]) -> list[Event]:
        """Return the events that a bill needs besides `ledger`, the dispatcher's own."""
        return [*self._ledger.rows, *self._lost(ledger)]

    def _lost(self, ledger: Sequence[Event]) -> list[Event]:
        """Return the events of machines that no listing shows any more. Each existed from its creation of the fleet, or
        its takeover, until its last event in a restored ledger."""
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
        """Return whether the cloud lists, or listed at an earlier reading, a dispatcher that ran between them."""
        others = [*self.state.hosts, *self.state.ended.values()]
        return any(r.started_at < until and (r.ended_at is None or r.ended_at > since) for h in others
                   if h.request_id not in (self._host, successor) for r in h.runs)


def _ended(name: str, since: float, until: float, like: Host) -> list[Event]:
    """Return the events of a machine like `like` that existed between the two times."""
    return [LaunchIntended(since, name, Role.DISPATCHER, like.offer, ""),
            HostListed(until, name, name, CloudState.TERMINATED, (Run(since, until),), disk_gib=like.disk_gib,
                       addresses=like.addresses, ended_at=until)]
