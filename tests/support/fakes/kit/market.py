"""Room, prices and quotas of pools."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

Pool = tuple[str, str, str]  # zone, type, market
DAYS_S = 90 * 86400.0  # since when there are prices


class Pools:
    """`first_usd(zone, type)`: the spot price until a test sets another."""

    def __init__(self, begin: float, first_usd: Callable[[str, str], float], endless: int) -> None:
        self.begin = begin - DAYS_S
        self.rooms: dict[Pool, int] = {}  # free places; a pool that is not in it has endless ones
        self.quotas: dict[tuple[str, str, str], int] = {}  # region, family, market
        self._endless, self._first_usd = endless, first_usd
        self._prices: dict[tuple[str, str], list[tuple[float, float]]] = {}

    # ---- room

    def room(self, pool: Pool) -> int | None:
        return self.rooms.get(pool)

    def set_room(self, pool: Pool, free: int | None) -> None:
        if free is None:
            self.rooms.pop(pool, None)
        else:
            self.rooms[pool] = free

    def holds(self, pool: Pool, count: int = 1) -> bool:
        room = self.room(pool)
        return room is None or room >= count

    def take(self, machine: Any) -> None:
        if machine.pool in self.rooms:
            self.rooms[machine.pool] -= 1
        machine.room_held = True

    def give_back(self, machine: Any) -> None:
        if machine.room_held and machine.pool in self.rooms:
            self.rooms[machine.pool] += 1
        machine.room_held = False

    # ---- prices

    def history(self, zone: str, kind: str) -> list[tuple[float, float]]:
        """Spot: (since, USD per hour), oldest first."""
        if (zone, kind) not in self._prices:
            self._prices[zone, kind] = [(self.begin, self._first_usd(zone, kind))]
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
        return self.quotas.get((region, family, market), self._endless)
