"""Conditions of a job's workers and their durations, and the choice of workers that should train. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from spotfleet.membership.blame import Parted, parted
from spotfleet.membership.places import Claim, arrange
from spotfleet.membership.views import Tuning, WorkerView
from spotfleet.protocol.messages import Stage

STARTED = (Stage.READY, Stage.FINISHED)


class Picture:
    """The current views of one job's workers, with the history that decisions need."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.views: dict[str, WorkerView] = {}
        self.expected = 0
        self.evicted: set[str] = set()  # ordered to end; in the views until they have
        self.ready: dict[str, None] = {}  # in the order in which they became ready
        self._now = 0.0
        self._since: dict[Hashable, tuple[Hashable, float]] = {}  # condition -> its subject, when it began
        self._connected: set[str] = set()  # workers whose agent was connected at some time
        self._first_left_s: dict[str, float] = {}  # seconds left when a worker's leaving was first seen

    def update(self, views: Sequence[WorkerView], expected: int, now: float) -> None:
        self.views, self.expected, self._now = {v.worker: v for v in views}, expected, now
        names = self.views.keys()
        self.evicted &= names
        self._connected = (self._connected & names) | {v.worker for v in views if not v.silent}
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
        """Return the seconds for which the condition has held for the same subject; below 0: it does not hold."""
        if not holds:
            self._since.pop(condition, None)
            return -1.0
        known, since = self._since.get(condition, (about, self._now))
        self._since[condition] = (about, since if known == about else self._now)
        return self._now - self._since[condition][1]

    def long_stopped(self) -> list[str]:
        """List workers stopped beyond the limit: each occupies a paid slot, and may be the last holder of the state."""
        return [v.worker for v in self.living()
                if self.lasted(("stopped", v.worker), v.stopped) >= self.tuning.stopped_limit_s]

    def parted(self, members: Sequence[str], generation: int) -> Parted:
        """Find the members of a forming generation that cannot reach each other.

        `over` is set only for a pair that was parted all the time: on a lossy network the affected pairs change.
        """
        views = [self.views[w] for w in members]
        found = parted(views)
        for key in [k for k in self._since if isinstance(k, tuple) and k[0] == "parted" and k[1:] not in found.pairs]:
            del self._since[key]
        lasting = {p for p in found.pairs if self.lasted(("parted", *p), True, generation) >= self.tuning.parted_s}
        return replace(parted(views, lambda *pair: pair in lasting), over=True) if lasting else found

    @property
    def version(self) -> int:
        return max([0, *(v.version for v in self.views.values())])

    def leaves_s(self, holders: Sequence[WorkerView]) -> float | None:
        """Return the seconds until the first holder of the state (`holders`) is gone, if all of them leave.

        None: a holder stays, or no step was made yet. The first one counts, as a checkpoint in parts needs each holder.
        """
        left = [v.leaving_s for v in holders if v.leaving_s is not None]
        return min(left) if self.version > 0 and left and len(left) == len(holders) else None

    def living(self) -> list[WorkerView]:
        """List the workers that may still hold state, the silent ones included."""
        return [v for v in self.views.values() if not v.exited and v.worker not in self.evicted]

    def able(self, view: WorkerView | None, stages: Iterable[Stage] = (Stage.READY,)) -> bool:
        """Return whether the worker may enter a new generation."""
        return self._usable(view) and view.leaving_s is None and view.stage in stages

    def _usable(self, view: WorkerView | None) -> bool:
        return view is not None and view.answers and view.worker not in self.evicted and bool(view.store)

    def coming(self) -> bool:
        """Return whether a worker is on its way to READY."""
        return self.expected > 0 or any(self.able(v, (Stage.STARTING, Stage.INIT)) for v in self.views.values())

    def fetching(self, workers: Iterable[str]) -> bool:
        """Return whether one of them still fetches a checkpoint. It gets no time limit: another would not be faster."""
        return any(self.views[w].fetches for w in workers if w in self.views)

    def lost(self, workers: Iterable[str], running: int) -> dict[str, str]:
        """Map the dead ones of `workers` to the reason. `running`: the generation in which they train now."""
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
        if view.worker not in self._connected:
            return lasted >= self.tuning.restart_silent_s
        return broke or max(lasted, view.report_age_s) >= self.tuning.silent_s

    def unreported(self, workers: Iterable[str]) -> list[str]:
        """List the workers that may still report to this dispatcher, which has only just started."""
        views = [self.views[w] for w in workers if w in self.views]
        return [v.worker for v in views if v.silent and not v.exited and not self._silent_too_long(v, broke=True)]

    def carrier(self, ranks: Sequence[str], holders: Sequence[WorkerView]) -> str | None:
        """Choose a leaving worker that enters anyway to hand over the state, if no worker that stays holds it."""
        if any(self.able(v) for v in holders):
            return None
        leaving = [v for v in holders if self._usable(v) and v.stage is Stage.READY and v.leaving_s is not None]
        by_rank = {w: i for i, w in enumerate(ranks)}
        best = max(leaving, key=lambda v: (v.version, -by_rank.get(v.worker, len(ranks)), v.worker), default=None)
        return best.worker if best else None

    def target(self, ranks: Sequence[str], max_workers: int, holders: Sequence[WorkerView],
               told: Mapping[str, Claim] | None = None, at_least: int = 0, bound: bool = True) -> tuple[str, ...]:
        """List the workers that should train, by rank: survivors keep their ranks, spares fill gaps, others move up.

        In a prediction `told` are workers that count as ready, with their claims, and blanks fill up to `at_least`.
        With `bound=False` no claim counts.
        """
        told = told or {}
        carrier = self.carrier(ranks, holders)
        if carrier and carrier not in ranks:
            ranks = [carrier, *ranks]
        claims = {w: told[w] if w in told else self.claim(w) for w in (*self.ready, *told)} if bound else {}
        able = {w for w in ranks if w in told or w == carrier or self.able(self.views.get(w))}
        kept = {w for w in able if w == carrier or not claims.get(w)}  # a bound one has not trained yet
        spares = [w for w in dict.fromkeys((*self.ready, *told))
                  if w not in kept and (w in told or self.able(self.views[w]))]
        struck = {w.partition("/")[0] for w in ranks if w not in able}  # a host that lost a worker may lose the next
        # one that comes back may hold the state
        spares.sort(key=lambda w: (-max(0, self.views[w].version), self.views[w].host in struck))
        limit = max(max_workers, 2) if carrier else max_workers  # a carrier needs a successor
        target = arrange(ranks, kept, spares, limit, claims, at_least)
        if len(target) > limit:
            target = self._fewer(target, limit, carrier, frozenset(v.worker for v in holders))
        return tuple(target)

    def claim(self, worker: str) -> Claim:
        """Return the numbers that the worker's script has read, so that its place must have them."""
        return Claim(self.views[worker].read_rank, self.views[worker].read_size)

    def starting(self) -> bool:
        """Return whether a worker is on its way to READY here, not only a host."""
        return any(self.may_come(v) and v.stage in (Stage.STARTING, Stage.INIT) for v in self.views.values())

    def may_come(self, view: WorkerView) -> bool:
        """Return whether the worker, in whichever stage, may come to train."""
        return view.answers and view.leaving_s is None and view.worker not in self.evicted

    def _fewer(self, ranked: Sequence[str], limit: int, carrier: str | None, holders: frozenset[str]) -> list[str]:
        """Keep the holders of the state with the lowest ranks.

        Versions do not decide: reports are of different moments, and each would name another worker.
        """
        order = sorted(range(len(ranked)), key=lambda r: (ranked[r] != carrier, ranked[r] not in holders, r))
        return [ranked[rank] for rank in sorted(order[:limit])]

    def must_go(self, view: WorkerView) -> bool:
        return self.stays_s(view) <= 0

    def all_must_go(self, workers: Sequence[str]) -> bool:
        """Return whether all of `workers` are leavers whose time is up."""
        return bool(workers) and all(
            self.views[w].leaving_s is not None and self.must_go(self.views[w]) for w in workers)

    def stays_s(self, view: WorkerView) -> float:
        """Return how much longer a leaving worker waits for its replacement."""
        tuning = self.tuning
        short = self._first_left_s.get(view.worker, 0.0) < tuning.short_notice_s
        stays_s = (view.leaving_s or 0.0) - (tuning.short_lead_s if short else tuning.leave_lead_s)
        drained_s = self.lasted(("drain", view.worker), view.leaving_why == "drain")
        return stays_s if drained_s < 0 else min(stays_s, tuning.drain_wait_s - drained_s)
