"""One host of the folded fleet state. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from spotfleet.model import SECOND, CloudState, HostState, Market, Offer, Role, Run


@dataclass(frozen=True)
class Host:
    """One host as the ledger records it. Instants are Unix seconds of the events' `at`."""

    request_id: str
    role: Role
    offer: Offer
    state: HostState
    since: float  # in `state`
    launched_at: float  # first intent
    asked_at: float  # newest intent: the launch is requested again while the cloud does not list it
    asks: int = 1
    provider_id: str = ""  # empty until the cloud has listed it
    cloud: CloudState | None = None  # as last listed
    runs: tuple[Run, ...] = ()
    address: str = ""
    port: int = 0
    incarnation: str = ""  # incarnation of the agent that joined last
    first_step_from: float | None = None  # its last launch, from when it joined until its first step in a job
    silent_since: float | None = None  # its agent is disconnected since then
    missing_since: float | None = None  # the cloud stopped listing it then
    notice_deadline: float | None = None  # when the cloud takes it
    notice_action: str = ""
    hint: str = ""  # the cloud hinted that a notice is likely
    terminate_at: float | None = None  # when its termination was last requested
    failed: str = ""  # why its machine cannot become a host, as it reports
    broken: bool = False  # for a fault of the machine itself
    revoked: str = ""  # why its token was revoked; permanent, whatever the cloud does with the host
    revived: bool = False  # it had ended at our request, and the cloud brought it back
    why: str = ""
    alternatives: tuple[Offer, ...] = ()  # other offers of its launch: a repeated request names the same
    together: tuple[str, ...] = ()  # launched all or none
    disk_gib: int = 0
    addresses: int = 0
    group: str = ""  # one of the fleet's named groups; "" in a fleet without them

    @cached_property
    def counts(self) -> bool:
        """Whether it counts towards the wanted hosts."""
        return self.state in (HostState.LAUNCHING, HostState.UP) and not self.revoked and not self.is_second

    @property
    def is_second(self) -> bool:
        """Whether it is an unrequested second machine of a host."""
        return SECOND in self.request_id

    @property
    def was_refused(self) -> bool:
        return (self.state is HostState.GONE and not self.provider_id and self.terminate_at is None
                and self.cloud is None)

    @property
    def has_run_on_spot(self) -> bool:
        """Whether it is a spot host for workers that has run."""
        return bool(self.runs) and self.role is Role.WORKER and self.offer.sold == Market.SPOT.value

    def ran_s(self, now: float) -> float:
        """Return how many seconds it has run, a current run counted until `now`."""
        return sum(max(0.0, (now if r.ended_at is None else r.ended_at) - r.started_at) for r in self.runs)

    @property
    def times_taken(self) -> int:
        """How often the cloud took it. A host that left in time after a notice counts as taken too."""
        return max(sum(r.taken for r in self.runs), int(self.notice_deadline is not None))
