"""Wanted hosts of each market: each kind is filled, replaced and reduced separately. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.fleet.domain.actions import Wanted
from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.domain.state import Host
from spotfleet.fleet.policy.values import MarketTarget
from spotfleet.model import Market, Need


@dataclass(frozen=True)
class MarketShare:
    """Wanted hosts of one kind."""

    wanted: Wanted  # as if there were no others
    markets: tuple[Market, ...]
    called: str  # for people: "hosts", or "spot hosts" where there are others

    def of(self, hosts: Sequence[Host]) -> list[Host]:
        return [h for h in hosts if h.offer.market in self.markets]


def shares(wanted: Wanted) -> tuple[MarketShare, ...]:
    """Return each kind of host and how many there should be.

    A fleet whose needs name both markets, without a number for each, has one kind: the cheaper offer of either market.
    """
    both = (Market.SPOT, Market.ON_DEMAND)
    spot = tuple(n for n in wanted.any_of if n.use_spot)
    mixed = is_mixed(wanted)
    if not spot:
        return (MarketShare(replace(wanted, hosts=wanted.hosts + wanted.on_demand, on_demand=0), both, "hosts"),)
    if len(spot) < len(wanted.any_of) and not mixed:
        return (MarketShare(wanted, both, "hosts"),)
    full = replace(wanted, hosts=wanted.on_demand, on_demand=0, any_of=on_demand_needs(wanted.any_of), apart=mixed)
    return (MarketShare(replace(wanted, any_of=spot, on_demand=0, apart=mixed), (Market.SPOT,),
                        "spot hosts" if mixed else "hosts"),
            MarketShare(full, (Market.ON_DEMAND,), "on-demand hosts"))


def apply_choice(wanted: Wanted, choice: MarketTarget) -> Wanted:
    """Return `wanted` with the policy's division between the markets."""
    return replace(wanted, hosts=choice.spot, on_demand=choice.on_demand, apart=True, shun=choice.shun)


def is_mixed(wanted: Wanted) -> bool:
    return wanted.apart or wanted.on_demand > 0


def on_demand_needs(any_of: Sequence[Need]) -> tuple[Need, ...]:
    """Return needs for the same machines on demand. A limit on the spot price does not apply to them."""
    return tuple(dict.fromkeys(replace(n, use_spot=False, max_micros_h=0) if n.use_spot else n for n in any_of))
