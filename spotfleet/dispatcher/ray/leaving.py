"""Hosts that leave a Ray cluster. Pure.

    notice, drain, priority of another job --> RayDrain: Ray places nothing new there
    the node has gone: nothing ran there any more     } the raylet ends, and the host is released
    LEAD_S before the host goes, or DRAIN_S are over  }

Ray itself ends a draining node once it is idle, and does nothing at the deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotfleet.dispatcher.hosts import DRAIN_S, Departure
from spotfleet.protocol.ray_cluster import RayDrain, RayState

LEAD_S = 5.0  # for the end of a raylet and of the host's last reports
YIELD_S = 30.0  # a job of a higher priority waits for so long for what still runs on a host that it gets


@dataclass(frozen=True)
class LeavingHost:
    """A host with a raylet that is to go."""

    host: str
    left_s: float
    why: str = "drain"  # or "notice"

    @property
    def drain(self) -> RayDrain:
        text = "the cloud takes this host" if self.why == "notice" else "the fleet gives this host back"
        return RayDrain(self.host, self.left_s, text, idle_only=self.why != "notice")


@dataclass
class LeavingHosts:
    """Hosts that leave, with the time since when."""

    since: dict[str, float] = field(default_factory=dict)  # monotonic

    def update(self, departures: Mapping[str, tuple[Departure, bool]], now: float) -> list[LeavingHost]:
        """Return the hosts that leave. `departures`: of each host that leaves or that the job gives up, the departure
        and whether another job is to get it."""
        self.since = {host: self.since.get(host, now) for host in departures}
        return [_leaving(host, departure, yields, now - self.since[host])
                for host, (departure, yields) in departures.items()]


def _leaving(host: str, departure: Departure, yields: bool, passed_s: float) -> LeavingHost:
    if departure.why == "notice":
        return LeavingHost(host, departure.seconds_left, "notice")
    limit_s = (YIELD_S if yields else DRAIN_S) - passed_s
    return LeavingHost(host, max(0.0, min(departure.seconds_left, limit_s)))


def kept(leaving: Iterable[LeavingHost], state: RayState | None) -> frozenset[str]:
    """Return the hosts that leave and whose raylets stay for now: something may still run there."""
    if state is None or not state.up:
        return frozenset()
    alive = {node.host for node in state.nodes}
    return frozenset(h.host for h in leaving if h.host in alive and h.left_s > LEAD_S)
