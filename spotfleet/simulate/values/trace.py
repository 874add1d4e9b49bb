"""Record of a spot market over time. Pure values."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Trace:
    """Record of one pool: the number of available spot hosts, and the price of each. Both are step functions of time.

    `capacity` and `prices` are (seconds since the record began, value), ascending, the first at 0; they hold until the
    next, the last until `length_s`. An empty one was not recorded.
    """

    name: str  # shown to users: the file's name, or a pool in it
    length_s: float
    capacity: tuple[tuple[float, int], ...] = ()  # hosts
    prices: tuple[tuple[float, int], ...] = ()  # micro-dollars per host and hour
    on_demand_micros_h: int = 0  # 0: not recorded
    began_at: float = 0.0  # Unix seconds; 0: not recorded
    provider: str = ""
    region: str = ""
    zone: str = ""
    instance_type: str = ""
    accelerator: str = ""

    @cached_property
    def most(self) -> int:
        """Return the largest number of hosts ever available."""
        return max((n for _, n in self.capacity), default=0)

    def price_at(self, at_s: float) -> int:
        place = bisect_right(self.prices, at_s, key=lambda step: step[0])
        return self.prices[max(0, place - 1)][1] if self.prices else 0
