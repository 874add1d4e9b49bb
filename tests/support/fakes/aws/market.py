"""Room, prices and quotas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from tests.support.fakes.aws import catalog
from tests.support.fakes.aws.catalog import TYPES
from tests.support.fakes.aws.errors import AwsError
from tests.support.fakes.aws.state import Machine, RegionState

Pool = tuple[str, str, str]  # zone, type, market


class Market:
    def __init__(self, begin: float) -> None:
        self.begin = begin - 90 * 86400.0  # since when there are prices
        self.rooms: dict[Pool, int] = {}  # free places; a pool that is not in it has endless ones
        self.quotas: dict[tuple[str, str, str], int] = {}
        self.unapplied: set[tuple[str, str]] = set()  # (family, market) of quotas for which AWS lists the default only
        self._prices: dict[tuple[str, str], list[tuple[float, float]]] = {}

    # ---- room

    def room(self, pool: Pool) -> int | None:
        return self.rooms.get(pool)

    def set_room(self, pool: Pool, free: int | None) -> None:
        if free is None:
            self.rooms.pop(pool, None)
        else:
            self.rooms[pool] = free

    def take(self, machine: Machine) -> None:
        if machine.pool in self.rooms:
            self.rooms[machine.pool] -= 1
        machine.room_held = True

    def give_back(self, machine: Machine) -> None:
        if machine.room_held and machine.pool in self.rooms:
            self.rooms[machine.pool] += 1
        machine.room_held = False

    # ---- prices

    def history(self, zone: str, kind: str) -> list[tuple[float, float]]:
        """Spot: (since, USD per hour), oldest first."""
        if (zone, kind) not in self._prices:
            usd = catalog.on_demand_usd(kind, catalog.region_of(zone)) * catalog.SPOT_SHARE[zone[-1]]
            self._prices[zone, kind] = [(self.begin, round(usd, 4))]
        return self._prices[zone, kind]

    def price(self, zone: str, kind: str, at: float) -> float:
        line = self.history(zone, kind)
        return line[max(0, bisect_right(line, (at, float("inf"))) - 1)][1]

    def set_price(self, zone: str, kind: str, usd: float, at: float) -> None:
        line = self.history(zone, kind)
        if line[-1][0] == at:
            line.pop()
        line.append((at, usd))

    # ---- quotas

    def quota(self, region: str, family: str, market: str) -> int:
        return self.quotas.get((region, family, market), catalog.ENDLESS_QUOTA)

    @staticmethod
    def usage(state: RegionState, family: str, market: str) -> int:
        """vCPUs: of spot also those that open requests would take."""

        def counts(kind: str) -> bool:
            return TYPES[kind].family == family

        used = sum(
            m.vcpus
            for m in state.machines.values()
            if m.market == market
            and counts(m.order.type)
            and m.state in ("pending", "running", "stopping", "shutting-down")
        )
        if market == "spot":
            used += sum(
                TYPES[r.order.type].vcpus for r in state.requests.values() if r.state == "open" and counts(r.order.type)
            )
        return used

    def within_quota(self, state: RegionState, kind: str, market: str, count: int, without: Iterable[str] = ()) -> None:
        """AwsError if `count` more of `kind` are too many; requests `without` are not counted."""
        family = TYPES[kind].family
        left = self.quota(state.name, family, market) - self.usage(state, family, market)
        left += sum(
            TYPES[r.order.type].vcpus
            for r in state.requests.values()
            if r.id in without and r.state == "open" and TYPES[r.order.type].family == family
        )
        if TYPES[kind].vcpus * count <= left:
            return
        if market == "spot":
            raise AwsError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
        raise AwsError(
            "VcpuLimitExceeded",
            f"You have requested more vCPU capacity than your current vCPU limit of "
            f"{self.quota(state.name, family, market)} allows for the instance bucket that the specified "
            "instance type belongs to. Please visit http://aws.amazon.com/contact-us/ec2-request to request "
            "an adjustment to this limit.",
        )
