"""Costs under perfect foresight: no strategy can be cheaper. Both are exact.

    alone              one host, with changeovers (the world `policy_worlds.alone`); alone_bound_percent is below it
    fluid_micros       N hosts, if booting and regrouping took no time (below the world `policy_worlds.together`)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from policy_worlds import EPSILON_S, HOUR_S, Piece, Task


@dataclass(frozen=True)
class Plan:
    """Seconds paid, and the changes of host in them; infinitely expensive if the deadline cannot be met."""

    spot_s: float
    on_demand_s: float
    spot_changes: int
    on_demand_changes: int

    def micros(self, task: Task) -> float:
        return (self.spot_s * task.spot_micros_h + self.on_demand_s * task.on_demand_micros_h) / HOUR_S

    def cost_percent(self, task: Task) -> float:
        return 100.0 * self.micros(task) * HOUR_S / (task.work_s * task.on_demand_micros_h)


class _Part(NamedTuple):
    """Plan up to some boundary. `loss`: its extra cost over all the work on demand without changeover."""

    loss: float
    room_s: float  # room for work, in its whole runs and its whole stretches
    spot_s: float = 0.0
    runs: int = 0
    stretches: int = 0


def alone(piece: Piece, task: Task) -> Plan:
    """Return the cheapest plan for one host.

    If spot is available for a time (a run), a plan uses all of it or nothing: within it an on-demand host does no more
    and costs more. The remaining work is done in stretches on demand between runs; their exact position does not
    matter. So, of work C with changeover d,

        cost = dear C - sum over runs taken of ((dear - cheap) length - dear d) + dear d (stretches)

    is minimized while runs and stretches together have room for C. This is a shortest path with one resource. It is
    solved exactly by keeping, at each boundary, the plans that no other plan beats in both. If spot alone has room, the
    fewest, longest runs are compared with it.
    """
    spans = _spans(piece, task.deadline_s)
    d, dear, cheap, work = task.changeover_s, task.on_demand_micros_h, task.spot_micros_h, task.work_s
    runs = sorted((end - start for start, end, some in spans if some and end - start > d), reverse=True)
    room, taken, mixed = 0.0, 0.0, math.inf  # `mixed` is below the cost of all plans that need on-demand hosts
    for n, length in enumerate(runs):
        mixed = min(mixed, cheap * taken + dear * (work - room + d))
        room, taken = room + length - d, taken + length
        if room >= work - EPSILON_S:
            by_spot = Plan(work + (n + 1) * d, 0.0, n + 1, 0)
            if by_spot.micros(task) * HOUR_S <= mixed + EPSILON_S:
                return by_spot
            most = by_spot.micros(task) * HOUR_S - dear * work
            return min(by_spot, _mixed(spans, task, False, most), key=lambda plan: plan.micros(task))
    return _mixed(spans, task, True)


def _mixed(spans: list[tuple[float, float, bool]], task: Task, two: bool, most: float = math.inf) -> Plan:
    """Return the cheapest plan with at least one stretch on demand and a loss below `most`.

    `two`: only cost and room decide, because spot cannot do all the work.
    """
    d, dear, cheap, work = task.changeover_s, task.on_demand_micros_h, task.spot_micros_h, task.work_s
    rest = [*accumulate((end - start for start, end, _ in reversed(spans)), initial=0.0)][::-1]
    gains = [max(0.0, (dear - cheap) * (end - start) - dear * d) if some else 0.0 for start, end, some in spans]
    to_win = [*accumulate(reversed(gains), initial=0.0)][::-1]
    idle, demand = [_Part(0.0, 0.0)], list[_Part]()  # state of a plan at the boundary: idle or spot, on demand
    for k, (start, end, some) in enumerate(spans):
        length, needed = end - start, work - rest[k + 1] - EPSILON_S
        on = [_Part(p.loss + dear * d, p.room_s + length - d, p.spot_s, p.runs, p.stretches + 1) for p in idle]
        on += [p._replace(room_s=p.room_s + length) for p in demand]
        off = idle + demand
        if some and length > d:
            gain = (dear - cheap) * length - dear * d
            off += [_Part(p.loss - gain, p.room_s + length - d, p.spot_s + length, p.runs + 1, p.stretches) for p in off
                    if p.spot_s + length - (p.runs + 1) * d < work - EPSILON_S]
        bar = most + to_win[k + 1]
        idle, demand = (_unbeaten([p for p in parts if p.room_s >= needed and p.loss < bar], two)
                        for parts in (off, on))
    ends = [p for p in idle + demand if p.stretches]
    if not ends:
        return Plan(math.inf, math.inf, 0, 0)
    best = min(ends)
    on_demand_s = work - (best.spot_s - best.runs * d) + best.stretches * d
    return Plan(best.spot_s, on_demand_s, best.runs, best.stretches)


def _unbeaten(parts: list[_Part], two: bool) -> list[_Part]:
    parts.sort(key=lambda p: (p.loss, -p.room_s))
    kept: list[_Part] = []
    for part in parts:
        if two and kept and part.room_s <= kept[-1].room_s + EPSILON_S:
            continue
        if not two and any(p.room_s >= part.room_s - EPSILON_S and p.spot_s <= part.spot_s + EPSILON_S for p in kept):
            continue  # a plan with less on spot has still more to gain
        kept.append(part)
    return kept


def _spans(piece: Piece, until_s: float) -> list[tuple[float, float, bool]]:
    """Return alternating (start, end, whether spot is available)."""
    found: list[tuple[float, float, bool]] = []
    ends = [at for at, _ in piece.changes[1:]] + [until_s]
    for (start, n), end in zip(piece.changes, ends, strict=True):
        start, end = min(start, until_s), min(end, until_s)
        if found and found[-1][2] == (n > 0):
            found[-1] = (found[-1][0], end, n > 0)
        elif end > start:
            found.append((start, end, n > 0))
    return found


def fluid_micros(piece: Piece, task: Task) -> float:
    """Return micro-dollars for the work of N hosts: all spot until it suffices, the rest on demand.

    This is exact for hosts that boot and regroup in no time, and so a lower bound. Whenever the deadline can be met on
    demand alone, N minus the spot hosts have room for the rest.
    """
    work = task.work_s * task.hosts
    ends = [*(at for at, _ in piece.changes[1:]), task.deadline_s]
    spot = sum(min(n, task.hosts) * max(0.0, min(end, task.deadline_s) - start)
               for (start, n), end in zip(piece.changes, ends, strict=True))
    return (min(spot, work) * task.spot_micros_h + max(0.0, work - spot) * task.on_demand_micros_h) / HOUR_S


def alone_bound_percent(piece: Piece, task: Task) -> float:
    """Return a bound below `alone`, in % of all on demand: as if one changeover to on demand were enough at any time.
    """
    d, dear, cheap, work = task.changeover_s, task.on_demand_micros_h, task.spot_micros_h, task.work_s
    room, taken, best = 0.0, 0.0, dear * (work + d)
    for n, length in enumerate(sorted((e - s for s, e, some in _spans(piece, task.deadline_s) if some), reverse=True)):
        room, taken = room + length - d, taken + length
        if length <= d:
            break
        best = min(best, cheap * (work + (n + 1) * d) if room >= work else cheap * taken + dear * (work - room + d))
    return 100.0 * best / (work * dear)
