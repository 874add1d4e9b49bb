"""Failures in a row without a death, members that cannot reach each other, and who goes for that. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotfleet.addresses import host_of
from spotfleet.dispatcher.membership.views import WorkerView


@dataclass(frozen=True)
class Parted:
    """Members between whom the network does not carry."""

    suspects: tuple[WorkerView, ...] = ()  # who has most of such peers: without them all others can form
    why: str = ""
    over: bool = False  # for so long that one of them goes
    pairs: frozenset[tuple[str, str]] = frozenset()  # who cannot reach whom


def parted(members: Sequence[WorkerView], counts: Callable[[str, str], bool] = lambda here, there: True) -> Parted:
    """By what they say themselves; nobody, where each finds a way to each. `counts`: does a pair (worker, peer)?"""
    views = {v.worker: v for v in members}
    pairs = [(v, views[name], said) for v in members for said in v.unreached
             if (name := said.partition(" ")[0]) in views and name != v.worker and counts(v.worker, name)]
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
    def __init__(self, max_failures: int) -> None:
        self.in_a_row = 0
        self._max = max_failures
        self._members: frozenset[str] = frozenset()
        self._version = 0
        self._counted = 0  # the newest generation whose failure was counted
        self._spared: dict[str, int] = {}  # worker -> generation in which it was kept for its state's sake

    def failed(self, generation: int, members: Sequence[str], version: int) -> int:
        """Count the failure of a generation, once. Above 0: so many in a row, and somebody has to go."""
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
        """Whose `failed` stays behind hangs; else the one with the least to lose goes.

        The last that holds the state is spared once, and again whenever it has answered since.
        """
        views, whole = list(members), [v for v in members if v.version > 0]
        if len(whole) == 1 and len(views) > 1 and whole[0].failed >= self._spared.get(whole[0].worker, 0):
            views.remove(whole[0])
            self._spared[whole[0].worker] = self._counted
        self.in_a_row = 0
        return min(views, key=lambda v: (v.failed, v.version, -members.index(v))).worker
