"""Input and output of the planner. Pure values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotfleet.model import DISPATCHERS, GROUP_NAME, SECOND, BootStages, Need, Notice, Offer, Role


@dataclass(frozen=True)
class Wanted:
    """The hosts of one role that should exist. `hosts` and `on_demand` both 0 mean down, unless the fleet `stays`."""

    fleet: str
    role: Role
    hosts: int
    any_of: tuple[Need, ...] = (Need(),)
    interruption_behavior: str = "terminate"
    tags: dict[str, str] = field(default_factory=dict)
    launch_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0
    restart_after_s: float = 600.0
    silent_timeout_s: float = 120.0  # for workers only: a laptop off the network must not replace its dispatcher
    placement: str = "spread"  # as in FleetSpec
    all_or_nothing: bool = False  # a fleet without hosts launches all of them in one pool, or none
    on_demand: int = 0  # hosts that meet a need on demand, in addition to `hosts`, which use the needs' own markets
    apart: bool = False  # `hosts` counts spot hosts only, also where a need is on demand: `on_demand` counts those
    max_micros_h: int = 0  # limit for all hosts that stay, together; 0: no limit
    shun: tuple[str, ...] = ()  # spot pools without new launches, because on demand costs no more
    stays: bool = False  # no host may be wanted for now, without an end of the fleet
    why: str = ""  # why so many, where demand decides
    group: str = ""  # group of the hosts that this is about; "": all hosts of the role
    parts: tuple[Wanted, ...] = ()  # what each group should have, in a fleet with named groups

    @property
    def total(self) -> int:
        return self.hosts + self.on_demand

    @property
    def is_down(self) -> bool:
        """Whether the fleet goes down."""
        return not self.total and not self.stays


@dataclass(frozen=True)
class Observed:
    """State of the hosts as their agents and users report it, by request_id."""

    joined: Mapping[str, str] = field(default_factory=dict)  # agents connected and ready -> incarnation
    notices: Mapping[str, Notice] = field(default_factory=dict)
    released: frozenset[str] = frozenset()  # draining hosts without workers and without unsent results
    drain: Mapping[str, str] = field(default_factory=dict)  # hosts the user asked to drain -> why
    busy: frozenset[str] = frozenset()  # hosts that hold workers: the last to go when there are too many
    settle_until: float = 0.0  # after the caller's restart: no launch and no end before it, unless all have joined
    # Draining hosts with results that have not arrived -> seconds that they may stay if no more of them arrives.
    unsent: Mapping[str, float] = field(default_factory=dict)
    boots: Mapping[str, BootStages] = field(default_factory=dict)  # joined hosts, as their agents measured them
    idle: Mapping[str, float] = field(default_factory=dict)  # hosts without work for long -> seconds: the first to go


@dataclass(frozen=True)
class Launch:
    request_id: str
    offer: Offer
    why: str
    alternatives: tuple[Offer, ...] = ()  # equal to `offer`: a cloud that knows its capacity chooses among all
    together: tuple[str, ...] = ()  # request_ids of the gang, this one included: all are launched or none
    group: str = ""


@dataclass(frozen=True)
class Drain:
    request_id: str
    why: str


@dataclass(frozen=True)
class Terminate:
    request_id: str
    why: str


@dataclass(frozen=True)
class Wait:
    why: str


Action = Launch | Drain | Terminate | Wait


def request_id(wanted: Wanted, number: int) -> str:
    """Return FLEET-N for a worker host, FLEET-GROUP-N for one of a named group, FLEET-d-N for a dispatcher."""
    part = DISPATCHERS if wanted.role is Role.DISPATCHER else wanted.group
    return f"{wanted.fleet}-{part}-{number}" if part else f"{wanted.fleet}-{number}"


def group_of(fleet: str, request_id: str) -> str:
    """Return the group that the name of a worker host has; "" for none. A listing tells no more about a host than its
    name, and a new dispatcher may have lost the ledger."""
    named = re.fullmatch(rf"{re.escape(fleet)}-({GROUP_NAME})-\d+", request_id.partition(SECOND)[0])
    return named[1] if named and named[1] != DISPATCHERS else ""
