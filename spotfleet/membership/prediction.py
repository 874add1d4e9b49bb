"""Predictions of the places of workers in init(), one for each, kept while the worker lives. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from spotfleet.membership.picture import Picture
from spotfleet.membership.places import ANY, BLANK, Claim
from spotfleet.membership.views import WorkerView
from spotfleet.protocol.messages import Assignment, RankInfo, Stage


class Predictions:
    """Predicted places by worker, and the slots whose last worker could not take the one predicted."""

    def __init__(self) -> None:
        self.of: dict[str, RankInfo] = {}
        self._missed: set[tuple[str, int]] = set()

    def missed(self, view: WorkerView) -> None:
        """Record that this worker could not take its predicted place: its slot's next one counts on nobody else."""
        self._missed.add((view.host, view.local_rank))

    def update(self, now: Picture, ranks: Sequence[str], first: int, later: Callable[[int], int], at_least: int,
               holders: Sequence[WorkerView], founders: Collection[str]) -> None:
        """Predict for each worker that has come to init(), except `founders`, which have their places.

        `first`: the most members of the next generation; `later(size)`: of one after a generation of `size`. Each has
        `at_least` members.
        """
        self.of = {w: place for w, place in self.of.items() if w in now.views}
        for view in now.views.values():
            if view.stage is Stage.INIT and view.worker not in self.of and view.worker not in founders:
                self.of[view.worker] = self._predict(view, now, ranks, first, later, at_least, holders)

    def _predict(self, view: WorkerView, now: Picture, ranks: Sequence[str], limit: int,
                 later: Callable[[int], int], at_least: int, holders: Sequence[WorkerView]) -> RankInfo:
        known, ranks = self._coming(view, now, ranks), list(ranks)
        while view.worker in known:
            target = now.target(ranks, limit, holders, known, at_least)
            if view.worker in target:
                return _place(view, target, now)
            members = [w for w in target if w != BLANK]
            if set(members) <= set(ranks):
                break
            limit, ranks, known = later(len(members)), members, known | dict.fromkeys(members, ANY)
        size = max(1, at_least, len(ranks))  # a spare, whose rank nobody knows
        return RankInfo(size - 1, size, view.local_rank, view.local_rank + 1)

    def _coming(self, view: WorkerView, now: Picture, ranks: Sequence[str]) -> dict[str, Claim]:
        """Return the workers that are counted on to be ready as soon as this one, itself included."""
        if (view.host, view.local_rank) in self._missed:
            return {view.worker: ANY} if now.may_come(view) else {}
        first = {w: Claim(p.rank, p.size) for w, p in self.of.items()
                 if now.views[w].stage is Stage.INIT and now.may_come(now.views[w])}
        beside = [v for v in now.views.values() if v.worker not in self.of and now.may_come(v)
                  and v.stage in (Stage.STARTING, Stage.INIT) and (v.host == view.host or v.worker in ranks)]
        return first | {v.worker: ANY for v in sorted(beside, key=lambda v: v.local_rank)}


def _place(view: WorkerView, target: Sequence[str], now: Picture) -> RankInfo:
    names = tuple(w or f"?{rank}" for rank, w in enumerate(target))
    beside = sum(w in now.views and now.views[w].host == view.host for w in target)
    return Assignment(0, target.index(view.worker), names, "", view.local_rank, beside).place
