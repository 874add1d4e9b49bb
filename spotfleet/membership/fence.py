"""Fence: generations that were ordered, and which of them may still be training. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from spotfleet.membership.views import WorkerView
from spotfleet.protocol.messages import Assignment


@dataclass(frozen=True)
class OrderedGroup:
    """One ordered generation."""

    generation: int
    members: tuple[str, ...]  # by rank
    cause: str = ""
    why: str = ""
    urgent: bool = True
    store: str = ""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)  # worker -> local rank, workers on its host
    before: tuple[str, ...] = ()  # planned change: members of `before_generation`, which trains on to the boundary
    before_generation: int = 0

    @cached_property
    def ranks(self) -> dict[str, int]:
        return {worker: rank for rank, worker in enumerate(self.members)}

    @cached_property
    def before_set(self) -> frozenset[str]:
        return frozenset(self.before)

    def assignment(self, worker: str, formed: bool) -> Assignment:
        """Return the worker's place. Until the group has formed, members of the old one leave at a step boundary."""
        local_rank, local_size = self.places.get(worker, (0, 1))
        urgent = self.urgent or formed or worker not in self.before_set
        return Assignment(self.generation, self.ranks.get(worker, -1), self.members, self.store, local_rank, local_size,
                          urgent)

    def made_urgent(self) -> OrderedGroup:
        return replace(self, urgent=True, before=(), before_generation=0)


class Fence:
    """Record of all ordered groups, and of those that may still be training."""

    def __init__(self) -> None:
        self.known: dict[int, OrderedGroup] = {}
        self._live: dict[int, OrderedGroup] = {}

    def add(self, group: OrderedGroup) -> None:
        group = replace(group, places={}, before=())  # kept forever, so without the fields of the newest group
        self.known[group.generation] = self._live[group.generation] = group

    def update(self, views: Mapping[str, WorkerView]) -> None:
        """Drop groups that provably cannot make another step."""
        formed = {v.generation for v in views.values()}
        left: dict[str, int] = {}  # worker -> newest generation that it reached; it holds no older one
        for generation in sorted(formed & self.known.keys()):
            left |= dict.fromkeys(self.known[generation].members, generation)  # all members form it, or none
        for worker, view in views.items():
            left[worker] = max(view.generation, left.get(worker, 0))
        self._live = {
            number: group
            for number, group in self._live.items()
            if not any(
                w not in views or views[w].exited or views[w].failed >= number or left[w] > number
                for w in group.members
            )
        }

    def forbids(self, members: Sequence[str]) -> OrderedGroup | None:
        """Return a group that could train beside a new one of `members`, as it shares no member with them."""
        wanted = frozenset(members)
        return next((g for g in self._live.values() if g.members and wanted.isdisjoint(g.members)), None)
