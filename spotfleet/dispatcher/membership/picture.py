"""What is true of a job's workers now, and for how long; and which of them should train. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from spotfleet.dispatcher.membership.blame import Parted, parted
from spotfleet.dispatcher.membership.views import Tuning, WorkerView
from spotfleet.messages import Stage

STARTED = (Stage.READY, Stage.FINISHED)


class Picture:
    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.views: dict[str, WorkerView] = {}
        self.expected = 0
        self.evicted: set[str] = set()  # told to end; still in the views until they have
        self.ready: dict[str, None] = {}  # in the order in which they became ready
        self._now = 0.0
        self._since: dict[Hashable, tuple[Hashable, float]] = {}  # condition -> what it is about, when it began
        self._heard: set[str] = set()  # workers whose agent was connected at some time
        self._first_left_s: dict[str, float] = {}  # seconds left when a worker's leaving was first seen

    def see(self, views: Sequence[WorkerView], expected: int, now: float) -> None:
        self.views, self.expected, self._now = {v.worker: v for v in views}, expected, now
        names = self.views.keys()
        self.evicted &= names
        self._heard = (self._heard & names) | {v.worker for v in views if not v.silent}
        ready = sorted((v for v in views if v.answers and v.stage in STARTED), key=lambda v: (v.host, v.local_rank))
        self.ready = {w: None for w in self.ready if w in names} | {v.worker: None for v in ready}
        leaving = {v.worker: v.leaving_s for v in views if v.leaving_s is not None}
        self._first_left_s = {w: self._first_left_s.get(w, left_s) for w, left_s in leaving.items()}
        self._since = {k: v for k, v in self._since.items() if not isinstance(k, tuple) or k[1] in names}
        for view in views:
            self.lasted(("silent", view.worker), view.silent)
            self.lasted(("stopped", view.worker), view.stopped)
            self.lasted(("drain", view.worker), view.leaving_s is not None and view.leaving_why == "drain")

    def lasted(self, condition: Hashable, holds: bool, about: Hashable = None) -> float:
        """Seconds for which the condition has held, about the same thing; below 0: it does not hold."""
        if not holds:
            self._since.pop(condition, None)
            return -1.0
        known, since = self._since.get(condition, (about, self._now))
        self._since[condition] = (about, since if known == about else self._now)
        return self._now - self._since[condition][1]

    def long_stopped(self) -> list[str]:
        """Who takes a slot that is paid for, and may be the last that holds the state."""
        return [v.worker for v in self.living()
                if self.lasted(("stopped", v.worker), v.stopped) >= self.tuning.stopped_limit_s]

    def parted(self, members: Sequence[str], generation: int) -> Parted:
        """Who of the members of a generation that forms cannot reach whom. Somebody goes for a pair that has been
        parted all the time: where packets are lost, now one first packet is lost and now another."""
        views = [self.views[w] for w in members]
        found = parted(views)
        for key in [k for k in self._since if isinstance(k, tuple) and k[0] == "parted" and k[1:] not in found.pairs]:
            del self._since[key]
        lasting = {p for p in found.pairs if self.lasted(("parted", *p), True, generation) >= self.tuning.parted_s}
        return replace(parted(views, lambda *pair: pair in lasting), over=True) if lasting else found

    @property
    def version(self) -> int:
        return max([0, *(v.version for v in self.views.values())])

    def leaves_s(self, whole: Sequence[WorkerView]) -> float | None:
        """Seconds until the first of those who hold the state, `whole`, is gone, where all of them go; None: somebody
        stays, or nobody has trained. A checkpoint in parts needs each of them."""
        left = [v.leaving_s for v in whole if v.leaving_s is not None]
        return min(left) if self.version > 0 and left and len(left) == len(whole) else None

    def living(self) -> list[WorkerView]:
        """Those that may still hold state: also the silent."""
        return [v for v in self.views.values() if not v.exited and v.worker not in self.evicted]

    def able(self, view: WorkerView | None, stages: Iterable[Stage] = (Stage.READY,)) -> bool:
        """It may enter a new generation."""
        return self._usable(view) and view.leaving_s is None and view.stage in stages

    def _usable(self, view: WorkerView | None) -> bool:
        return view is not None and view.answers and view.worker not in self.evicted and bool(view.store)

    def coming(self) -> bool:
        """A worker is on its way to READY."""
        return self.expected > 0 or any(self.able(v, (Stage.STARTING, Stage.INIT)) for v in self.views.values())

    def fetching(self, workers: Iterable[str]) -> bool:
        """Does a checkpoint still come to one of them? However long that takes, another could not be faster."""
        return any(self.views[w].fetches for w in workers if w in self.views)

    def lost(self, workers: Iterable[str], running: int) -> dict[str, str]:
        """Those of `workers` that are dead, with the reason. `running`: the generation in which they train now."""
        lost = {}
        broke = any(v.failed >= max(running, 1) for v in self.views.values() if v.answers)
        for worker in workers:
            view = self.views.get(worker)
            if view is None or view.exited:
                lost[worker] = f"{worker} has ended"
            elif worker in self.evicted:
                lost[worker] = f"{worker} was evicted"
            elif view.silent and self._silent_too_long(view, broke):
                lost[worker] = f"{worker} fell silent"
            elif view.stopped and (broke or self._stopped_s(view) >= self.tuning.stopped_grace_s):
                lost[worker] = f"{worker} is stopped"
        return lost

    def _stopped_s(self, view: WorkerView) -> float:
        return self.lasted(("stopped", view.worker), view.stopped)

    def _silent_too_long(self, view: WorkerView, broke: bool) -> bool:
        lasted = self.lasted(("silent", view.worker), view.silent)
        if view.worker not in self._heard:
            return lasted >= self.tuning.restart_silent_s
        return broke or max(lasted, view.unheard_s) >= self.tuning.silent_s

    def unheard(self, workers: Iterable[str]) -> list[str]:
        """Those that may yet report to us, who have only just started."""
        views = [self.views[w] for w in workers if w in self.views]
        return [v.worker for v in views if v.silent and not v.exited and not self._silent_too_long(v, broke=True)]

    def carrier(self, ranks: Sequence[str], whole: Sequence[WorkerView]) -> str | None:
        """A leaving worker that enters nevertheless, where nobody that stays holds the state, to hand it over."""
        if any(self.able(v) for v in whole):
            return None
        leaving = [v for v in whole if self._usable(v) and v.stage is Stage.READY and v.leaving_s is not None]
        by_rank = {w: i for i, w in enumerate(ranks)}
        best = max(leaving, key=lambda v: (v.version, -by_rank.get(v.worker, len(ranks)), v.worker), default=None)
        return best.worker if best else None

    def target(self, ranks: Sequence[str], max_workers: int, whole: Sequence[WorkerView]) -> tuple[str, ...]:
        """Who should train, by rank: survivors keep theirs, spares fill the holes, else ranks close up."""
        carrier = self.carrier(ranks, whole)
        if carrier and carrier not in ranks:
            ranks = [carrier, *ranks]
        ranked = frozenset(ranks)
        spares = [w for w in self.ready if w not in ranked and self.able(self.views[w])]
        kept = {w for w in ranks if w == carrier or self.able(self.views.get(w))}
        struck = {w.partition("/")[0] for w in ranks if w not in kept}  # a host that lost a worker may lose the next
        # one that comes back may hold the state
        spares.sort(key=lambda w: (-max(0, self.views[w].version), self.views[w].host in struck))
        limit = max(max_workers, 2) if carrier else max_workers  # a carrier needs somebody to hand over to
        fill = iter(spares[: max(0, limit - len(kept))])
        slots = [w if w in kept else next(fill, None) for w in ranks]
        target = [w for w in [*slots, *fill] if w]
        if len(target) > limit:
            target = self._fewer(target, limit, carrier, frozenset(v.worker for v in whole))
        return tuple(target)

    def _fewer(self, ranked: Sequence[str], limit: int, carrier: str | None, whole: frozenset[str]) -> list[str]:
        """Those of the lowest ranks that hold the state. Versions do not tell: reports are of different moments, and
        each would name another one."""
        order = sorted(range(len(ranked)), key=lambda r: (ranked[r] != carrier, ranked[r] not in whole, r))
        return [ranked[rank] for rank in sorted(order[:limit])]

    def must_go(self, view: WorkerView) -> bool:
        return self.stays_s(view) <= 0

    def all_must_go(self, workers: Sequence[str]) -> bool:
        """Are these none but leavers whose time is up?"""
        return bool(workers) and all(
            self.views[w].leaving_s is not None and self.must_go(self.views[w]) for w in workers)

    def stays_s(self, view: WorkerView) -> float:
        """How much longer a leaving worker waits to be replaced."""
        tuning = self.tuning
        short = self._first_left_s.get(view.worker, 0.0) < tuning.short_notice_s
        stays_s = (view.leaving_s or 0.0) - (tuning.short_lead_s if short else tuning.leave_lead_s)
        drained_s = self.lasted(("drain", view.worker), view.leaving_why == "drain")
        return stays_s if drained_s < 0 else min(stays_s, tuning.drain_wait_s - drained_s)
