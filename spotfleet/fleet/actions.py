"""What the planner is asked and what it answers. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotfleet.model import Market, Need, Notice, Offer, Role


@dataclass(frozen=True)
class Wanted:
    """The hosts of one role that should exist. `hosts` and `on_demand` both 0 mean down."""

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
    placement: str = "spread"  # one of model.PLACEMENTS
    all_or_nothing: bool = False  # a fleet without hosts launches all of them in one pool, or none
    on_demand: int = 0  # beside `hosts`, which are of the needs' own markets: so many that meet a need on demand
    apart: bool = False  # `hosts` are spot hosts alone, also where a need is on demand: `on_demand` counts those
    max_micros_h: int = 0  # that all of them may cost, but those that leave; 0: no limit
    shun: tuple[str, ...] = ()  # spot pools in which nothing is to be launched, as on demand costs no more

    @property
    def total(self) -> int:
        return self.hosts + self.on_demand


@dataclass(frozen=True)
class Observed:
    """What the caller sees of the hosts themselves, by request_id."""

    joined: Mapping[str, str] = field(default_factory=dict)  # agents connected and ready -> incarnation
    notices: Mapping[str, Notice] = field(default_factory=dict)
    released: frozenset[str] = frozenset()  # draining hosts that hold no worker any more
    drain: Mapping[str, str] = field(default_factory=dict)  # hosts the user asked to drain -> why
    busy: frozenset[str] = frozenset()  # hosts that hold workers: the last to go when there are too many
    settle_until: float = 0.0  # after the caller's restart: nothing is launched or ended before, unless all joined


@dataclass(frozen=True)
class Launch:
    request_id: str
    offer: Offer
    why: str
    alternatives: tuple[Offer, ...] = ()  # as good as `offer`: a cloud that knows its capacity chooses among all
    together: tuple[str, ...] = ()  # request_ids, this one among them, that are launched all or none


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


def matches(need: Need, offer: Offer) -> bool:
    """Is `offer` what `need` describes, whatever it costs?"""
    market = Market.SPOT if need.use_spot else Market.ON_DEMAND
    return (offer.market is market
            and need.region in ("", offer.region)
            and need.zone in ("", offer.zone)
            and need.instance_type in ("", offer.instance_type)
            and need.accelerator.casefold() in ("", offer.accelerator.casefold())
            and (not need.accelerator_count or (bool(offer.accelerator) and offer.slots == need.accelerator_count)))


def clock(at: float) -> str:
    """12:03:10 UTC"""
    second = int(at) % 86400
    return f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d} UTC"


def dollars(micros_h: int) -> str:
    """$0.123456/h, without superfluous zeros."""
    text = f"{micros_h // 1_000_000}.{micros_h % 1_000_000:06d}"
    whole, _, fraction = text.partition(".")
    return f"${whole}.{fraction.rstrip('0').ljust(2, '0')}/h"


def request_id(wanted: Wanted, number: int) -> str:
    """FLEET-N for a worker host, FLEET-d-N for a dispatcher."""
    return f"{wanted.fleet}-d-{number}" if wanted.role is Role.DISPATCHER else f"{wanted.fleet}-{number}"
