"""Made-up records and small simulations of them."""

from __future__ import annotations

from spotfleet.model import Need, PolicySpec
from spotfleet.simulate.run import PricedTrace, SimulationPlan
from spotfleet.simulate.tariff import Tariff
from spotfleet.simulate.values.trace import Trace
from spotfleet.simulate.world.world import Setting

HOUR = 3600.0


def trace(*capacity: tuple[float, int], hours: float = 24.0, name: str = "t", **more) -> Trace:
    """`capacity`: (hour, hosts)."""
    return Trace(name, hours * HOUR, tuple((at * HOUR, n) for at, n in capacity), **more)


def record(*capacity: tuple[float, int], hours: float = 24.0, name: str = "t",
           prices: tuple[tuple[float, int], ...] = ((0.0, 1_000_000),), **more) -> PricedTrace:
    """Hosts cost $1 an hour on spot, $3 on demand. `prices`: (hour, micro-dollars)."""
    steps = tuple((at * HOUR, micros) for at, micros in prices)
    return PricedTrace(trace(*capacity, hours=hours, name=name, **more), Tariff("host", steps, 3_000_000, "the test"))


def plan(hosts: int = 1, work_h: float = 4.0, deadline_h: float = 8.0, boot_s: float = 180.0, **more) -> SimulationPlan:
    policy = more.pop("policy", PolicySpec("auto", deadline_s=deadline_h * HOUR))
    setting = Setting("f", (Need(),), hosts, boot_s, policy=policy)
    return SimulationPlan(setting, work_h * HOUR, deadline_h * HOUR, **more)
