"""How long recent steps took, and what of that was spent on peers: measured where it costs nothing.

A step adds one line to a list. What a group counts itself costs two looks at a clock for each wait. What the kernel
knows of the group's connections is asked for each LOOK_S by the thread that reports.

Threads: the main thread calls `begin` and `ended`; the control thread `step_s` and `cost`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from statistics import median
from typing import NamedTuple

from spotfleet.messages import StepCost
from spotfleet.train.group import Group

RECENT_STEPS = 20
LOOK_S = 2.0


class _End(NamedTuple):
    """Of a step: when it was, and what its group had counted by then."""

    at: float
    waited_s: float
    begun: int
    begun_bytes: int


class Steps:
    def __init__(self) -> None:
        self._ends: deque[_End] = deque(maxlen=RECENT_STEPS + 1)
        self._made = 0
        self._known = StepCost()  # of the connections alone
        self._looked: tuple[int, float] = (0, 0.0)  # at which generation's, and when

    def begin(self) -> None:
        """A generation begins: what was measured in the last one is over."""
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
        """What a step consists of; nothing where a rank is alone, or has not made two."""
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
        generation, at = self._looked
        if generation == group.generation and now - at < LOOK_S:
            return self._known
        self._looked = (group.generation, now)
        found, self._known = group.links(), StepCost()
        if found:
            far = max(found, key=lambda link: link.rtt_s)
            after = [link.rtt_s for link in found if link.peer == group.next_address]
            self._known = StepCost(rtt_s=far.rtt_s, rtt_to=far.peer, next_s=max(after, default=0.0),
                                   sent=sum(link.sent for link in found), resent=sum(link.resent for link in found))
        return self._known
