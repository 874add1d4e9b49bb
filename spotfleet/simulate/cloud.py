"""A cloud made of records: it has room for as many spot hosts as a record says, and takes those that are too many.

A Provider in memory, whose time is told to it. When the record shows fewer hosts than are held, those beyond it are
taken at that instant, after a notice. While a notice runs its pool takes no launch that would have to go at once. Which
hosts of a pool go is drawn from their names, so that neither old nor new ones are spared. On demand there is always
room. The cloud writes its own bill (`invoice`), with the arithmetic of the local cloud and none of `fleet/cost.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from spotfleet.errors import NoCapacity
from spotfleet.fleet.actions import matches
from spotfleet.model import BillingRules, CloudHost, CloudState, Market, Need, Offer, PricePoint, Run
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.book import exact
from spotfleet.providers.local.invoice import Invoice, host_micros

NAME = "simulated"
LISTED_S = 30.0  # an ended host is listed for so long


@dataclass(frozen=True)
class SpotPool:
    """What one record says from the window's start on; instants in Unix seconds, ascending, the first before it."""

    offer: Offer  # `price_micros_h` is not looked at
    capacity: tuple[tuple[float, int], ...]  # (from then on, hosts)
    prices: tuple[tuple[float, int], ...]  # (from then on, micro-dollars per hour)

    def room(self, at: float) -> int:
        return self.capacity[max(0, bisect_right(self.capacity, at, key=lambda s: s[0]) - 1)][1]


@dataclass
class Machine:
    request: LaunchRequest
    offer: Offer
    started_at: float
    ended_at: float | None = None
    taken_at: float | None = None  # when the cloud takes it, as told by a notice
    taken: bool = False

    @property
    def line(self) -> CloudHost:
        r = self.request
        state = CloudState.RUNNING if self.ended_at is None else CloudState.TERMINATED
        why = ("taken by the cloud" if self.taken else "ended by its user") if self.ended_at is not None else ""
        return CloudHost(r.request_id, f"m-{r.request_id}", r.fleet, r.role, self.offer, state,
                         (Run(self.started_at, self.ended_at, self.taken),), f"10.0.0.{len(r.request_id)}", 0, why)


@dataclass
class Cloud:
    """See the module. `advance` lets time pass; every other call happens at `now`."""

    pools: Sequence[SpotPool]
    on_demand: Sequence[Offer]
    now: float
    notice_s: float = 120.0
    rules: BillingRules = field(default_factory=BillingRules)
    name: str = NAME

    def __post_init__(self) -> None:
        self.now = exact(self.now)
        self._pools = {p.offer.pool: p for p in self.pools}
        self._held: dict[str, dict[str, Machine]] = {name: {} for name in self._pools}  # live ones, by pool
        self._live: dict[str, Machine] = {}
        self._listed: dict[str, Machine] = {}  # these, and those that ended of late, in the order of their launches
        self._fresh: dict[str, Machine] = {}  # ended, still listed
        self.machines: dict[str, Machine] = {}
        self.changes = 0  # that the cloud itself has made to hosts, notices included
        self.version = 0  # of everything that runs
        self._due = (-1, math.inf)  # as of that version
        self._offers: dict[tuple[str, int], Offer] = {}
        self._sold: tuple[float, tuple[int, ...]] = (-math.inf, ())  # at that instant
        self._price_at = -math.inf
        self._room = (-math.inf, -1, 0)  # at that instant, as of that version

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
        """When something happens to a host that exists; infinite if nothing will."""
        version, due = self._due
        if version != self.version:
            due = min((self._next(pool, held) for pool, held in zip(
                self._pools.values(), self._held.values(), strict=True) if held), default=math.inf)
            self._due = self.version, due
        return due

    def next_change(self) -> float:
        """When the room in some pool changes next."""
        found = math.inf
        for pool in self._pools.values():
            place = bisect_right(pool.capacity, self.now, key=lambda s: s[0])
            if place < len(pool.capacity):
                found = min(found, exact(pool.capacity[place][0]))
        return found

    def next_price(self) -> float:
        """When some spot price changes next."""
        if self.now >= self._price_at:
            later = (bisect_right(p.prices, self.now, key=lambda s: s[0]) for p in self._pools.values())
            self._price_at = min((exact(p.prices[i][0]) for p, i in zip(self._pools.values(), later, strict=True)
                                  if i < len(p.prices)), default=math.inf)
        return self._price_at

    def _next(self, pool: SpotPool, held: dict[str, Machine]) -> float:
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
        """Notices for every fall of capacity that begins within notice of `until`, then the ends that are due."""
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

    def _end(self, machine: Machine, at: float, taken: bool) -> None:
        request_id = machine.request.request_id
        machine.ended_at, machine.taken = at, taken
        self.version += 1
        self._fresh[request_id] = machine
        self._live.pop(request_id)
        self._held.get(machine.offer.pool, {}).pop(request_id, None)

    def live(self) -> dict[str, float]:
        """request_id -> when it was started, of all that run."""
        return {n: m.started_at for n, m in self._live.items()}

    def notices(self) -> dict[str, float]:
        """request_id -> when the cloud takes it, of those that are warned."""
        return {n: m.taken_at for held in self._held.values() for n, m in held.items() if m.taken_at is not None}

    def free(self, name: str) -> int:
        """How many more hosts the pool takes now: none that would have to go within a notice."""
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
        """How many more hosts all pools take now."""
        at, version, room = self._room
        if (at, version) != (self.now, self.version):
            room = sum(self.free(name) for name in self._pools)
            self._room = self.now, self.version, room
        return room

    # ---- Provider

    def check(self) -> None:
        """Always ready."""

    def billing(self) -> BillingRules:
        return self.rules

    def offers(self, need: Need) -> list[Offer]:
        sold = [self._offer(p) for p in self._pools.values()] if need.use_spot else list(self.on_demand)
        return [o for o in sold if matches(need, o) and not 0 < need.max_micros_h < o.price_micros_h]

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
        machine = Machine(request, offer, self.now)
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
        """Nobody here reads tags."""

    def boot_files(self, request_id: str) -> dict[str, str]:
        return dict(self.machines[request_id].request.boot.files)

    def interrupt(self, request_id: str, notice_s: float | None) -> None:
        machine = self._live.get(request_id)
        if machine is not None:
            machine.taken_at = self.now + (notice_s or 0.0)
            self.version += 1

    # ---- money

    def invoice(self) -> Invoice:
        """The cloud's own bill by now."""
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
        """The spot prices of this moment, by pool: while they stay, so do all `offers`."""
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
    """The same machine on demand."""
    return replace(offer, market=Market.ON_DEMAND, price_micros_h=offer.on_demand_micros_h)


def _in_force(name: str, steps: tuple[tuple[float, int], ...], since: float, until: float) -> list[PricePoint]:
    first = max(0, bisect_right(steps, since, key=lambda s: s[0]) - 1)
    return [PricePoint(name, at, micros_h) for at, micros_h in steps[first:] if at <= until]


def _lot(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()
