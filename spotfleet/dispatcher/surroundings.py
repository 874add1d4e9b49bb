"""What a job sees of the rest of the fleet: the time, its hosts, and which of them are about to leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from spotfleet.dispatcher.hosts import DRAIN_S, HostView, Leaving
from spotfleet.dispatcher.restart import Slot


@dataclass(frozen=True)
class Surroundings:
    """What a job's step looks at besides itself."""

    now: float  # monotonic
    unix: float
    mine: Collection[str]  # hosts that the schedule gives this job
    given: tuple[Slot, ...]  # slots on them where a worker may be, in the order of ranks to be
    hosts: dict[str, HostView]
    why_waiting: str = ""  # the schedule's reason for not giving more
    coming: int = 0  # workers that hosts on their way have room for

    def hinted(self, hosts: Iterable[str]) -> frozenset[str]:
        """Those of `hosts` of which the cloud has hinted that it may take them."""
        return frozenset(h for h in hosts if (view := self.hosts.get(h)) is not None and view.host.hint)

    def leaving(self, host: str) -> Leaving | None:
        """Why and when this host goes, or has to be free of the job; None: it stays."""
        view = self.hosts.get(host)
        if view is not None and view.leaving is not None:
            return view.leaving
        return None if host in self.mine else Leaving(DRAIN_S, "drain")  # another job gets the host
