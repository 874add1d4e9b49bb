"""Fleet and its cloud in one thread, with a clock that tests move: hosts boot, join, receive notices and drain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from spotfleet.fleet.domain.events import Event, TerminateIntended
from spotfleet.fleet.domain.state import FleetState, apply
from spotfleet.fleet.reconcile import Action, Calls, Observed, Wanted, create, tick
from spotfleet.model import BillingRules, CloudState, HostState, Market, Need, Nodes, Notice, Offer, Rates, Role
from spotfleet.providers import Boot, LaunchRequest
from spotfleet.providers.local.inprocess import InProcessProvider, ManualClock
from spotfleet.providers.local.market.pools import LocalPool, MarketRules

GPU = "gpu.small"
RATES = Rates(80_003, 5_003, 20_000, 20_000, "test", "2026-01-01")
POOLS = tuple(f"local/{zone}/{GPU}/spot" for zone in ("a", "b", "c"))


def market_rules(billing: BillingRules | None = None, capacity: int = 2, period_s: int = 900,
                 boot_s: float = 0.0, beside: bool = False) -> MarketRules:
    """Return rules with three spot pools with moving prices, and on-demand; with `beside`, disks and addresses cost."""
    pools = [LocalPool(zone, GPU, Market.SPOT, price, capacity, 2, "EMU", swing_permille=200, period_s=period_s + 7 * i)
             for i, (zone, price) in enumerate([("a", 970_003), ("b", 990_001), ("c", 1_010_007)])]
    full = [LocalPool(zone, GPU, Market.ON_DEMAND, 3_060_000, 9, 2, "EMU") for zone in ("a", "b", "c")]
    rules = MarketRules(tuple(pools + full), billing or BillingRules(), boot_s=boot_s, listed_after_end_s=4 * 86400.0)
    return replace(rules, rates=RATES, disk_gib=100, addresses=1) if beside else rules


class Killed(Exception):
    """Simulated death of the reconciling process."""


@dataclass
class Fuse:
    """Fuse that kills its process before or after the n-th effect: a row written or a call made."""

    left: int | None = None
    after: bool = False

    def light(self, effects: int, after: bool) -> None:
        self.left, self.after = effects, after

    def burn(self, effect: Callable[[], object]) -> object:
        if self.left is None:
            return effect()
        self.left -= 1
        if self.left > 0:
            return effect()
        self.left = None
        if self.after:
            effect()
        raise Killed


class MemoryLedger:
    """Ledger without a disk, otherwise like `ledger.Ledger`; every write is an effect that may kill."""

    def __init__(self, fuse: Fuse | None = None) -> None:
        self.rows: list[Event] = []
        self.fuse = fuse or Fuse()
        self._state = FleetState()

    def append(self, *events: Event) -> int:
        if events:
            self.fuse.burn(lambda: self._write(events))
        return len(self.rows)

    def _write(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self.rows.append(event)
            self._state = apply(self._state, event)

    def state(self) -> FleetState:
        return self._state


class Cloud(InProcessProvider):
    """Emulated cloud; every call that changes it is an effect that may kill its caller."""

    fuse = Fuse()
    answers = True  # False: the cloud does not answer

    def launch(self, request: LaunchRequest) -> None:
        self.fuse.burn(lambda: super(Cloud, self).launch(request))

    def terminate(self, request_id: str) -> None:
        self.fuse.burn(lambda: super(Cloud, self).terminate(request_id))

    def hosts(self, fleet: str):
        if not self.answers:
            raise TimeoutError("no answer within 30 s")
        return super().hosts(fleet)


@dataclass
class World:
    hosts: int = 3
    billing: BillingRules | None = None
    behavior: str = "terminate"
    rules: MarketRules | None = None
    join_s: float = 20.0  # from the start of a run until the agent has joined
    drain_s: float = 10.0  # from draining until no worker is left
    deaf: set[str] = field(default_factory=set)  # hosts whose agents are disconnected
    asked_to_drain: dict[str, str] = field(default_factory=dict)
    settle_until: float = 0.0
    calls: Calls = field(default_factory=Calls)
    skew_s: float = 0.0  # how far the reconciler's clock is off the cloud's
    peak: int = 0
    drains_seen: dict[str, float] = field(default_factory=dict)  # draining hosts -> since when, by the cloud's clock
    cloud_type: type[Cloud] = Cloud
    placement: str = "spread"
    all_or_nothing: bool = False
    on_demand: int = 0  # beside `hosts`, which are spot hosts then

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.fuse = Fuse()
        self.cloud = self.cloud_type(clock=self.clock, rules=self.rules or market_rules(self.billing))
        self.cloud.fuse = self.fuse
        self.market = self.cloud.market
        self.ledger = MemoryLedger(self.fuse)
        create(self.ledger, self.cloud, "f", Nodes(1, self.hosts, 9), self.now)

    @property
    def now(self) -> float:
        """Time of the reconciler's clock."""
        return self.clock() + self.skew_s

    @property
    def state(self) -> FleetState:
        return self.ledger.state()

    def wanted(self) -> Wanted:
        return Wanted("f", Role.WORKER, self.hosts, (Need(accelerator="EMU"),), self.behavior,
                      placement=self.placement, all_or_nothing=self.all_or_nothing, on_demand=self.on_demand)

    def observed(self) -> Observed:
        """Return the agents' reports, from hosts that run and had the time to join."""
        joined, notices = {}, {}
        true = self.clock()
        self.market.advance(true)
        for name, host in self.market.hosts.items():
            up = host.state is CloudState.RUNNING and true - host.since >= self.join_s
            if not up or name in self.deaf:
                continue
            joined[name] = f"{name}/{len(host.runs)}"
            if host.notice is not None:
                notices[name] = Notice(host.notice.ends_at - true, host.notice.action)
            elif host.rebalance_at is not None:
                notices[name] = Notice(0.0, kind="rebalance")
        draining = {h.request_id: h.since - self.skew_s for h in self.state.hosts if h.state is HostState.DRAINING}
        self.drains_seen = {n: self.drains_seen.get(n, since) for n, since in draining.items()}
        released = frozenset(n for n, since in self.drains_seen.items() if true - since >= self.drain_s)
        return Observed(joined, notices, released, dict(self.asked_to_drain),
                        settle_until=self.settle_until + self.skew_s)

    def tick(self, after_s: float = 0.0) -> list[Action]:
        self.clock.advance(after_s)
        try:
            return tick(self.wanted(), self.ledger, self.cloud, boot, self.observed(), self.now, self.calls)
        finally:
            self.peak = max(self.peak, len(self.living()))

    def run(self, seconds: float, every_s: float = 10.0) -> list[Action]:
        """Tick for a while; return the actions of the last tick."""
        last: list[Action] = []
        for _ in range(int(seconds / every_s)):
            last = self.tick(every_s)
        return last

    def up(self) -> list[str]:
        return [h.request_id for h in self.state.hosts if h.state is HostState.UP]

    def living(self) -> list[str]:
        return self.cloud.living()

    def count(self, kind: type) -> int:
        return sum(isinstance(e, kind) for e in self.ledger.rows)

    def pool_of(self, request_id: str) -> str:
        return self.market.hosts[request_id].offer.pool

    def ends_asked(self) -> set[str]:
        return {e.request_id for e in self.ledger.rows if isinstance(e, TerminateIntended)}


def boot(request_id: str, offer: Offer) -> Boot:
    return Boot("spotfleet.agent", {"boot.json": request_id})
