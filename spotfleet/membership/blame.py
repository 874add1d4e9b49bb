"""Choice of the member to evict after repeated failures without a death, or for a broken network path. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotfleet.addresses import host_of
from spotfleet.membership.views import WorkerView


@dataclass(frozen=True)
class Parted:
    """Pairs of members that cannot reach each other."""

    suspects: tuple[WorkerView, ...] = ()  # the members in most pairs: without them all others can form
    why: str = ""
    over: bool = False  # it has lasted so long that one of them is evicted
    pairs: frozenset[tuple[str, str]] = frozenset()  # (worker, the peer that it cannot reach)


def parted(members: Sequence[WorkerView], counts: Callable[[str, str], bool] = lambda here, there: True) -> Parted:
    """Find the members that cannot reach each other, by their own reports.

    `counts(worker, peer)`: whether a pair counts.
    """
    views = {v.worker: v for v in members}
    pairs = [(v, views[name], reported) for v in members for reported in v.unreached
             if (name := reported.partition(" ")[0]) in views and name != v.worker and counts(v.worker, name)]
    if not pairs:
        return Parted()
    counted = Counter(v.worker for pair in pairs for v in pair[:2])
    most = max(counted.values())
    here, _, there = pairs[0]
    others = len({frozenset((a.worker, b.worker)) for a, b, _ in pairs}) - 1
    why = f"{here.worker} at {host_of(here.store) or 'an unknown address'} cannot reach {there}"
    why += f", and {others} other pair{'s' if others > 1 else ''}" if others else ""
    return Parted(tuple(v for v in members if counted[v.worker] == most), why,
                  pairs=frozenset((a.worker, b.worker) for a, b, _ in pairs))


class Blame:
    """Counter of consecutive failures, and the choice of a victim."""

    def __init__(self, max_failures: int) -> None:
        self.in_a_row = 0
        self._max = max_failures
        self._members: frozenset[str] = frozenset()
        self._version = 0
        self._counted = 0  # the newest generation whose failure was counted
        self._spared: dict[str, int] = {}  # worker -> generation in which it was kept for its state

    def failed(self, generation: int, members: Sequence[str], version: int) -> int:
        """Count the failure of a generation, once. Returns the failures in a row if a member is to go, else 0."""
        if self._counted == generation:
            return 0
        self._counted = generation
        same = self._members == frozenset(members) and version <= self._version
        self.in_a_row = self.in_a_row + 1 if same else 1
        self._members, self._version = frozenset(members), version
        return self.in_a_row if self.in_a_row >= self._max else 0

    def runs(self, version: int) -> None:
        if version > self._version:
            self.in_a_row = 0

    def victim(self, members: Sequence[WorkerView]) -> str:
        """Choose the member to evict: the one with the lowest `failed`, which hangs; then the one with the least state.

        The only holder of the state is spared once, and again whenever it has answered since.
        """
        views, holders = list(members), [v for v in members if v.version > 0]
        if len(holders) == 1 and len(views) > 1 and holders[0].failed >= self._spared.get(holders[0].worker, 0):
            views.remove(holders[0])
            self._spared[holders[0].worker] = self._counted
        self.in_a_row = 0
        return min(views, key=lambda v: (v.failed, v.version, -members.index(v))).worker
