"""The planner's random histories for a fleet of two groups, which share its hosts half and half.

What must hold besides `planner_history.py`: each group counts no more hosts of either market than its half; each host
is in the group that its name has, also after any fault; at the end each group has just its half.
"""

from __future__ import annotations

from dataclasses import replace

from spotfleet.fleet.domain.actions import Wanted, group_of
from spotfleet.model import Market
from tests.support.fleet.fleet_world import World
from tests.support.fleet.planner_history import PlannerSim


def halves(number: int) -> dict[str, int]:
    return {"one": number // 2, "two": number - number // 2}


class GroupedWorld(World):
    def wanted(self) -> Wanted:
        whole = super().wanted()
        if not whole.total:
            return whole
        spot, full = halves(whole.hosts), halves(whole.on_demand)
        return replace(whole, stays=True, parts=tuple(
            replace(whole, stays=True, hosts=spot[name], on_demand=full[name], group=name) for name in spot))


class GroupedSim(PlannerSim):
    world_type = GroupedWorld

    def check_numbers(self, lagged: bool) -> None:
        super().check_numbers(lagged)
        for market, wanted in ((Market.SPOT, self.world.hosts), (Market.ON_DEMAND, self.world.on_demand)):
            for group, most in halves(wanted).items():
                counting = [h.request_id for h in self.world.state.hosts
                            if h.counts and h.offer.market is market and h.group == group]
                assert len(counting) <= most, f"{counting} where {most} {market.value} hosts of {group} are wanted"

    def check_known(self) -> None:
        super().check_known()
        for host in self.world.state.hosts:
            assert host.group == group_of("f", host.request_id) != "", f"{host.request_id} is in group {host.group!r}"

    def check_bill(self) -> None:
        """Called at the end, too, when all is well: then each group has its half."""
        super().check_bill()
        both = halves(self.world.hosts), halves(self.world.on_demand)
        have = {name: sum(h.group == name for h in self.world.state.hosts) for name in both[0]}
        assert have == {name: both[0][name] + both[1][name] for name in have}
