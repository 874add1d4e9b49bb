"""State machine of a job's membership. Pure: the caller passes all views and the time. Diagram: `__init__.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from spotfleet.membership.blame import Blame
from spotfleet.membership.fence import Fence, OrderedGroup
from spotfleet.membership.pace import Pacer
from spotfleet.membership.picture import Picture
from spotfleet.membership.prediction import Predictions
from spotfleet.membership.views import Change, Evicted, Finished, Formed, Ordered, Orders, Phase, Tuning, WorkerView
from spotfleet.membership.watchdog import Watchdog
from spotfleet.protocol.messages import Assignment, Stage
from spotfleet.words import are, counted

RESTART_GAP = 10  # generations that a crashed dispatcher may have ordered, unknown to its successor


class Membership:
    """Membership of one job. Drop it when the job has ended."""

    def __init__(self, job: str, min_workers: int, max_workers: int, tuning: Tuning | None = None,
                 after: int = 0) -> None:
        """`after`: the newest generation of earlier groups of this job, all of whose workers have ended."""
        self.job, self.min_workers, self.max_workers = job, min_workers, max_workers
        self.tuning = tuning or Tuning()
        self.phase, self.why = Phase.STARTING, "no worker has started"
        self._now = Picture(self.tuning)
        self._group = OrderedGroup(0, ())  # the newest ordered; no members: none, or all stand by
        self._formed = False  # whether it has formed
        self._ranks: tuple[str, ...] = ()  # last worker of each rank, so that survivors keep theirs
        self._number = after  # later generations get higher numbers
        self._held = 0  # the newest generation that any worker has reported to hold
        self._fence = Fence()
        self._blame = Blame(self.tuning.max_failures)
        self._watchdog = Watchdog(self.tuning)
        self.pacer = Pacer(self.tuning.pace)
        self._predictions = Predictions()
        self._backend = ""  # the first generation's, which all later ones keep
        self._last = OrderedGroup(0, ())  # the group that passed the last barrier
        self._done: set[str] = set()
        self._final = 0  # the version at the end of training
        self._barrier = 0  # the newest generation ordered only to pass that barrier once more
        self._changes: list[Change] = []
        self.is_withheld = False  # set by the caller: workers get no orders now, and none is blamed for not forming

    @property
    def generation(self) -> int:
        """The newest ordered generation; 0: none yet."""
        return self._group.generation

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the newest generation, by rank. Empty while all stand by."""
        return self._group.members

    @property
    def version(self) -> int:
        """The newest version that any worker reports."""
        return self._now.version

    @property
    def needs_restore(self) -> bool:
        """Whether no live worker holds the state."""
        return self.generation > 0 and not self._holders()

    @property
    def _founding(self) -> bool:
        """Whether the first generation's members may still be in init() for it."""
        return self.generation == 1 and self.phase is not Phase.HOLDING

    @property
    def leaves_s(self) -> float | None:
        return self._now.leaves_s(self._holders())

    def adopt(self, generation: int, members: Sequence[str]) -> None:
        """Take over from a dispatcher that crashed, before the first `observe`.

        Call it for every generation that was ordered or that a worker reports, in any order: the highest is current,
        the others only fence. Pass members whose agents have not reconnected yet to `observe` as silent, not as
        missing.
        """
        group = OrderedGroup(generation, tuple(members), cause="resume", why="the dispatcher was restarted")
        self.pacer.resumed()
        self._fence.add(group)
        self._number = max(self._number, generation + RESTART_GAP)
        if generation >= self.generation:
            self._group, self._ranks, self._formed = group, group.members or self._ranks, False

    def observe(self, views: Sequence[WorkerView], expected: int, now: float) -> list[Change]:
        """Take the views of all workers; return the decisions, oldest first.

        `expected` counts workers that are being started and have not reached INIT or READY. A member that is missing
        from `views` counts as confirmed dead.
        """
        self._changes = []
        self._now.update(views, expected, now)
        self._backend = self._backend or next((v.backend for v in views if v.backend), "")
        self.pacer.tick(now)
        self._fence.update(self._now.views)
        self._number = max([self._number, *(max(v.generation, v.failed) for v in views)])
        self._held = max([self._held, *(v.generation for v in views)])
        if not self._finish():
            if self.generation == 0:
                self._found()
            elif self.members:
                self._check()
            else:
                self._resume()
            self._predict()
            self._start_misfits_anew()
            self._evict_hung_founders()
            for name in self._now.long_stopped():
                self._evict((name,), f"{name} was stopped for {self.tuning.stopped_limit_s:.0f} s")
        return self._changes

    def assignment(self, worker: str) -> Assignment | None:
        """Return the worker's place in the newest generation; rank -1 where it has none."""
        return self._group.assignment(worker, self._formed) if self.generation else None

    def orders(self, worker: str) -> Orders:
        return self.orders_of([worker])[worker]

    def orders_of(self, workers: Iterable[str]) -> dict[str, Orders]:
        """Return the orders of each of `workers`. One call for all, because the shared part iterates over all views."""
        ranks, holders = self._group.ranks, self._holders()
        checkpoint_now = self.leaves_s is not None
        needs_restore = self.generation > 0 and not holders
        standing_by = holders if self.phase is Phase.HOLDING else []
        first = max(standing_by, key=lambda v: (v.version, v.worker in self._ranks[:1], v.worker), default=None)

        def orders_for_one(worker: str) -> Orders:
            founded = self.generation > 0 and not (self._founding and worker in ranks)
            return Orders(self.assignment(worker), founded, self._predictions.of.get(worker), checkpoint_now,
                          needs_restore, self._backend, first is not None and worker == first.worker)

        return {worker: orders_for_one(worker) for worker in workers}

    # ---- places of spares

    def _predict(self) -> None:
        def limit(size: int) -> int:
            return self.pacer.pace.limit(size, self.max_workers, float("inf"))

        if self.generation > 0:
            first = self._limit() if self.phase is Phase.HOLDING else limit(len(self._ranks))
            self._predictions.update(self._now, self._ranks, first, limit, self.min_workers, self._holders(),
                                     self._group.ranks if self._founding else ())

    def _start_misfits_anew(self) -> None:
        """Evict spares that would be members now, had their scripts not read other numbers."""
        views, settled = self._now.views, self.phase in (Phase.RUNNING, Phase.HOLDING)
        bound = [w for w in self._now.ready if self._now.claim(w)]
        fitting = self._target(self.min_workers) if bound and settled else ()
        free = self._target(self.min_workers, bound=False) if bound and settled else ()
        wait_s = self.tuning.misfit_s if self._now.starting() else self.tuning.join_settle_s
        for name in bound:
            misfit = name in free and name not in fitting and views[name].version <= 0
            if self._now.lasted(("misfit", name), misfit) >= wait_s:
                self._predictions.missed(views[name])
                self._evict((name,), f"{name} has read another place than it can take")

    # ---- forming

    def _target(self, at_least: int = 0, bound: bool = True) -> tuple[str, ...]:
        return self._now.target(self._ranks, self._limit(), self._holders(), at_least=at_least, bound=bound)

    def _limit(self) -> int:
        return self.pacer.limit(len(self.members), self._formed, self.max_workers)

    def _holders(self) -> list[WorkerView]:
        """List the workers that may hold the newest state: survivors of the newest group that is known to have formed.

        Reported versions are of different moments and do not decide. Only where no member of that group is left, the
        workers with the highest versions count.
        """
        living = [v for v in self._now.living() if v.version >= 0]
        group = self._fence.known.get(self._held)
        held_by = frozenset(group.members) if group else frozenset()
        left = [v for v in living if v.worker in held_by]
        best = max([0, *(v.version for v in living)])
        return left or [v for v in living if v.version >= max(1, best - 1)]

    def _hindrance(self, target: Sequence[str]) -> str:
        """Explain why this generation may not be formed now; "" if it may."""
        if unreported := self._now.unreported(self._ranks):
            return f"waits for {unreported[0]} to report to the restarted dispatcher"
        if len(target) < self.min_workers:
            return f"needs {counted(self.min_workers, 'worker')}, {len(target)} can train"
        if self._now.all_must_go(target):
            return "needs a worker that stays"  # otherwise it would form and leave repeatedly
        if held := self._fence.forbids(target):
            missing = ", ".join(w for w in held.members if w in self._now.views)
            return f"waits until one of {missing} is confirmed gone: they may still train generation {held.generation}"
        holders = {v.worker for v in self._holders()}
        if not holders & set(target):
            known = {w for group in self._fence.known.values() for w in group.members}
            candidates = {v.worker for v in self._now.living() if v.silent and v.worker in known}
            candidates |= {w for w in holders if max(self._now.views[w].version, self._now.views[w].generation) > 0}
            if candidates:
                return f"waits for {min(candidates)}: it may be the last that holds the state"
        return ""

    def _order(self, members: tuple[str, ...], cause: str, why: str, urgent: bool) -> None:
        views = {w: self._now.views[w] for w in members}
        hosts = Counter(v.host for v in views.values())
        before = (old.members, old.generation) if (old := self._group).members else (old.before, old.before_generation)
        self._number += 1
        self._group = OrderedGroup(
            self._number, members, cause=cause, why=why, urgent=urgent,
            store=views[members[0]].store if members else "",
            places={w: (v.local_rank, hosts[v.host]) for w, v in views.items()},
            before=() if urgent else before[0], before_generation=0 if urgent else before[1])
        self._ranks, self._formed = members or self._ranks, False
        self.pacer.ordered(cause)
        self._fence.add(self._group)
        self.phase, self.why = Phase.FORMING if members else Phase.HOLDING, why
        self._changes.append(Ordered(self.generation, members, cause, why, self.version))

    def _found(self) -> None:
        founders = [v for v in self._now.views.values() if self._now.able(v, (Stage.INIT, Stage.READY))]
        enough = len(founders) >= self.min_workers
        settled = self._now.lasted("start", enough) >= self.tuning.start_settle_s
        if not enough:
            self.why = (f"needs {counted(self.min_workers, 'worker')}, {len(founders)} started, "
                        f"{self._now.expected} starting")
        elif self._now.expected > 0 and len(founders) < self.max_workers and not settled:
            self.why = f"{counted(len(founders), 'worker')} started, waits for {self._now.expected} more"
        else:
            hosts = {host: place for place, host in enumerate(dict.fromkeys(v.host for v in founders))}
            founders.sort(key=lambda v: (hosts[v.host], v.local_rank, v.worker))
            members = tuple(v.worker for v in founders[: self.max_workers])
            self._order(members, "start", f"{are(len(members), 'worker')} ready to start", urgent=True)

    def _check(self) -> None:
        group, views = self._group, self._now.views
        lost = self._lost(group.members)
        broken = [w for w in group.members if w in views and views[w].failed >= group.generation]
        if not self._formed and all(w in views and views[w].generation == group.generation for w in group.members):
            self._formed = True
            self._changes.append(Formed(group.generation, group.members, group.cause, group.why, self.version))
        grace = self._now.lasted("failure", bool(broken), group.generation)
        if lost:
            self._replace("death", "; ".join(lost.values()))
        elif broken and grace < self.tuning.failure_grace_s:
            self.why = f"a collective broke on {broken[0]}; waits for the report of a death"
        elif broken:
            self._fail(f"a collective broke on {broken[0]} and nobody has died")
        elif not self._formed:
            self._watch_forming()
        else:
            self._run()

    def _lost(self, workers: Sequence[str]) -> dict[str, str]:
        running = self.generation if self._group.urgent or self._formed else self._group.before_generation
        return self._now.lost(workers, running)

    def _replace(self, cause: str, why: str) -> None:
        """Form again at once without the lost members, or hold."""
        starting = [w for w in self._ranks if self._now.able(self._now.views.get(w), (Stage.STARTING, Stage.INIT))]
        settled = self._now.lasted("founders", bool(starting)) >= self.tuning.start_settle_s
        target = self._target()
        hindrance = self._hindrance(target)
        if starting and not settled and not hindrance:
            hindrance = f"waits for {starting[0]} to reach hvd.elastic.run"
        if hindrance:
            self.phase, self.why = Phase.HOLDING, f"{why}; {hindrance}"
        else:
            self._order(target, "resume" if self.phase is Phase.HOLDING else cause, why, urgent=True)

    def _evict_hung_founders(self) -> None:
        """Evict founders that hang in init(): a live one reports the end of generation 1 and goes on to elastic.run."""
        over = self.generation > 1 or self.phase is Phase.HOLDING
        for name in self._fence.known[1].members if 1 in self._fence.known else ():
            view = self._now.views.get(name)
            hangs = over and self._now.able(view, (Stage.INIT,)) and max(view.generation, view.failed) == 0
            if self._now.lasted(("founder", name), hangs) >= self.tuning.form_timeout_s:
                self._evict((name,), f"{name} does not answer in init()")

    def _resume(self) -> None:
        """Form again after a planned leave, while all stand by or are about to: their old group may not be broken."""
        target = self._target()
        hindrance = self._hindrance(target)
        if hindrance:
            self.phase, self.why = Phase.HOLDING, f"{self._group.why}; {hindrance}"
        elif self._now.lasted("settle", True, frozenset(target)) >= self.tuning.join_settle_s:
            urgent = bool(self._lost(self._group.before))
            planned = self._group.cause in ("notice", "drain")
            why = (f"{self._group.why}; " if planned else "") + f"{are(len(target), 'worker')} ready"
            self._order(target, self._group.cause if planned else "resume", why, urgent)

    def _watch_forming(self) -> None:
        group, views = self._group, self._now.views
        formed = [w for w in group.members if views[w].generation == group.generation]
        self.phase = Phase.FORMING
        self.why = f"{group.why}; {len(formed)} of {len(group.members)} have joined generation {group.generation}"
        if not group.urgent and self._lost([w for w in group.before if w not in group.ranks]):
            self._group = group = group.made_urgent()  # a leaver that hangs would keep the others in the old group
        training = [w for w in group.members if w in group.before_set]  # empty after a restart: then no time is granted
        left = any(views[w].generation != group.before_generation for w in training)
        begun = (group.urgent or left or bool(formed) or not training) and not self._now.fetching(group.members)
        begun = begun and not self.is_withheld
        if not begun and self._hangs([views[w] for w in group.before if w in views and views[w].answers]):
            return
        apart = self._now.parted(group.members, group.generation)
        self.why = "; ".join(filter(None, [self.why, apart.why]))
        if apart.over:
            self._evict((self._blame.victim(apart.suspects),), apart.why)
            return self._replace("failure", apart.why)
        waited = self._now.lasted("forming", begun, (group.generation, len(formed)))
        if waited < self.tuning.form_timeout_s * 2**self._blame.in_a_row:
            return
        if formed:
            mute = tuple(w for w in group.members if w not in formed)
            why = f"{', '.join(mute)} did not form generation {group.generation} in time"
            self._evict(mute, why)
            self._replace("failure", why)
        else:
            self._fail(f"nobody formed generation {group.generation} in time")

    # ---- failures without a death

    def _fail(self, why: str) -> None:
        """Form the same members again; after several failures in a row, without the one most likely at fault."""
        apart = self._now.parted(self.members, self.generation)
        if times := self._blame.failed(self.generation, self.members, self.version):
            victim = self._blame.victim(apart.suspects or [self._now.views[w] for w in self.members])
            others = ", ".join(w for w in self.members if w != victim) or "itself"
            self._evict((victim,), apart.why or f"{times} failures in a row between {victim} and {others}")
        self._replace("failure", "; ".join(filter(None, [why, apart.why])))

    def _evict(self, workers: tuple[str, ...], why: str) -> None:
        self._now.evicted |= set(workers)
        self._changes.append(Evicted(self.generation, workers, why))

    def _hangs(self, views: list[WorkerView]) -> bool:
        """Run the watchdog; return whether it acted on a hang."""
        stall = self._watchdog.check(views)
        self.why = "; ".join(filter(None, [self.why, stall.why]))
        if stall.guilty:
            self._evict(stall.guilty, stall.why)
            self._replace("death", stall.why)
        elif stall.over:
            self._fail(stall.why)
        return stall.over

    # ---- planned changes

    def _run(self) -> None:
        """Change a formed, whole group as planned: take in spares, let leavers go."""
        self.phase, self.why = Phase.RUNNING, f"generation {self.generation} on {counted(len(self.members), 'worker')}"
        views = [self._now.views[w] for w in self.members]
        self._blame.runs(self.version)
        starting = [v for v in views if v.stage is not Stage.READY]
        if starting:
            self.why = f"{self.why}; waits for {starting[0].worker} to reach hvd.elastic.run"
        if starting or not all(v.answers for v in views) or self._hangs(views):
            return
        target, ready = self._target(), sum(self._now.able(self._now.views[w]) for w in self._now.ready)
        self.why = "; ".join(filter(None, [self.why, self.pacer.why(min(ready, self.max_workers) - len(target))]))
        settled = self._now.lasted("settle", True, frozenset(target)) >= self.tuning.join_settle_s
        leaving = [v for v in views if v.leaving_s is not None]
        if leaving:
            self._leave(leaving, target)
        elif set(target) != set(self.members) and settled and not self._hindrance(target):
            more = len(target) - len(self.members)
            why = f"{more} worker{'s' if more > 1 else ''} joined" if more > 0 else f"max is {self.max_workers}"
            self._order(target, "join" if more > 0 else "drain", why, urgent=False)

    def _leave(self, leaving: list[WorkerView], target: tuple[str, ...]) -> None:
        """Let leavers go when they are replaced or their time is up; below min all stand by with the state."""
        cause = "notice" if any(v.leaving_why != "drain" for v in leaving) else "drain"
        names = ", ".join(v.worker for v in leaving)
        late = any(self._now.must_go(v) for v in leaving)
        if any(v.worker in target for v in leaving):  # as carrier: the state moves once another worker can take it
            replaced = any(w not in self._group.ranks for w in target)
        else:
            replaced = len(target) >= min(len(self.members), self.max_workers)
        free = cause == "drain" and not self._now.coming()
        if (late or replaced or free) and set(target) != set(self.members) and not self._hindrance(target):
            self._order(target, cause, f"{names} leaves ({cause})", urgent=False)
        elif late:
            self._order((), cause, f"{names} leaves ({cause})", urgent=False)
        else:
            left_s = min(self._now.stays_s(v) for v in leaving)
            self.why = f"{self.why}; {names} leaves ({cause}) when replaced or in {left_s:.0f} s"

    # ---- the end

    def _finish(self) -> bool:
        """Handle the end of training; return whether it has begun.

        Once one worker has passed the last barrier the state is final. After that, a group forms only of workers whose
        barrier broke because a member died in it.
        """
        views = self._now.views
        done = [v for v in views.values() if v.stage is Stage.FINISHED]
        self._done |= {v.worker for v in done}
        self._final = max([self._final, *(v.version for v in done)])
        if not self._done:
            return False
        if not self._last.members:
            self._last = self._final_group()
        living = {v.worker for v in self._now.living()} - self._done
        rest = tuple(w for w in self._last.members if w in living)
        if rest and self._now.lasted("finish", True, rest) >= self.tuning.finish_timeout_s:
            self._evict(rest, "did not finish in time")
            rest = ()
        if rest:
            self.phase, self.why = Phase.RUNNING, f"waits for {rest[0]} to finish"
            self._finish_again(rest)
        elif self.phase is not Phase.FINISHED:
            self.phase, self.why = Phase.FINISHED, "the training function has returned"
            self._changes.append(Finished(self.generation, self._last.members, self.version))
        return True

    def _final_group(self) -> OrderedGroup:
        """Find the group whose last barrier passed: the newest that was held, or a later one with all who finished."""
        groups = sorted(self._fence.known.values(), key=lambda g: g.generation)
        return next((g for g in groups if g.generation >= self._held and self._done <= set(g.members)), self._group)

    def _finish_again(self, rest: tuple[str, ...]) -> None:
        """Order workers whose last barrier broke to pass it again among themselves; their function is not run again."""
        views = self._now.views
        latest = max(self._last.generation, self._barrier)
        stuck = tuple(w for w in rest if views[w].answers and views[w].version >= self._final)
        broken = any(views[w].failed >= latest for w in stuck)
        if self.generation == self._barrier:
            broken = broken or any(w not in rest and w not in self._done for w in self.members)
        if stuck and self._now.lasted("barrier", broken, latest) >= self.tuning.failure_grace_s:
            self._order(stuck, "failure", "the last barrier broke", urgent=True)
            self._barrier = self.generation
