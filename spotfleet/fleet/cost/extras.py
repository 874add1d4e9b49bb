"""Cost of disks, public addresses and traffic between zones, by the rates stamped in the ledger. Pure.

A disk costs from the start of its machine's first run to the machine's end, also while it is stopped; an address costs
while its machine runs. Each begun second counts in full, a short life counts as the provider's minimum, and each host
is rounded once, half up. A rate counts from the instant of its stamp on. Before the first stamp of a region its rates
are unknown, and nothing is billed.

Traffic is an estimate. A bandwidth-optimal ring all-reduce of S bytes among n ranks moves 2 (n-1)/n S over each edge of
the ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). So a step
costs 2 (n-1)/n x `JobProgress.step_bytes` over every edge, in the order of ranks, whose ends are in different zones.
Checkpoints, joins, logs and the traffic of a user's own code are not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from spotfleet.fleet.cost.billing import PARTS, Bill, PriceChangePoint, round_half_up
from spotfleet.fleet.cost.facts import CostHost, CostJob
from spotfleet.fleet.domain.events import GenerationFormed, JobChanged, JobProgress, JobResumed, RatesStamped
from spotfleet.model import BillingRules, Offer, Rates, Run

MONTH_H = 730
GIB = 2**30
SHARDS = 2**20  # shards per byte: the resolution of an edge's part of a step, in whole numbers
NOTHING = Rates()


@dataclass(frozen=True)
class ExtraLine:
    """Cost of one item besides machines."""

    kind: str  # "disk", "address" or "traffic"
    name: str  # the host; the job for traffic
    role: str  # role of the host; "" for traffic
    pool: str  # pool of the host; "" for traffic
    region: str  # PROVIDER/REGION; the sender's for traffic
    detail: str  # "100 GiB", "1 address", "between zones", "between regions"
    quantity: float  # in `unit`
    unit: str  # "GiB-hour", "hour", "GiB"
    micros: int


class RateBook:
    """Rates of every region as step functions of time. Of two stamps at the same instant the last one counts."""

    def __init__(self, stamps: Iterable[RatesStamped]) -> None:
        places: dict[str, dict[float, Rates]] = {}
        for stamp in stamps:
            places.setdefault(f"{stamp.provider}/{stamp.region}", {})[stamp.at] = stamp.rates
        self._steps = {place: sorted(rates.items(), key=lambda step: step[0]) for place, rates in places.items()}

    def at(self, place: str, at: float) -> Rates:
        steps = self._steps.get(place, [])
        first = bisect_right(steps, at, key=lambda step: step[0])
        return steps[first - 1][1] if first else NOTHING

    def history(self, place: str, since: float, price: Callable[[Rates], int]) -> list[PriceChangePoint]:
        """Return `price` of the rates in force at `since`, and of all later rates."""
        first = price(self.at(place, since))
        later = [(at, price(rates)) for at, rates in self._steps.get(place, []) if at > since]
        return [PriceChangePoint(since, first, first), *(PriceChangePoint(at, value, value) for at, value in later)]


@dataclass(frozen=True)
class Metered:
    """Cost of one host for one kind of item: periods of time, each with its price."""

    host: CostHost
    kind: str
    detail: str
    unit: str
    per: int  # parts to a micro-dollar
    bills: tuple[tuple[Bill, int], ...]  # each with its number of units

    def line(self, since: float, until: float) -> ExtraLine | None:
        """Return the line for [since, until); None if nothing fell due."""
        micros, units = 0, 0.0
        before = 0
        for bill, count in self.bills:
            begin, end = bill.due(since), bill.due(until)
            units += (end - begin) * count / 3600
            a, b = bill.parts(begin)[0], bill.parts(end)[0]
            micros += round_half_up(before + b, self.per) - round_half_up(before + a, self.per)
            before += bill.parts(bill.seconds)[0]
        if not micros and not units:
            return None
        host = self.host
        return ExtraLine(self.kind, host.request_id, host.role.value, host.offer.pool, host.region, self.detail, units,
                         self.unit, micros)


def metered(host: CostHost, book: RateBook, rules: BillingRules, now: float) -> Iterator[Metered]:
    """Yield the disks and addresses of a host."""
    if host.disks:
        bills = []
        for disk in host.disks:
            history = book.history(host.region, disk.since, lambda r, gib=disk.gib: r.disk_micros_gib_month * gib)
            bills.append((_bill(disk.since, disk.until, history, rules, now), disk.gib))
        yield Metered(host, "disk", f"{host.disks[-1].gib} GiB", "GiB-hour", PARTS * MONTH_H, tuple(bills))
    if host.addresses:
        count, bills = host.addresses, []
        for run in host.runs:
            history = book.history(host.region, run.started_at, lambda r: r.address_micros_h * count)
            bills.append((_bill(run.started_at, run.ended_at, history, rules, now), count))
        detail = "1 address" if count == 1 else f"{count} addresses"
        yield Metered(host, "address", detail, "hour", PARTS, tuple(bills))


def _bill(since: float, until: float | None, history: list[PriceChangePoint], rules: BillingRules, now: float) -> Bill:
    """Return the bill as for a run that was not taken: the waiver for an early loss of a machine excludes its disk."""
    return Bill(Run(since, until), history, rules, now)


class Crossings:
    """Traffic of steps from one zone to others, as running sums over time."""

    def __init__(self, moved: Iterable[tuple[float, int, int]]) -> None:
        """`moved`: (at, shards, micro-dollars a GiB) of steps made by then."""
        steps = sorted(moved, key=lambda step: step[0])
        self._at = [at for at, _, _ in steps]
        self._moved = [0, *accumulate(shards for _, shards, _ in steps)]
        self._parts = [0, *accumulate(shards * rate for _, shards, rate in steps)]

    def before(self, at: float) -> tuple[int, int]:
        """Return shards, and micro-dollars rounded half up, before `at`."""
        i = len(self._at) if at == math.inf else bisect_left(self._at, at)
        return self._moved[i], round_half_up(self._parts[i], GIB * SHARDS)


def crossings(job: CostJob, hosts: dict[str, CostHost], book: RateBook) -> dict[tuple[str, str], Crossings]:
    """Return (region of the sender, kind) -> crossings of a job's steps, repeated ones too, when they became known."""
    found: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    edges: dict[tuple[str, str], Fraction] = {}
    known = [e.step_bytes for e in job.log if isinstance(e, JobProgress) and e.step_bytes]
    step_bytes, reached = known[0] if known else 0, 0
    for event in job.log:
        if isinstance(event, JobProgress) and event.step_bytes:
            step_bytes = event.step_bytes
        steps = max(0, event.version - reached) + (event.after_pause if isinstance(event, JobResumed) else 0)
        reached = max(reached, event.version)
        for (region, detail), each in edges.items():
            if steps and step_bytes:
                rates = book.at(region, event.at)
                rate = rates.zone_micros_gib if detail == "between zones" else rates.region_micros_gib
                shards = each.numerator * steps * step_bytes * SHARDS // each.denominator
                found.setdefault((region, detail), []).append((event.at, shards, rate))
        if isinstance(event, GenerationFormed):
            edges = _edges([hosts[m.partition("/")[0]].offer for m in event.members if m.partition("/")[0] in hosts])
        elif isinstance(event, JobChanged) and event.state.ended:
            edges = {}
    return {key: Crossings(moved) for key, moved in found.items()}


def _edges(ring: list[Offer]) -> dict[tuple[str, str], Fraction]:
    """Return (region of the sender, kind) -> how often the bytes of a step go from zone to zone, over all edges."""
    found: dict[tuple[str, str], Fraction] = {}
    n = len(ring)
    for sender, receiver in zip(ring, [*ring[1:], *ring[:1]], strict=True):
        here, there = f"{sender.provider}/{sender.region}", f"{receiver.provider}/{receiver.region}"
        if (here, sender.zone) == (there, receiver.zone):
            continue
        key = (here, "between zones" if here == there else "between regions")
        found[key] = found.get(key, Fraction(0)) + Fraction(2 * (n - 1), n)
    return found


def traffic_lines(job: str, found: dict[tuple[str, str], Crossings], since: float, until: float) -> list[ExtraLine]:
    lines = []
    for (region, detail), crossed in found.items():
        (moved, micros), (all_moved, by_then) = crossed.before(since), crossed.before(until)
        if all_moved > moved or by_then > micros:
            gib = (all_moved - moved) / (GIB * SHARDS)
            lines.append(ExtraLine("traffic", job, "", "", region, detail, gib, "GiB", by_then - micros))
    return lines


def half_up(micros: Fraction) -> int:
    return math.floor(micros + Fraction(1, 2))
