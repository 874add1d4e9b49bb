"""Cost of a strategy on a piece of a record: small worlds, fast enough for thousands of pieces.

The product's own planner is not part of them (`simulate` has it). They compare strategies under definitions that other
work uses too. Time is in seconds since the piece's start, money in micro-dollars (floats here: this is no bill).

    alone       one host at a time; a change of host costs `changeover_s`, paid, without progress
    together    N hosts; a new one boots, paid, and every change of membership stalls all of them

A strategy is called when something changed (capacity, a host that became ready) and after `Choice.again_s`. It knows
only the past, and of that only what its own memory kept since the piece's start.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spotfleet.fleet.domain.availability import AvailabilityHistory, is_available
from spotfleet.fleet.policy.values import DecisionInput
from spotfleet.simulate.strategies.strategy import Choose
from spotfleet.simulate.values.trace import Trace

HOUR_S = 3600.0
EPSILON_S = 1e-6
ASK_S = 60.0  # `DecisionInput.tick_s` in `alone`; a strategy that requests an earlier call gets it
# shortest interval between two calls in `alone`: the last moment that keeps a deadline is no whole second
SOONEST_S = 1e-4

Observe = Callable[[AvailabilityHistory, float, bool], AvailabilityHistory]


@dataclass(frozen=True)
class Task:
    """Work with a deadline, and the hosts' prices in millionths of a dollar per hour."""

    work_s: float  # work of each host, if all of them work all the time
    deadline_s: float
    changeover_s: float = 180.0  # boot of a new host, paid, without progress
    stall_s: float = 0.0  # pause of all hosts at a change of membership (only in `together`)
    hosts: int = 1
    spot_micros_h: int = 973_100
    on_demand_micros_h: int = 3_060_000
    tick_s: float = 60.0  # `together` decides at multiples of it


@dataclass(frozen=True)
class Outcome:
    """Result of one piece. `*_s` are host-seconds; `spot_s` and `on_demand_s` are paid, and include the useful ones."""

    spot_s: float = 0.0
    on_demand_s: float = 0.0
    useful_spot_s: float = 0.0
    useful_on_demand_s: float = 0.0
    changes: int = 0  # hosts changed (`alone`), changes of membership (`together`)
    done_s: float = math.inf  # instant at which the work was done

    def micros(self, task: Task) -> float:
        return (self.spot_s * task.spot_micros_h + self.on_demand_s * task.on_demand_micros_h) / HOUR_S

    def cost_percent(self, task: Task) -> float:
        """Return the cost in % of the work's price on demand, without any changeover."""
        return 100.0 * self.micros(task) * HOUR_S / (task.hosts * task.work_s * task.on_demand_micros_h)

    def missed(self, task: Task) -> bool:
        return self.done_s > task.deadline_s + 1e-3


@dataclass(frozen=True)
class Piece:
    """Capacity from a start on: `changes` are (seconds since the start, available spot hosts)."""

    changes: tuple[tuple[float, int], ...]
    length_s: float

    def at(self, at_s: float) -> int:
        return self.changes[max(0, bisect_right(self.changes, at_s, key=lambda c: c[0]) - 1)][1]

    def lowest(self, hosts: int) -> Piece:
        """Return the same piece for an all-or-nothing gang of `hosts`, which counts as one host for its strategy."""
        return Piece(_merged((at, int(n >= hosts)) for at, n in self.changes), self.length_s)


def pieces(trace: Trace, length_s: float, every_s: float = 4 * HOUR_S) -> Iterator[Piece]:
    """Yield the pieces that lie wholly in the record, one from each multiple of `every_s`."""
    steps = _merged(iter(trace.capacity))
    for k in range(max(0, math.floor((trace.length_s - length_s + EPSILON_S) / every_s) + 1)):
        start = k * every_s
        first = max(0, bisect_right(steps, start, key=lambda s: s[0]) - 1)
        last = bisect_right(steps, start + length_s - EPSILON_S, key=lambda s: s[0])
        yield Piece(tuple((max(0.0, at - start), n) for at, n in steps[first:last]), length_s)


def _merged(steps: Iterator[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    found: list[tuple[float, int]] = []
    for at, n in steps:
        if not found or found[-1][1] != n:
            found.append((at, n))
    return tuple(found)


def forget(availability: AvailabilityHistory, now: float, available: bool) -> AvailabilityHistory:
    """Keep no memory, for strategies that decide from the present alone."""
    return availability


def alone(piece: Piece, task: Task, choose: Choose, observe: Observe = forget) -> Outcome:
    """Run one host through `piece`, whose capacity is taken as some or none.

    A choice of both markets means spot if available, else on demand: there are never two hosts at once. So the strategy
    gets a boot time of zero and a stall of `changeover_s`. A new host works after `changeover_s`, also if the previous
    one did not work yet. If spot is unavailable, a choice of spot alone means to wait. A strategy that is still not
    done at twice the deadline is stopped there.
    """
    now, left, host, pending = 0.0, task.work_s, "", 0.0  # the host's market, and the rest of its changeover
    paid, useful = {"spot": 0.0, "demand": 0.0}, {"spot": 0.0, "demand": 0.0}
    changes, availability, step, last = 0, AvailabilityHistory(), 0, len(piece.changes) - 1
    while left > EPSILON_S and now < 2 * task.deadline_s:
        while step < last and piece.changes[step + 1][0] <= now + EPSILON_S:
            step += 1
        some = piece.changes[step][1] > 0
        if host == "spot" and not some:
            host = ""
        availability = observe(availability, now, some)
        spot, ready = host == "spot", pending <= EPSILON_S
        choice = choose(DecisionInput(now, 1, int(spot), int(spot and ready), int(host == "demand"),
                               int(host == "demand" and ready), int(some and not spot), task.deadline_s - now, left,
                               0.0, task.changeover_s, task.spot_micros_h, task.on_demand_micros_h, availability,
                               ASK_S))
        wanted = "spot" if choice.spot > 0 and some else "demand" if choice.on_demand > 0 else ""
        if wanted != host:
            host, pending = wanted, task.changeover_s if wanted else 0.0
            changes += bool(wanted)
        until = min(now + max(choice.again_s, SOONEST_S), 2 * task.deadline_s)
        if step < last:
            until = min(until, piece.changes[step + 1][0])
        if host:
            until = min(until, now + pending if pending > EPSILON_S else now + left)
            paid[host] += until - now
            worked = max(0.0, until - now - pending)
            useful[host] += worked
            left, pending = left - worked, max(0.0, pending - (until - now))
        now = until
    return Outcome(paid["spot"], paid["demand"], useful["spot"], useful["demand"], changes,
                   now if left <= EPSILON_S else math.inf)


class _Hosts:
    """Hosts of one market, in cohorts of (ready time, count), oldest first."""

    def __init__(self) -> None:
        self.cohorts: list[list[float]] = []

    def count(self) -> int:
        return int(sum(n for _, n in self.cohorts))

    def ready(self, now: float) -> int:
        return int(sum(n for at, n in self.cohorts if at <= now + EPSILON_S))

    def next_ready(self, now: float) -> float:
        return min((at for at, _ in self.cohorts if at > now + EPSILON_S), default=math.inf)

    def keep(self, most: int) -> None:
        """Remove the youngest hosts beyond `most`."""
        over = self.count() - most
        while over > 0:
            gone = min(over, int(self.cohorts[-1][1]))
            self.cohorts[-1][1] -= gone
            over -= gone
            if not self.cohorts[-1][1]:
                self.cohorts.pop()


def together(piece: Piece, task: Task, choose: Choose, observe: Observe = forget) -> Outcome:
    """Run `task.hosts` hosts through `piece`. Of more ready hosts than that, on-demand ones are idle.

    When capacity falls, the youngest spot hosts go. A choice is carried out at once as far as there is capacity;
    surplus hosts leave at once. The working hosts change at ticks. Every change stalls all hosts for `stall_s`, paid,
    and a stall that begins in another replaces it.
    """
    now, left, tick = 0.0, task.work_s * task.hosts, task.tick_s
    spot, demand, working, joined = _Hosts(), _Hosts(), (0, 0), 0
    paid_spot = paid_demand = useful_spot = useful_demand = 0.0
    stalled_until, changes, availability, step, last = 0.0, 0, AvailabilityHistory(), 0, len(piece.changes) - 1
    while left > EPSILON_S and now < 2 * task.deadline_s:
        while step < last and piece.changes[step + 1][0] <= now + EPSILON_S:
            step += 1
        capacity = piece.changes[step][1]
        before = spot.ready(now)
        spot.keep(capacity)
        lost = before - spot.ready(now)
        availability = observe(availability, now, is_available(spot.count(), capacity - spot.count(), task.hosts))
        choice = choose(DecisionInput(now, task.hosts, spot.count(), spot.ready(now), demand.count(), demand.ready(now),
                               capacity - spot.count(), task.deadline_s - now, left, task.changeover_s, task.stall_s,
                               task.spot_micros_h, task.on_demand_micros_h, availability, tick_s=tick))
        for hosts, wanted in ((spot, min(choice.spot, capacity)), (demand, choice.on_demand)):
            if hosts.count() < wanted:
                hosts.cohorts.append([now + task.changeover_s, wanted - hosts.count()])
            hosts.keep(wanted)
        of_spot = min(task.hosts, spot.ready(now))
        at_work = (of_spot, min(task.hosts - of_spot, demand.ready(now)))
        if at_work != working or (lost and joined):
            changes += 1
            stalled_until = now + task.stall_s  # the first group forms as well
            working = at_work
        until = min(spot.next_ready(now), demand.next_ready(now), now + max(choice.again_s, tick), 2 * task.deadline_s)
        if step < last:
            until = min(until, piece.changes[step + 1][0])
        until = max(now + tick, math.ceil(until / tick - 1e-9) * tick)
        joined = spot.next_ready(now) <= until + EPSILON_S
        rate, idle = sum(working), min(max(0.0, stalled_until - now), until - now)
        if rate and now + idle + left / rate < until:
            until = now + idle + left / rate
        done = rate * (until - now - idle)
        paid_spot += spot.count() * (until - now)
        paid_demand += demand.count() * (until - now)
        if rate:
            useful_spot += done * working[0] / rate
            useful_demand += done * working[1] / rate
        left, now = left - done, until
    return Outcome(paid_spot, paid_demand, useful_spot, useful_demand, changes, now if left <= EPSILON_S else math.inf)
