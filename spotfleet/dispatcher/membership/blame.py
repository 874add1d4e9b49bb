"""Failures in a row without a death, and who goes for them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spotfleet.dispatcher.membership.views import WorkerView


class Blame:
    def __init__(self, max_failures: int) -> None:
        self.in_a_row = 0
        self._max = max_failures
        self._members: frozenset[str] = frozenset()
        self._version = 0
        self._counted = 0  # the newest generation whose failure was counted
        self._spared: dict[str, int] = {}  # worker -> generation in which it was kept for its state's sake

    def failed(self, generation: int, members: Sequence[str], version: int) -> bool:
        """Count the failure of a generation, once. True: somebody has to go."""
        if self._counted == generation:
            return False
        self._counted = generation
        same = self._members == frozenset(members) and version <= self._version
        self.in_a_row = self.in_a_row + 1 if same else 1
        self._members, self._version = frozenset(members), version
        return self.in_a_row >= self._max

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
