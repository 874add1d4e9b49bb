"""Cloud made of records: its spot capacity follows the records, and it takes surplus hosts.

It is a Provider in memory under a virtual clock. When the record shows fewer hosts than are held, the surplus is taken
at that instant, after a notice. While a notice runs, its pool accepts no launch of a host that would be taken at once.
The hosts of a pool that are taken are drawn from their names, so that neither old nor new ones are spared. On demand
there is always room. The cloud writes its own bill (`invoice`), with the arithmetic of the local cloud and none of
`fleet/cost/meter.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from spotfleet.errors import NoCapacity
from spotfleet.matching import meets
from spotfleet.model import BillingRules, CloudHost, CloudState, Market, Need, Offer, PricePoint, Run
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.market.book import exact
from spotfleet.providers.local.market.invoice import Invoice, host_micros

NAME = "simulated"
LISTED_S = 30.0  # an ended host is listed for this long


@dataclass(frozen=True)
class SpotPool:
    """Spot pool of one record from the window's start on; instants in Unix seconds, ascending, the first before the
    start."""

    offer: Offer  # `price_micros_h` is not used
    capacity: tuple[tuple[float, int], ...]  # (from then on, hosts)
    prices: tuple[tuple[float, int], ...]  # (from then on, micro-dollars per hour)

    def room(self, at: float) -> int:
        return self.capacity[max(0, bisect_right(self.capacity, at, key=lambda s: s[0]) - 1)][1]


@dataclass
class SimulatedMachine:
    request: LaunchRequest
    offer: Offer
    started_at: float
    ended_at: float | None = None
    taken_at: float | None = None  # instant at which the cloud takes it, as given in a notice
    taken: bool = False

    @property
    def line(self) -> CloudHost:
        r = self.request
        state = CloudState.RUNNING if self.ended_at is None else CloudState.TERMINATED
        why = ("taken by the cloud" if self.taken else "ended by its user") if self.ended_at is not None else ""
        return CloudHost(r.request_id, f"m-{r.request_id}", r.fleet, r.role, self.offer, state,
                         (Run(self.started_at, self.ended_at, self.taken),), f"10.0.0.{len(r.request_id)}", 0, why)


@dataclass
class SimulatedCloud:
    """Simulated provider (see the module). `advance` moves time; every other call happens at `now`."""

    pools: Sequence[SpotPool]
    on_demand: Sequence[Offer]
    now: float
    notice_s: float = 120.0
    rules: BillingRules = field(default_factory=BillingRules)
    name: str = NAME

    def __post_init__(self) -> None:
        self.now = exact(self.now)
        self._pools = {p.offer.pool: p for p in self.pools}
        self._held: dict[str, dict[str, SimulatedMachine]] = {name: {} for name in self._pools}  # live ones, by pool
        self._live: dict[str, SimulatedMachine] = {}
        # live ones, and recently ended ones, in the order of their launches
        self._listed: dict[str, SimulatedMachine] = {}
        self._fresh: dict[str, SimulatedMachine] = {}  # ended, still listed
        self.machines: dict[str, SimulatedMachine] = {}
        self.changes = 0  # changes by the cloud itself to hosts, notices included
        self.version = 0  # increases with every change of the running machines
        self._due = (-1, math.inf)  # valid for that version
        self._offers: dict[tuple[str, int], Offer] = {}
        self._sold: tuple[float, tuple[int, ...]] = (-math.inf, ())  # valid at that instant
        self._price_at = -math.inf
        self._room = (-math.inf, -1, 0)  # valid at that instant and for that version

    # ---- time

    def advance(self, now: float) -> None:
        """Give the notices and take the hosts that are due by `now`, each at its own instant."""
        until = max(exact(now), self.now)
        if until >= self.next_due():
            for name, pool in self._pools.items():
                self._take(name, pool, until)
        self.now = until
        for name in [n for n, m in self._fresh.items() if until - (m.ended_at or 0.0) >= LISTED_S]:
            del self._fresh[name], self._listed[name]

    def next_due(self) -> float:
        """Return the next instant at which a host changes; infinite if none will."""
        version, due = self._due
        if version != self.version:
            due = min((self._next(pool, held) for pool, held in zip(
                self._pools.values(), self._held.values(), strict=True) if held), default=math.inf)
            self._due = self.version, due
        return due

    def next_change(self) -> float:
        """Return the next instant at which the room in some pool changes."""
        found = math.inf
        for pool in self._pools.values():
            place = bisect_right(pool.capacity, self.now, key=lambda s: s[0])
            if place < len(pool.capacity):
                found = min(found, exact(pool.capacity[place][0]))
        return found

    def next_price(self) -> float:
        """Return the next instant at which some spot price changes."""
        if self.now >= self._price_at:
            later = (bisect_right(p.prices, self.now, key=lambda s: s[0]) for p in self._pools.values())
            self._price_at = min((exact(p.prices[i][0]) for p, i in zip(self._pools.values(), later, strict=True)
                                  if i < len(p.prices)), default=math.inf)
        return self._price_at

    def _next(self, pool: SpotPool, held: dict[str, SimulatedMachine]) -> float:
        due = min((m.taken_at for m in held.values() if m.taken_at is not None), default=math.inf)
        staying = sum(m.taken_at is None for m in held.values())
        place = bisect_right(pool.capacity, self.now, key=lambda s: s[0])
        while place < len(pool.capacity) and staying:
            at, room = pool.capacity[place]
            if room < staying:
                return min(due, max(exact(at) - self.notice_s, self.now))
            place += 1
        return due

    def _take(self, name: str, pool: SpotPool, until: float) -> None:
        """Give notices for every fall of capacity that begins within the notice time of `until`; then end the hosts
        that are due."""
        held = self._held[name]
        first = bisect_right(pool.capacity, self.now, key=lambda s: s[0])
        for at, room in pool.capacity[first:] if held else ():
            if exact(at) - self.notice_s > until:
                break
            staying = sorted((m for m in held.values() if m.taken_at is None),
                             key=lambda m: _lot(m.request.request_id))
            for machine in staying[:max(0, len(staying) - room)]:
                machine.taken_at = exact(at)
                self.changes += 1
                self.version += 1
        for machine in [m for m in held.values() if m.taken_at is not None and m.taken_at <= until]:
            assert machine.taken_at is not None
            self._end(machine, machine.taken_at, taken=True)
            self.changes += 1

    def _end(self, machine: SimulatedMachine, at: float, taken: bool) -> None:
        request_id = machine.request.request_id
        machine.ended_at, machine.taken = at, taken
        self.version += 1
        self._fresh[request_id] = machine
        self._live.pop(request_id)
        self._held.get(machine.offer.pool, {}).pop(request_id, None)

    def live(self) -> dict[str, float]:
        """Map request_id to start time, of all running hosts."""
        return {n: m.started_at for n, m in self._live.items()}

    def notices(self) -> dict[str, float]:
        """Map request_id to the instant at which the cloud takes the host, of all hosts with a notice."""
        return {n: m.taken_at for held in self._held.values() for n, m in held.items() if m.taken_at is not None}

    def free(self, name: str) -> int:
        """Return how many more hosts the pool accepts now: none that would be taken within a notice."""
        pool = self._pools[name]
        place = max(0, bisect_right(pool.capacity, self.now, key=lambda s: s[0]) - 1)
        room = pool.capacity[place][1]
        for at, later in pool.capacity[place + 1:]:
            if at > self.now + self.notice_s:
                break
            room = min(room, later)
        staying = sum(m.taken_at is None for m in self._held[name].values())
        return max(0, room - staying)

    def room(self) -> int:
        """Return how many more hosts all pools accept now."""
        at, version, room = self._room
        if (at, version) != (self.now, self.version):
            room = sum(self.free(name) for name in self._pools)
            self._room = self.now, self.version, room
        return room

    # ---- Provider

    def check(self) -> None:
        """Do nothing: the provider is always ready."""

    def billing(self) -> BillingRules:
        return self.rules

    def offers(self, need: Need) -> list[Offer]:
        sold = [self._offer(p) for p in self._pools.values()] if need.use_spot else list(self.on_demand)
        return [o for o in sold if meets(need, o)]

    def prices(self, pools: Sequence[str], since: float) -> list[PricePoint]:
        points = []
        for name in pools:
            points += _in_force(name, self._steps(name), since, self.now)
        return sorted(points, key=lambda p: p.at)

    def launch(self, request: LaunchRequest) -> None:
        if request.request_id in self.machines:
            return
        name = request.offer.pool
        if name in self._pools:
            if not self.free(name):
                raise NoCapacity(f"{name}: no capacity in this pool", hint="try another pool, or later")
            offer = self._offer(self._pools[name])
        else:
            offer = request.offer
        machine = SimulatedMachine(request, offer, self.now)
        for those in (self.machines, self._listed, self._live):
            those[request.request_id] = machine
        self.version += 1
        if name in self._held:
            self._held[name][request.request_id] = machine

    def hosts(self, fleet: str) -> list[CloudHost]:
        return [m.line for m in self._listed.values()]

    def terminate(self, request_id: str) -> None:
        machine = self._live.get(request_id)
        if machine is not None:
            self._end(machine, self.now, taken=False)

    def tag(self, request_id: str, tags: dict[str, str]) -> None:
        """Do nothing: simulated hosts read no tags."""

    def boot_files(self, request_id: str) -> dict[str, str]:
        return dict(self.machines[request_id].request.boot.files)

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        machine = self._live.get(request_id)
        if machine is not None:
            machine.taken_at = self.now + (notice_s or 0.0)
            self.version += 1

    # ---- money

    def invoice(self) -> Invoice:
        """Return the cloud's own bill by now."""
        return Invoice(self.now, {
            name: host_micros([Run(m.started_at, m.ended_at, m.taken)],
                              lambda a, b, pool=m.offer.pool: _in_force(pool, self._steps(pool), a, b),
                              self.rules, self.now)
            for name, m in self.machines.items()})

    def _steps(self, name: str) -> tuple[tuple[float, int], ...]:
        if name in self._pools:
            return self._pools[name].prices
        offer = next(o for o in self.on_demand if o.pool == name)
        return ((0.0, offer.price_micros_h),)

    def sold(self) -> tuple[int, ...]:
        """Return the present spot prices, by pool: while they stay, so do all `offers`."""
        if self._sold[0] != self.now:
            self._sold = self.now, tuple(self._price(p) for p in self._pools.values())
        return self._sold[1]

    def _price(self, pool: SpotPool) -> int:
        return pool.prices[max(0, bisect_right(pool.prices, self.now, key=lambda s: s[0]) - 1)][1]

    def _offer(self, pool: SpotPool) -> Offer:
        price = self._price(pool)
        key = (pool.offer.pool, price)
        if key not in self._offers:
            self._offers[key] = replace(pool.offer, price_micros_h=price)
        return self._offers[key]


def on_demand_like(offer: Offer) -> Offer:
    """Return an offer of the same machine on demand."""
    return replace(offer, market=Market.ON_DEMAND, price_micros_h=offer.on_demand_micros_h)


def _in_force(name: str, steps: tuple[tuple[float, int], ...], since: float, until: float) -> list[PricePoint]:
    first = max(0, bisect_right(steps, since, key=lambda s: s[0]) - 1)
    return [PricePoint(name, at, micros_h) for at, micros_h in steps[first:] if at <= until]


def _lot(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()
