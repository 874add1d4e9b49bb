"""What a policy decides from, and what it decides. Pure values; seconds and host-seconds, instants in Unix seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spell:
    """A stretch of time in which spot hosts of the fleet's needs could be had, or could not, as far as was seen."""

    available: bool
    since: float
    until: float


@dataclass(frozen=True)
class Memory:
    """What was seen of availability, the newest last; the present spell is the last one and goes on."""

    spells: tuple[Spell, ...] = ()


@dataclass(frozen=True)
class Moment:
    """What is known at `now`. The future is not."""

    now: float
    hosts: int  # the target: so many may work at once
    spot: int = 0  # spot hosts that exist and do not leave, booting ones included
    spot_ready: int = 0  # of these, those that work already
    on_demand: int = 0
    on_demand_ready: int = 0
    room: int | None = None  # spot hosts that could be launched now besides; 0: none, None: nobody knows
    left_s: float = math.inf  # until the deadline
    work_s: float = math.inf  # host-seconds still to do
    boot_s: float = 180.0  # from a launch until the host works, paid
    stall_s: float = 0.0  # for which all hosts wait at a change of membership
    spot_micros_h: int = 0  # the cheapest on offer, or the last known
    on_demand_micros_h: int = 0
    memory: Memory = field(default_factory=Memory)
    tick_s: float = 10.0  # the longest until the next decision; a loss of hosts brings one at once


@dataclass(frozen=True)
class Choice:
    """How many hosts of either market should exist now; their sum may pass the target while one relieves another."""

    spot: int
    on_demand: int
    why: str  # for people, with the figures that decided
    rule: str = ""  # as in events.PolicyDecided
    again_s: float = math.inf  # decide anew after so long, even if nothing happens
    held: int = 0  # on-demand hosts that would fill in if a job ran or waited
    shun: tuple[str, ...] = ()  # spot pools in which no host is to be launched now: on demand costs no more
