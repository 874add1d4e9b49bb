"""The hosts of either market that are wanted: each kind is filled, replaced and given back by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spotfleet.fleet.actions import Wanted
from spotfleet.fleet.copies import replace
from spotfleet.fleet.fold import Host
from spotfleet.fleet.policy.values import Choice
from spotfleet.model import Market, Need


@dataclass(frozen=True)
class Share:
    """The hosts of one kind."""

    wanted: Wanted  # as if there were no others
    markets: tuple[Market, ...]
    called: str  # for people: "hosts", or "spot hosts" where there are others

    def of(self, hosts: Sequence[Host]) -> list[Host]:
        return [h for h in hosts if h.offer.market in self.markets]


def shares(wanted: Wanted) -> tuple[Share, ...]:
    """Each kind of host and how many there should be. A fleet whose needs name both markets, and that is not told how
    many of each, has one kind: whichever is cheapest."""
    both = (Market.SPOT, Market.ON_DEMAND)
    spot = tuple(n for n in wanted.any_of if n.use_spot)
    mixed = is_mixed(wanted)
    if not spot:
        return (Share(replace(wanted, hosts=wanted.hosts + wanted.on_demand, on_demand=0), both, "hosts"),)
    if len(spot) < len(wanted.any_of) and not mixed:
        return (Share(wanted, both, "hosts"),)
    full = replace(wanted, hosts=wanted.on_demand, on_demand=0, any_of=on_demand_needs(wanted.any_of), apart=mixed)
    return (Share(replace(wanted, any_of=spot, on_demand=0, apart=mixed), (Market.SPOT,),
                  "spot hosts" if mixed else "hosts"),
            Share(full, (Market.ON_DEMAND,), "on-demand hosts"))


def chosen(wanted: Wanted, choice: Choice) -> Wanted:
    """`wanted` as the policy divides it between the markets."""
    return replace(wanted, hosts=choice.spot, on_demand=choice.on_demand, apart=True, shun=choice.shun)


def is_mixed(wanted: Wanted) -> bool:
    return wanted.apart or wanted.on_demand > 0


def on_demand_needs(any_of: Sequence[Need]) -> tuple[Need, ...]:
    """The same machines on demand. A limit on a spot price is none on theirs."""
    return tuple(dict.fromkeys(replace(n, use_spot=False, max_micros_h=0) if n.use_spot else n for n in any_of))
