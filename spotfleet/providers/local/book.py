"""What the emulated cloud remembers: values only, so that all of it can be kept in a file. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor

from spotfleet.model import CloudHost, CloudState, Offer, PricePoint, Role, Run
from spotfleet.providers.local.pools import MarketRules


@dataclass(frozen=True)
class Order:
    """What somebody asks the cloud for."""

    request_id: str
    fleet: str
    role: Role
    pool: str
    interruption_behavior: str = "terminate"
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned:
    """A notice in force."""

    action: str  # "terminate" or "stop"
    given_at: float
    ends_at: float


@dataclass(frozen=True)
class Host:
    """One machine, as the cloud alone knows it."""

    order: Order
    provider_id: str
    offer: Offer
    state: CloudState
    since: float  # of `state`
    runs: tuple[Run, ...] = ()
    address: str = ""
    port: int = 0
    notice: Warned | None = None
    rebalance_at: float | None = None
    why: str = ""
    disk_gib: int = 0
    addresses: int = 0

    def listed(self) -> CloudHost:
        """Its line in a listing."""
        return CloudHost(self.order.request_id, self.provider_id, self.order.fleet, self.order.role, self.offer,
                         self.state, self.runs, self.address, self.port, self.why, disk_gib=self.disk_gib,
                         addresses=self.addresses, ended_at=self.ended_at)

    @property
    def ended_at(self) -> float | None:
        return self.since if self.state is CloudState.TERMINATED else None


@dataclass(frozen=True)
class Reclaimed:
    """Room of a pool that the cloud keeps from it until `until`, after it took `request_id`."""

    pool: str
    request_id: str
    until: float


@dataclass(frozen=True)
class Refusal:
    """`pool`, and all that `scope` says goes with it, is refused until `until` (None: until allowed)."""

    pool: str
    scope: str
    until: float | None = None


@dataclass(frozen=True)
class Book:
    """All of a market's state as a value, to be kept in a file."""

    rules: MarketRules
    opened_at: float
    now: float
    salt: str = ""  # tells the provider ids of one market from those of another
    hosts: tuple[Host, ...] = ()
    scripted: tuple[PricePoint, ...] = ()
    capacity: dict[str, int] = field(default_factory=dict)
    reclaimed: tuple[Reclaimed, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def exact(at: float) -> float:
    """`at`, rounded down to a multiple of 1/1024 s."""
    return floor(at * 1024) / 1024
