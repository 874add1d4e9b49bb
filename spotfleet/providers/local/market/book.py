"""State of the emulated cloud, as values that fit in a file. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor

from spotfleet.model import CloudHost, CloudState, Offer, PricePoint, Role, Run
from spotfleet.providers.local.market.pools import MarketRules


@dataclass(frozen=True)
class HostOrder:
    """A launch order to the cloud."""

    request_id: str
    fleet: str
    role: Role
    pool: str
    interruption_behavior: str = "terminate"
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ActiveNotice:
    """A notice in force."""

    action: str  # "terminate" or "stop"
    given_at: float
    ends_at: float


@dataclass(frozen=True)
class LocalHost:
    """One machine, with the cloud's internal data."""

    order: HostOrder
    provider_id: str
    offer: Offer
    state: CloudState
    since: float  # begin of `state`
    runs: tuple[Run, ...] = ()
    address: str = ""
    port: int = 0
    notice: ActiveNotice | None = None
    rebalance_at: float | None = None
    why: str = ""
    disk_gib: int = 0
    addresses: int = 0

    def listed(self) -> CloudHost:
        """Return its line in a listing."""
        return CloudHost(self.order.request_id, self.provider_id, self.order.fleet, self.order.role, self.offer,
                         self.state, self.runs, self.address, self.port, self.why, disk_gib=self.disk_gib,
                         addresses=self.addresses, ended_at=self.ended_at)

    @property
    def ended_at(self) -> float | None:
        return self.since if self.state is CloudState.TERMINATED else None


@dataclass(frozen=True)
class WithheldRoom:
    """Capacity withheld from a pool until `until`, after the cloud took `request_id`."""

    pool: str
    request_id: str
    until: float


@dataclass(frozen=True)
class PoolRefusal:
    """A refusal of `pool` and its whole `scope` until `until` (None: until allowed)."""

    pool: str
    scope: str
    until: float | None = None


@dataclass(frozen=True)
class Book:
    """All of a market's state as a value, to be kept in a file."""

    rules: MarketRules
    opened_at: float
    now: float
    salt: str = ""  # makes the provider ids of one market differ from those of another
    hosts: tuple[LocalHost, ...] = ()
    scripted: tuple[PricePoint, ...] = ()
    capacity: dict[str, int] = field(default_factory=dict)
    reclaimed: tuple[WithheldRoom, ...] = ()
    refusals: tuple[PoolRefusal, ...] = ()


def exact(at: float) -> float:
    """Round `at` down to a multiple of 1/1024 s."""
    return floor(at * 1024) / 1024
