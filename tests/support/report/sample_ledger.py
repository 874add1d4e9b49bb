"""A fleet's ledger of two and a half days, made up but complete: two spot pools with moving prices, a machine on
demand meanwhile, interruptions, two jobs, disks, addresses and traffic. Names are hostile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotfleet.fleet.cost.groups import FleetLedgers
from spotfleet.fleet.domain.events import (
    Event,
    FleetCreated,
    FleetDown,
    GenerationFormed,
    HostJoined,
    HostListed,
    HostNoticed,
    JobChanged,
    JobProgress,
    JobResumed,
    JobSubmitted,
    LaunchIntended,
    PriceChanged,
    RatesStamped,
)
from spotfleet.model import BillingRules, CloudState, JobState, Market, Nodes, Offer, Rates, Role, Run

BEGIN = 1_793_870_000.0  # 5 November 2026, 07:53:20 UTC
HOUR = 3600.0
HOSTILE = '</script><script src="https://collector.invalid/x.js"></script><img src=//collector.invalid/i>'
RATES = Rates(80_000, 5_000, 20_000, 20_000, source="made up", as_of="2026-11-01")


def offer(zone: str, market: Market = Market.SPOT, kind: str = "g5.12xlarge") -> Offer:
    price = {"a": 1_950_000, "b": 2_210_000}[zone[-1]] if market is Market.SPOT else 5_672_000
    return Offer("aws", "us-east-1", f"us-east-1{zone[-1]}", kind, market, 4, price, 5_672_000, "A10G")


WATCHER = Offer("aws", "us-east-1", "us-east-1a", "t3.small", Market.ON_DEMAND, 0, 20_800, 20_800)


@dataclass(frozen=True)
class Life:
    name: str
    offer: Offer
    since_h: float
    until_h: float | None
    taken: bool = False


LIVES = (
    Life("f-0", offer("a"), 0.05, 21.4, taken=True), Life("f-1", offer("b"), 0.05, None),
    Life("f-2", offer("a"), 0.05, 21.42, taken=True), Life("f-3", offer("b"), 0.06, 38.2, taken=True),
    Life("f-4", offer("b"), 21.5, None), Life("f-5", offer("a", Market.ON_DEMAND), 21.6, 29.0),
    Life("f-6", offer("a"), 28.7, 47.3, taken=True), Life("f-7", offer("a"), 38.3, None),
    Life("f-8", offer("b"), 47.4, None),
)
JOINS_H = 0.06  # after a start: a boot of three and a half minutes
END_H = 60.0


def ledger(*, down: bool = True) -> list[Event]:
    """As a dispatcher writes it."""
    end = BEGIN + END_H * HOUR
    events: list[Event] = [FleetCreated(BEGIN, "vision-large", "aws", Nodes(1, 4, 6), BillingRules()),
                           RatesStamped(BEGIN, "aws", "us-east-1", RATES)]
    events += _host(Life("f-d-0", WATCHER, 0.0, END_H if down else None), Role.DISPATCHER)
    for life in LIVES:
        events += _host(Life(life.name, life.offer, life.since_h, END_H if down and life.until_h is None else
                             life.until_h, life.taken), Role.WORKER)
    events += [*_prices(), *_jobs(down)]
    if down:
        events.append(FleetDown(end, "asked by `down`"))
    return sorted(events, key=lambda e: e.at)


def books(*, down: bool = True, fleet: str = "vision-large") -> FleetLedgers:
    return FleetLedgers(fleet, tuple(ledger(down=down)), BEGIN + END_H * HOUR, living=not down, provider="aws")


def _host(life: Life, role: Role) -> Iterator[Event]:
    since = BEGIN + life.since_h * HOUR
    until = None if life.until_h is None else BEGIN + life.until_h * HOUR
    yield LaunchIntended(since - 4, life.name, role, life.offer, "1 of 4 hosts")
    yield HostListed(since, life.name, f"i-{life.name}", CloudState.RUNNING, (Run(since),), disk_gib=100, addresses=1)
    if role is Role.WORKER:
        yield HostJoined(since + JOINS_H * HOUR, life.name, "1")
    if until is not None:
        if life.taken:
            yield HostNoticed(until - 120, life.name, 120.0, "terminate")
        yield HostListed(until, life.name, f"i-{life.name}", CloudState.TERMINATED, (Run(since, until, life.taken),),
                         disk_gib=100, addresses=1)


def _prices() -> Iterator[Event]:
    for i in range(int(END_H)):
        yield PriceChanged(BEGIN + i * HOUR, offer("a").pool, 1_950_000 + 37_000 * (i * 7 % 11) + 12_000 * i, 5_672_000)
        if i % 3 == 0:
            yield PriceChanged(BEGIN + i * HOUR, offer("b").pool, 2_210_000 - 21_000 * (i * 5 % 13), 5_672_000)


def _jobs(down: bool) -> Iterator[Event]:
    yield from _job("job-1", "resnet", 0.3, 46.0, 46.0)
    yield from _job("job-2", HOSTILE, 46.5, END_H - 0.1, END_H - 0.1 if down else None)


def _job(job: str, name: str, since_h: float, until_h: float, ended_h: float | None) -> Iterator[Event]:
    yield JobSubmitted(BEGIN + since_h * HOUR, job, name, "train.py", 1, 24)
    changes = sorted({since_h, *(at for life in LIVES for at in (life.since_h + JOINS_H, life.until_h)
                                 if at is not None and since_h < at < until_h)})
    for number, at_h in enumerate(changes, 1):
        at, version = BEGIN + at_h * HOUR, _steps(at_h - since_h)
        there = [x.name for x in LIVES if x.since_h + JOINS_H <= at_h and (x.until_h is None or at_h < x.until_h)]
        lost = any(x.until_h == at_h and x.taken for x in LIVES)
        yield GenerationFormed(at, job, number, tuple(f"{h}/{slot}/1" for h in there for slot in range(4)),
                               "death" if lost else "join", "", version)
        if number > 1:
            yield JobResumed(at + 1, job, number, version, int(lost), 0.9 if lost else 0.2)
    for i in range(int((until_h - since_h) * 4)):
        at_h = since_h + (i + 1) / 4
        yield JobProgress(BEGIN + at_h * HOUR, job, _steps(at_h - since_h), 0.42, 900_000)
    if ended_h is not None:
        yield JobChanged(BEGIN + ended_h * HOUR, job, JobState.SUCCEEDED, "all workers are done",
                         _steps(ended_h - since_h))


def _steps(hours: float) -> int:
    return int(hours * HOUR / 0.42)


def nothing() -> FleetLedgers:
    """Of a fleet that was just made."""
    return FleetLedgers("new", (FleetCreated(BEGIN, "new", "aws", Nodes(), BillingRules()),), BEGIN + 60, living=True)
