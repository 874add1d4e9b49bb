"""Input and result of a policy decision. Pure values; seconds and host-seconds, instants in Unix seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from spotfleet.fleet.domain.availability import AvailabilityHistory


@dataclass(frozen=True)
class DecisionInput:
    """Facts known at `now`, without any knowledge of the future."""

    now: float
    hosts: int  # the target: the most that may work at once
    spot: int = 0  # spot hosts that exist and are not leaving, booting ones included
    spot_ready: int = 0  # spot hosts that work already
    on_demand: int = 0
    on_demand_ready: int = 0
    room: int | None = None  # further spot hosts that could be launched now; 0: none, None: unknown
    left_s: float = math.inf  # until the deadline
    work_s: float = math.inf  # host-seconds still to do
    boot_s: float = 180.0  # from a launch until the host works; this time is paid
    stall_s: float = 0.0  # wait of all hosts at a change of membership
    spot_micros_h: int = 0  # the cheapest on offer, or the last known
    on_demand_micros_h: int = 0
    availability: AvailabilityHistory = field(default_factory=AvailabilityHistory)
    tick_s: float = 10.0  # the longest until the next decision; a loss of hosts brings one at once
    boots: int = 0  # the measured ones whose median `boot_s` is; 0: it is assumed


@dataclass(frozen=True)
class MarketTarget:
    """Number of hosts of each market that should exist now; the sum may exceed the target during a replacement."""

    spot: int
    on_demand: int
    why: str  # for people, with the figures that decided
    rule: str = ""  # as in events.PolicyDecided
    again_s: float = math.inf  # decide anew after this time, even if nothing happens
    held: int = 0  # on-demand hosts that would fill in if a job ran or waited
    shun: tuple[str, ...] = ()  # spot pools without new launches, because on demand costs no more
