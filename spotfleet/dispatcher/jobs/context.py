"""Context of a job's step: the time, its hosts, and which of them will leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotfleet.dispatcher.hosts import DRAIN_S, Departure, HostView
from spotfleet.dispatcher.jobs.restart import Slot
from spotfleet.protocol.messages import Unsent


@dataclass(frozen=True)
class RayView:
    """The fleet's Ray cluster, for the step of its job."""

    up: bool = False
    why: str = ""
    kept: frozenset[str] = frozenset()  # hosts that leave, and whose raylets stay for now
    lost: bool = False  # it was up, and is not now


@dataclass(frozen=True)
class JobContext:
    """Inputs of a job's step besides the job itself."""

    now: float  # monotonic
    unix: float
    assigned: Collection[str]  # hosts that the schedule assigns to this job
    given: tuple[Slot, ...]  # slots on them that may have a worker, in the order of future ranks
    hosts: dict[str, HostView]
    why_waiting: str = ""  # the schedule's reason for not giving more
    coming: int = 0  # slots of hosts that are being launched
    unsent: Mapping[str, Sequence[Unsent]] = field(default_factory=dict)  # by host: results that have not arrived
    going_down: bool = False  # the fleet
    preempted: str = ""  # for which job its processes must end now, and why
    shrunk: str = ""  # for which job it loses hosts now, and why
    ray: RayView | None = None  # for a job of kind "ray"

    def hinted(self, hosts: Iterable[str]) -> frozenset[str]:
        """Return those of `hosts` that the cloud has hinted it may take."""
        return frozenset(h for h in hosts if (view := self.hosts.get(h)) is not None and view.host.hint)

    def leaving(self, host: str) -> Departure | None:
        """Return why and when this host leaves, or must be free of the job; None if it stays."""
        view = self.hosts.get(host)
        if view is not None and view.leaving is not None:
            return view.leaving
        return None if host in self.assigned else Departure(DRAIN_S, "drain")  # another job gets the host

    def keeps(self, host: str) -> bool:
        """Return whether a worker stays on this host although it leaves."""
        return self.ray is not None and host in self.ray.kept
