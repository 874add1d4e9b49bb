"""Durations of recent steps and the part of them spent on peers, measured at no cost to training.

A step appends one row to a list. The group's own counters cost two clock readings for each wait. The kernel's numbers
for the group's connections are read every LINKS_EVERY_S by the thread that reports.

Threads: the main thread calls `begin` and `ended`; the control thread `step_s` and `cost`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from statistics import median
from typing import NamedTuple

from spotfleet.protocol.messages import StepCost
from spotfleet.train.comm.group import Group

RECENT_STEPS = 20
LINKS_EVERY_S = 2.0


class _End(NamedTuple):
    """End of a step: its time and its group's counters then."""

    at: float
    waited_s: float
    begun: int
    begun_bytes: int


class Steps:
    """Measurements of this worker's recent steps in one generation."""

    def __init__(self) -> None:
        self._ends: deque[_End] = deque(maxlen=RECENT_STEPS + 1)
        self._made = 0
        self._links_cost = StepCost()  # the newest numbers of the connections; its other fields are 0
        self._links_read_at: tuple[int, float] = (0, 0.0)  # generation and time of the newest reading

    def begin(self) -> None:
        """Begin a generation: drop the measurements of the last one."""
        self._made = 0
        self._ends.clear()

    def ended(self, at: float, group: Group | None) -> None:
        self._made += 1
        counted = (group.waited_s, group.begun, group.begun_bytes) if group is not None else (0.0, 0, 0)
        self._ends.append(_End(at, *counted))

    @property
    def step_s(self) -> float:
        """Median of recent steps; 0 before there are two."""
        gaps = [b.at - a.at for a, b in itertools.pairwise(list(self._ends))]
        return median(gaps) if gaps else 0.0

    def cost(self, group: Group | None) -> StepCost:
        """Return the composition of a step; all 0 while a rank is alone or has made fewer than two steps."""
        ends = list(self._ends)
        if group is None or group.size == 1 or group.forming or len(ends) < 2:
            return StepCost()
        links = self._links(group)
        first, last, steps = ends[0], ends[-1], len(ends) - 1
        return StepCost(
            self._made - 1, median(b.waited_s - a.waited_s for a, b in itertools.pairwise(ends)),
            round((last.begun - first.begun) / steps), round((last.begun_bytes - first.begun_bytes) / steps),
            group.backend, links.rtt_s, links.rtt_to, links.next_s, links.sent, links.resent)

    def _links(self, group: Group) -> StepCost:
        now = time.monotonic()
        generation, at = self._links_read_at
        if generation == group.generation and now - at < LINKS_EVERY_S:
            return self._links_cost
        self._links_read_at = (group.generation, now)
        found, self._links_cost = group.links(), StepCost()
        if found:
            far = max(found, key=lambda link: link.rtt_s)
            after = [link.rtt_s for link in found if link.peer == group.next_address]
            self._links_cost = StepCost(rtt_s=far.rtt_s, rtt_to=far.peer, next_s=max(after, default=0.0),
                                   sent=sum(link.sent for link in found), resent=sum(link.resent for link in found))
        return self._links_cost
