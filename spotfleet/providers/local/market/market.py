"""The emulated cloud as a state machine: pools, hosts, interruptions and the bill. Pure: `now` is an argument.

    launch --> PENDING --boot_s--> RUNNING --our terminate, power off, or taken--> TERMINATED
                  ^                  | taken, action "stop"                             ^
                  |                  v                                                  |
                  '--capacity or "return"-- STOPPED --our terminate---------------------'

Every operation first advances the time to `now`: deadlines in between take effect at their own
instants, in order, so that a simulation may jump over weeks. Nothing can get stuck: PENDING ends after
`boot_s`, a notice at its deadline (or when withdrawn), the capacity of a taken host returns after `reclaim_s`, and
a STOPPED host waits, unbilled, for room in its pool, for `return_host`, or for our terminate.

Instants are rounded down to 1/1024 s, which makes sums and differences of them exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from spotfleet import model
from spotfleet.codec import from_json, to_json
from spotfleet.errors import NeedsPerson, NoCapacity, UsageError
from spotfleet.model import CloudHost, CloudState, Need, Offer, PricePoint, Rates, Run
from spotfleet.providers.local.market.book import (
    ActiveNotice,
    Book,
    HostOrder,
    LocalHost,
    PoolRefusal,
    WithheldRoom,
    exact,
)
from spotfleet.providers.local.market.invoice import Invoice, address_micros, disk_micros, host_micros
from spotfleet.providers.local.market.pools import PROVIDER, REGION, LocalPool, MarketRules, price_points, satisfies

LIVE = (CloudState.PENDING, CloudState.RUNNING)  # occupy room in their pool
SCOPES = ("pool", "type", "region", "account", "person")
REMEMBERED_S = 120.0  # maximum lag of a listing


def shutting_down(line: CloudHost) -> CloudHost:
    """Return the line of an ended host that still counts as running, as on EC2, though it is no longer billed."""
    runs = (*line.runs[:-1], replace(line.runs[-1], ended_at=None, taken=False))
    return replace(line, state=CloudState.RUNNING, runs=runs, why=f"shutting down: {line.why}", ended_at=None)


class LocalMarket:
    """One emulated cloud. Unknown pools and hosts, and impossible requests, raise UsageError."""

    def __init__(self, rules: MarketRules, now: float, salt: str = "") -> None:
        self.rules = rules
        self.pools: dict[str, LocalPool] = {p.name: p for p in rules.pools}
        self.opened_at = self.now = exact(now)
        self.salt = salt
        self.hosts: dict[str, LocalHost] = {}
        self.capacity = {p.name: p.capacity for p in rules.pools}
        self.scripted: tuple[PricePoint, ...] = ()
        self.reclaimed: tuple[WithheldRoom, ...] = ()
        self.refusals: tuple[PoolRefusal, ...] = ()
        self._past: dict[str, list[tuple[float, LocalHost]]] = {}  # versions by time, for lagging listings

    # offers and prices

    def offers(self, need: Need, now: float) -> list[Offer]:
        """List every offer that satisfies `need`, cheapest first; only a launch shows whether there is room."""
        self.advance(now)
        found = [o for o in map(self._offer, self.rules.pools) if satisfies(o, need)]
        return sorted(found, key=lambda o: (o.price_micros_h, o.pool))

    def prices(self, pools: Sequence[str], since: float, now: float) -> list[PricePoint]:
        self.advance(now)
        points = [p for name in pools for p in self._history(name, since, self.now)]
        return sorted(points, key=lambda p: p.at)

    def set_price(self, pool: str, micros_h: int, now: float, at: float | None = None) -> None:
        """Set the pool's price to `micros_h` from `at` (default: now) on, in place of its schedule.

        If the pool already has a price from now on, which a caller may have read, the new one follows it
        by 1/1024 s: a published history never changes.
        """
        self.advance(now)
        self._pool(pool)
        at = self.now if at is None else exact(at)
        if at < self.now or micros_h < 0:
            raise UsageError(f"at: a price of {micros_h} from {at} would change the past or be negative",
                             hint=f"use a price of 0 or more and a time from {self.now} on")
        if self.hosts and at == self.now and self._history(pool, at, at)[-1].at == at:
            at += 1 / 1024
        self.scripted = (*(p for p in self.scripted if (p.pool, p.at) != (pool, at)), PricePoint(pool, at, micros_h))

    def set_capacity(self, pool: str, hosts: int, now: float) -> None:
        """Set the total capacity, withheld capacity included. Surplus hosts stay: `interrupt` takes them."""
        self.advance(now)
        self.capacity[self._pool(pool).name] = hosts
        self.reclaimed = tuple(r for r in self.reclaimed if r.pool != pool)
        self._return_stopped(self.now)
        self.advance(self.now)

    def refuse(self, pool: str, scope: str, now: float, for_s: float | None = None) -> None:
        """Refuse launches in `pool` and its whole `scope`: "pool", "type" (the same type and market
        in every zone), "region", "account"; or "person": NeedsPerson instead of NoCapacity."""
        self.advance(now)
        self._pool(pool)
        if scope not in SCOPES:
            raise UsageError(f"scope: '{scope}' is none", hint=f"use one of: {', '.join(SCOPES)}")
        self.refusals = (*self.refusals, PoolRefusal(pool, scope, None if for_s is None else self.now + exact(for_s)))

    def allow(self, pool: str, now: float) -> None:
        """Remove every refusal that was made for `pool`."""
        self.advance(now)
        self.refusals = tuple(r for r in self.refusals if r.pool != pool)

    # machines

    def launch(self, order: HostOrder, now: float) -> None:
        """Launch a host. Idempotent under `order.request_id`, also after its end. Raises NoCapacity or NeedsPerson."""
        self.advance(now)
        pool = self._pool(order.pool)
        if order.request_id in self.hosts:
            known = self.hosts[order.request_id].order
            if (known.fleet, known.pool) != (order.fleet, order.pool):
                raise UsageError(f"request_id: '{order.request_id}' was used for {known.pool} of fleet {known.fleet}",
                                 hint="use a new request_id for a different host")
            return
        self._check_refusals(pool)
        if self.free(pool.name) <= 0:
            raise NoCapacity(f"{pool.name}: no room for another host", scope="pool",
                             hint="try another pool, or wait until a host of this one ends")
        digest = blake2b(f"{self.salt}/{order.request_id}".encode(), digest_size=8).hexdigest()
        host = LocalHost(order, f"i-{digest}", self._offer(pool), CloudState.PENDING, self.now, why="launched",
                    disk_gib=self.rules.disk_gib, addresses=self.rules.addresses)
        self._keep(host, self.now)
        self.advance(self.now)

    def terminate(self, request_id: str, now: float) -> None:
        self.advance(now)
        host = self.hosts.get(request_id)
        if host is not None and host.state is not CloudState.TERMINATED:
            self._end(host, CloudState.TERMINATED, self.now, taken=False, why="terminated by its user")

    def tag(self, request_id: str, tags: dict[str, str], now: float) -> None:
        self.advance(now)
        host = self._live(request_id)
        self._keep(replace(host, order=replace(host.order, tags={**host.order.tags, **tags})), self.now)

    def power_off(self, request_id: str, now: float) -> None:
        """End a machine that switched itself off."""
        self.advance(now)
        host = self.hosts.get(request_id)
        if host is not None and host.state is CloudState.RUNNING:
            self._end(host, CloudState.TERMINATED, self.now, taken=False, why="powered off by itself")

    def interrupt(self, request_id: str, notice_s: float | None, now: float, action: str = "") -> None:
        """Take a live host after a notice of `notice_s`, or at once for None; a new notice replaces an old one.

        `action` ("terminate", "stop") overrides the behaviour in its launch order.
        """
        self.advance(now)
        host = self._live(request_id)
        chosen = action or host.order.interruption_behavior
        deadline = self.now + exact(notice_s or 0.0)
        self._keep(replace(host, notice=ActiveNotice(chosen, self.now, deadline)), self.now)
        if notice_s is None:
            self._take(self.hosts[request_id], self.now)
        self.advance(self.now)

    def withdraw_notice(self, request_id: str, now: float) -> None:
        self.advance(now)
        self._keep(replace(self._live(request_id), notice=None), self.now)

    def rebalance(self, request_id: str, now: float) -> None:
        """Send a rebalance recommendation, a hint without an effect."""
        self.advance(now)
        self._keep(replace(self._live(request_id), rebalance_at=self.now), self.now)

    def return_host(self, request_id: str, now: float) -> None:
        """Start a stopped host now, whatever the room in its pool."""
        self.advance(now)
        host = self.hosts.get(request_id)
        if host is None or host.state is not CloudState.STOPPED:
            raise UsageError(f"request_id: '{request_id}' is not a stopped host",
                             hint="stop it first, or look at the listing")
        self._start_again(host, self.now)
        self.advance(self.now)

    def place(self, request_id: str, address: str, port: int) -> None:
        """Record a host's address and port; they are kept through stops."""
        self._keep(replace(self.hosts[request_id], address=address, port=port), self.now)

    # listings and bills

    def listing(self, fleet: str, now: float, lag_s: float = 0.0) -> list[CloudHost]:
        """List the hosts of `fleet` ("": of all) as of `lag_s` (at most 2 minutes) ago; ended ones for a week."""
        self.advance(now)
        seen_at = self.now - min(lag_s, REMEMBERED_S)
        lines = []
        for request_id, host in self.hosts.items():
            if fleet not in ("", host.order.fleet) or self._forgotten(host):
                continue
            versions = [h for at, h in self._past[request_id] if at <= seen_at]
            if versions:
                lines.append(self._shown(versions[-1], seen_at))
        return lines

    def _shown(self, host: LocalHost, at: float) -> CloudHost:
        ended = host.state is CloudState.TERMINATED and bool(host.runs) and not host.runs[-1].taken
        shuts_down = ended and at - host.since < self.rules.shutdown_s
        return shutting_down(host.listed()) if shuts_down else host.listed()

    def invoice(self, now: float, fleet: str = "") -> Invoice:
        """Return the bill so far of `fleet`, or of everything."""
        self.advance(now)
        billed = {name: host for name, host in self.hosts.items() if fleet in ("", host.order.fleet)}
        rates, least_s = self.rules.rates, self.rules.billing.minimum_s
        return Invoice(
            self.now,
            {name: host_micros(host.runs, lambda a, b, p=host.offer.pool: self._history(p, a, b), self.rules.billing,
                               self.now) for name, host in billed.items()},
            {name: disk_micros(self.lives(host), host.disk_gib, rates, least_s, self.now)
             for name, host in billed.items() if host.disk_gib},
            {name: address_micros(host.runs, host.addresses, rates, least_s, self.now)
             for name, host in billed.items() if host.addresses},
        )

    def lives(self, host: LocalHost) -> tuple[Run, ...]:
        """Return the lives of the host's machines, each from first run to end; here there is one machine."""
        return (Run(host.runs[0].started_at, host.ended_at),) if host.runs else ()

    def rates(self) -> Rates:
        return self.rules.rates

    def free(self, pool: str) -> int:
        """Return the pool's free capacity in hosts."""
        live = sum(h.offer.pool == pool and h.state in LIVE for h in self.hosts.values())
        return self.capacity[pool] - live - sum(r.pool == pool for r in self.reclaimed)

    # time

    def advance(self, now: float) -> None:
        """Apply all events due by `now`, each at its own instant. A clock that went back counts as stopped."""
        until = max(exact(now), self.now)
        while (due := min(self._due(), key=lambda d: d[0], default=None)) is not None and due[0] <= until:
            at, what = due
            self.now = max(self.now, at)
            match what:
                case LocalHost(state=CloudState.PENDING) as host if host.notice is None or host.notice.ends_at > at:
                    self._keep(replace(host, state=CloudState.RUNNING, since=at, runs=(*host.runs, Run(at))), at)
                case LocalHost() as host:
                    self._take(host, at)
                case WithheldRoom() as room:
                    self.reclaimed = tuple(r for r in self.reclaimed if r is not room)
                    self._return_stopped(at)
        self.now = until
        self.refusals = tuple(r for r in self.refusals if r.until is None or r.until > until)

    def next_due(self) -> float | None:
        """Return the time of the next automatic event; None if there is none."""
        return min((at for at, _ in self._due()), default=None)

    def _due(self) -> Iterator[tuple[float, LocalHost | WithheldRoom]]:
        for host in self.hosts.values():
            if host.state is CloudState.PENDING:
                yield host.since + exact(self.rules.boot_s), host
            if host.state in LIVE and host.notice is not None:
                yield host.notice.ends_at, host
        for room in self.reclaimed:
            yield room.until, room

    # storage

    def book(self) -> Book:
        return Book(self.rules, self.opened_at, self.now, self.salt, tuple(self.hosts.values()), self.scripted,
                    dict(self.capacity), self.reclaimed, self.refusals)

    @classmethod
    def from_book(cls, book: Book) -> LocalMarket:
        market = cls(book.rules, book.opened_at, book.salt)
        market.now = book.now
        market.hosts = {h.order.request_id: h for h in book.hosts}
        market._past = {request_id: [(host.since, host)] for request_id, host in market.hosts.items()}
        market.capacity |= book.capacity
        market.scripted, market.reclaimed, market.refusals = book.scripted, book.reclaimed, book.refusals
        return market

    def to_json(self) -> dict[str, Any]:
        return to_json(self.book())

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LocalMarket:
        """Restore a market; ValueError names the field for any input but `to_json`'s output."""
        return cls.from_book(from_json(Book, data))

    # helpers

    def _take(self, host: LocalHost, at: float) -> None:
        """End the run for the cloud, which withholds the capacity for a while."""
        stop = host.notice is not None and host.notice.action == "stop"
        warned = host.notice is not None and host.notice.ends_at > host.notice.given_at
        why = f"{'stopped' if stop else 'taken'} by the cloud {'after a' if warned else 'without'} notice"
        self.reclaimed = (*self.reclaimed,
                          WithheldRoom(host.offer.pool, host.order.request_id, at + exact(self.rules.reclaim_s)))
        self._end(host, CloudState.STOPPED if stop else CloudState.TERMINATED, at, taken=True, why=why)

    def _end(self, host: LocalHost, state: CloudState, at: float, taken: bool, why: str) -> None:
        runs = host.runs
        if runs and runs[-1].ended_at is None:
            runs = (*runs[:-1], replace(runs[-1], ended_at=at, taken=taken))
        self._keep(replace(host, state=state, since=at, runs=runs, notice=None, rebalance_at=None, why=why), at)
        self._return_stopped(at)

    def _return_stopped(self, at: float) -> None:
        """Start stopped hosts for which there is room, the longest waiting first."""
        waiting = sorted((h for h in self.hosts.values() if h.state is CloudState.STOPPED), key=lambda h: h.since)
        for host in waiting:
            reclaimed = any(r.request_id == host.order.request_id for r in self.reclaimed)
            if self.free(host.offer.pool) > 0 and not reclaimed:
                self._start_again(host, at)

    def _start_again(self, host: LocalHost, at: float) -> None:
        self.reclaimed = tuple(r for r in self.reclaimed if r.request_id != host.order.request_id)
        self._keep(replace(host, state=CloudState.PENDING, since=at, why="started again by the cloud"), at)

    def _keep(self, host: LocalHost, at: float) -> None:
        request_id = host.order.request_id
        self.hosts[request_id] = host
        past = self._past.setdefault(request_id, [])
        past.append((at, host))
        while len(past) > 1 and past[1][0] <= at - REMEMBERED_S:
            past.pop(0)

    def _check_refusals(self, pool: LocalPool) -> None:
        for refusal in self.refusals:
            other = self.pools[refusal.pool]
            same_type = (other.instance_type, other.market) == (pool.instance_type, pool.market)
            if refusal.scope == "person":
                raise NeedsPerson(f"{pool.name}: the account may not launch this", hint="raise the quota")
            if refusal.scope in ("region", "account") or other is pool or (refusal.scope == "type" and same_type):
                raise NoCapacity(f"{pool.name}: no capacity in this {refusal.scope}", scope=refusal.scope,
                                 hint=f"try another {refusal.scope}, or later")

    def _offer(self, pool: LocalPool) -> Offer:
        on_demand = replace(pool, market=model.Market.ON_DEMAND).name
        price = self._history(pool.name, self.now, self.now)[-1].micros_h
        full = self._history(on_demand, self.now, self.now)[-1].micros_h if on_demand in self.pools else price
        return Offer(PROVIDER, REGION, pool.zone, pool.instance_type, pool.market, pool.slots, price, full,
                     pool.accelerator)

    def _history(self, pool: str, since: float, until: float) -> list[PricePoint]:
        return price_points(self._pool(pool), self.rules.seed, self.scripted, self.opened_at, since, until)

    def _pool(self, name: str) -> LocalPool:
        if name not in self.pools:
            raise UsageError(f"pool: unknown pool '{name}'", hint=f"use one of: {', '.join(sorted(self.pools))}")
        return self.pools[name]

    def _live(self, request_id: str) -> LocalHost:
        host = self.hosts.get(request_id)
        if host is None or host.state not in LIVE:
            raise UsageError(f"request_id: no live host '{request_id}'",
                             hint="`spotfleet status` lists the live hosts")
        return host

    def _forgotten(self, host: LocalHost) -> bool:
        return host.state is CloudState.TERMINATED and self.now - host.since > self.rules.listed_after_end_s

