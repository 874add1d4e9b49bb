"""One job: which workers should exist, what became of them, and where the job stands.

    QUEUED --has slots--> STARTING --first generation formed--> RUNNING <--> RECOVERING
       any of these --> SUCCEEDED | FAILED | CANCELLED

What each waits for is in `why`; what frees it:
- QUEUED: slots (the schedule says which job or host it waits for); `cancel`.
- STARTING, RECOVERING: what Membership waits for (`dispatcher/membership/`), bounded there.
- the end after training: the script's tail on rank 0, started again if it is lost; others get TAIL_S after it.
- CANCELLED is reached when the agents report none of its workers, or they are confirmed gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet.dispatcher import jobfile, restart
from spotfleet.dispatcher.bell import Bell
from spotfleet.dispatcher.checkpoints import CheckpointStore
from spotfleet.dispatcher.jobfile import JobRecord
from spotfleet.dispatcher.judging import judge
from spotfleet.dispatcher.logs import JobLogs
from spotfleet.dispatcher.membership import Change, Evicted, Finished, Formed, Ordered, Phase, WorkerView
from spotfleet.dispatcher.outputs import Outputs
from spotfleet.dispatcher.progress import Progress
from spotfleet.dispatcher.restart import Cause, Slot
from spotfleet.dispatcher.saving import Saving, Sight
from spotfleet.dispatcher.sizing import Sizing
from spotfleet.dispatcher.status import job_status
from spotfleet.dispatcher.surroundings import Surroundings
from spotfleet.dispatcher.telling import worker_orders
from spotfleet.dispatcher.workers import Crew, Worker, started
from spotfleet.fleet.events import Event, GenerationFormed, JobChanged
from spotfleet.messages import AgentReport, JobStatus, SlotOrder, Stage
from spotfleet.model import HostState, JobSpec, JobState

SAVE_S = 15.0  # for a running job's last checkpoint when the fleet goes down
TAIL_S = 20.0  # the other ranks' tails, once rank 0's script has ended
LOGS_S = 15.0  # after a job's end, its last output is waited for so long
GROUPS = 8  # so many generations a restarted dispatcher fences
PLANNED = ("join", "drain", "notice")  # causes of a generation during whose forming the old one trains on


class Job:
    """`name_for` makes the name of the next worker of a slot; no name is ever given twice."""

    def __init__(self, folder: Path, record: JobRecord, secrets: dict[str, str],
                 name_for: Callable[[Slot], str]) -> None:
        self.folder, self.record, self.secrets, self._name_for = folder, record, secrets, name_for
        self.crew = Crew(record.job)
        self.sizing = Sizing(record.job, record.spec, record.asked, record.size)
        self.membership = self.sizing.membership()
        self.progress = Progress(record.job, record.repeated)
        self.history = restart.History()
        self.logs = JobLogs(folder / "logs")
        self.log_bell = Bell()
        self.outputs = Outputs(folder / "outputs")
        self.checkpoints = CheckpointStore(folder / "checkpoints", record.spec.checkpoint.keep)
        self.saving = Saving(record.told)
        self.unsaved = False  # the disk was full: the record on it is older
        self._group: tuple[str, ...] = ()  # newest generation that had members
        self._cause = ""  # of the newest generation
        self._finished: tuple[str, ...] = ()  # by rank, once training has ended
        self._done_at: float | None = None  # when rank 0's script ended
        self._adopted = False  # from a dispatcher that was here before us
        self._peak = 0  # most workers at once: of a script without init(), so many must end

    @property
    def id(self) -> str:
        return self.record.job

    @property
    def spec(self) -> JobSpec:
        return self.record.spec

    @property
    def state(self) -> JobState:
        return self.record.state

    # ---- what others ask

    def has_worker_on(self, host: str) -> bool:
        return any(not w.ended for w in self.crew.on(host))

    def was_given_to(self, host: str) -> bool:
        """Has this host ever been given a worker? What its workers leave may come after their ends."""
        return host in self.record.hosts or self.has_worker_on(host)

    def log_rank(self, worker: str) -> int:
        return self.crew.all[worker].rank if worker in self.crew.all else -1

    def logs_complete(self, unix: float) -> bool:
        """Has every worker's last output arrived, or been waited for long enough?"""
        over = unix - self.record.ended_at > LOGS_S
        return self.state.ended and (over or not any(w.seen for w in self.crew.live()))

    def held(self) -> dict[Slot, str]:
        """The slots whose processes exist or shall exist."""
        return {w.place: w.name for w in self.crew.live()}

    def cancel(self, why: str, save_until: float = 0.0) -> None:
        """End the job. With `save_until` (monotonic) it may train on until what it has reached is in a checkpoint."""
        if not self.state.ended and not self.record.cancelled:
            self._write(cancelled=why)
            self.saving.want(self.crew.version(), save_until)

    def orders(self) -> dict[str, list[SlotOrder]]:
        """By host, what should exist there."""
        wanted = [w for w in self.crew.live() if w.wanted]
        told = worker_orders(self.membership, self.checkpoints, self.spec.checkpoint.interval_s,
                             [w.name for w in wanted], self.saving.wanted, self.progress.step_why)
        found: dict[str, list[SlotOrder]] = {}
        for worker in wanted:
            order = SlotOrder(worker.name, self.id, worker.slot, worker.local_rank, told[worker.name])
            found.setdefault(worker.host, []).append(order)
        return found

    def hear(self, report: AgentReport, now: float) -> None:
        """Take what an agent says of this job; `now` is monotonic."""
        self.crew.hear(report)
        self._hear_of_store(report)
        for damaged in report.damaged:
            if damaged.job == self.id and self.has_worker_on(report.host):
                self.checkpoints.doubt(damaged.version, damaged.digest, now)

    def _hear_of_store(self, report: AgentReport) -> None:
        mine = [w.report for w in report.workers if w.report.worker in self.crew.all and not self.state.ended]
        self.checkpoints.hear(mine, self.record.fence, self.membership.generation)

    def adopt(self, reports: list[AgentReport]) -> None:
        """After a restart: take over the workers that agents report, and what was ordered last. Hosts that were never
        given this job are not believed when they claim it: they would get its secrets."""
        self._adopted = True
        reports = [r for r in reports if not self.record.hosts or r.host in self.record.hosts]
        for report in reports:
            mine = sorted((w for w in report.workers if w.report.job == self.id), key=lambda w: w.slot)
            for local_rank, state in enumerate(mine):
                self.crew.add(state.report.worker, local_rank).seen = True
        for name in self.record.done:
            worker = self.crew.add(name, 0)
            worker.cause, worker.told = Cause.DONE, True
        for generation, members in self.record.groups:
            self.membership.adopt(generation, members)
            self._group = members or self._group
        newest = self.checkpoints.newest
        trained = max(self.record.fence, newest.generation if newest else 0)
        if trained > self.membership.generation:  # our record is behind: nobody may train under such a number again
            self.membership.adopt(trained, ())
        for name in self._group:
            if name not in self.crew.all:
                worker = self.crew.add(name, 0)
                worker.silent = worker.seen = True  # its agent has not come back; it may train on
        self._write(hosts=tuple(dict.fromkeys((*self.record.hosts, *sorted(self.crew.hosts())))))
        for report in reports:
            self.crew.hear(report)
            self._hear_of_store(report)
        resumed = max((w.report.resumed for w in self.crew.all.values()), default=0)
        steppers = [m for g, m in self.record.groups if m and (g != self.record.fence or resumed >= g)]
        self.progress.adopt(self.crew, steppers[-1] if steppers else (), self.record.version)

    def status(self, unix: float) -> JobStatus:
        return job_status(self, unix)

    # ---- one step

    def step(self, around: Surroundings) -> list[Event]:
        """Bring the job up to date with everything known; returns what is to be remembered."""
        for host in self.crew.hosts():
            view = around.hosts.get(host)
            if view is None or view.host.state is HostState.STOPPED or view.host.revoked:
                self.crew.lose(host)
        if self.state.ended:
            self.crew.forget(lambda _: False)
            return []
        self.history = restart.progressed(self.history, self.crew.version())
        events = self.checkpoints.take_news(self.id, around.unix) + self._judge_ends(around)
        if not self.state.ended:
            events += self._advance(around)
        return events

    def _advance(self, around: Surroundings) -> list[Event]:
        if self.record.cancelled:
            return self._cancelled(around)
        self._fill(around)
        self.sizing.look(self.membership, self.crew)
        changes = self.membership.observe(self._views(around), self._expected(around), around.now)
        events = [e for change in changes for e in self._apply(change, around)]
        founding = self.membership.generation == 1 and self.membership.phase is Phase.FORMING and not self._adopted
        self.checkpoints.need(self.membership.needs_restore and not founding)
        self._release(around)
        self._rank()
        events += [*self.progress.look(self.crew, self.membership, around), *self._look_out(around)]
        self._write(version=max(self.membership.version, 0) or self.record.version, repeated=self.progress.repeated,
                    asked=self.sizing.asked, size=self.sizing.size)
        self.crew.forget(lambda w: w.name in self._group or w.done or around.now - w.ended_at <= restart.TOGETHER_S)
        return [*events, *self._settle(around)]

    def _judge_ends(self, around: Surroundings) -> list[Event]:
        verdict = judge(self.id, self.crew, self.history, lambda: frozenset(self._group) or started(
            w for w in self.crew.all.values() if not w.ended or around.now - w.ended_at <= restart.TOGETHER_S), around)
        self.history = verdict.history
        if verdict.done:
            self._write(done=(*self.record.done, *verdict.done))
        if verdict.failed is None:
            return list(verdict.events)
        return [*verdict.events, *self._end(JobState.FAILED, verdict.failed.why, around, verdict.failed.error)]

    def _fill(self, around: Surroundings) -> None:
        """Start a worker in each given slot that has none, unless it cools down or its script has ended."""
        if self._finished:
            return
        crew = [w for w in self.crew.all.values() if not w.past and (w.done or not w.ended)]
        self._peak = max(self._peak, len(crew))
        # once a script has run to its end no more are started than have been there at once
        room = self._peak - len(crew) if any(w.done for w in crew) else len(around.given)
        local: dict[str, int] = {}
        fresh: list[str] = []
        for host, slot in around.given:
            local_rank = local[host] = local.get(host, -1) + 1
            free = len(fresh) < room and self.crew.at((host, slot)) is None
            if free and restart.ready_at(self.history, (host, slot)) <= around.now:
                self.crew.add(self._name_for((host, slot)), local_rank)
                fresh.append(host)
        self._peak = max(self._peak, len(crew) + len(fresh))
        if not set(fresh) <= set(self.record.hosts):
            self._write(hosts=tuple(dict.fromkeys((*self.record.hosts, *fresh))))

    def _views(self, around: Surroundings) -> list[WorkerView]:
        order = {slot: n for n, slot in enumerate(around.given)}
        workers = sorted((w for w in self.crew.all.values() if not w.past),
                         key=lambda w: (order.get(w.place, len(order)), w.name))
        return [self._view(w, around) for w in workers]

    def _view(self, worker: Worker, around: Surroundings) -> WorkerView:
        report, leaving = worker.report, around.leaving(worker.host)
        return WorkerView(
            worker.name, worker.host, worker.local_rank, report.stage, report.generation, report.failed, report.version,
            report.store, leaving.seconds_left if leaving else None, leaving.why if leaving else "",
            worker.silent, worker.unheard_s(around.now), worker.ended or worker.gone, worker.stopped, worker.quiet_s,
            report.waits, report.step_s, report.resumed, worker.watch_fetch(around.now), report.unreached)

    def _expected(self, around: Surroundings) -> int:
        young = [w for w in self.crew.live() if w.wanted and not w.past and w.report.stage is Stage.STARTING]
        cooling = len(around.given) - sum(self.crew.at(place) is not None for place in around.given)
        return len(young) + cooling + around.coming

    def _apply(self, change: Change, around: Surroundings) -> list[Event]:
        match change:
            case Ordered():
                members = [self.crew.all[m] for m in change.members if m in self.crew.all]
                fresh = change.generation > 1 and members and all(m.report.generation == 0 for m in members)
                self._cause = change.cause
                self._group = change.members or self._group
                self._write(groups=(*self.record.groups, (change.generation, change.members))[-GROUPS:],
                            fence=change.generation if fresh else self.record.fence)
            case Formed():
                self.progress.formed(change, self.checkpoints.newest_version)
                return [GenerationFormed(around.unix, self.id, change.generation, change.members, change.cause,
                                         change.why, max(change.version, 0)),
                        *self.sizing.formed(change, self.crew, around.unix)]
            case Evicted():
                for name in change.workers:
                    if name in self.crew.all:
                        self.crew.all[name].wanted, self.crew.all[name].evicted = False, True
            case Finished():
                self._finished = change.members
        return []

    def _look_out(self, around: Surroundings) -> list[Event]:
        """Is what has been reached kept, where everybody who holds it goes?"""
        if self._finished:
            return []
        group, live = self.membership, self.crew.live()
        told = self.saving.look(self.id, around.unix, Sight(
            around.now, group.leaves_s, self.crew.version(), self.checkpoints.newest_version,
            any(w.report.generation > 0 for w in live), not group.needs_restore, bool(self.checkpoints.parts.ready()),
            around.hinted(w.host for w in live)))
        self._write(told=self.saving.told)
        return list(told)

    def _release(self, around: Surroundings) -> None:
        """Take workers of leaving hosts out of the orders as soon as nothing needs them any more."""
        for worker in self.crew.live():
            if around.leaving(worker.host) is None or worker.name in self.membership.members:
                continue
            held = worker.report.generation
            out = held == 0 or (self.membership.phase is Phase.RUNNING and held != self.membership.generation)
            if out and not self._holds_alone(worker, around):
                worker.wanted = False

    def _holds_alone(self, worker: Worker, around: Surroundings) -> bool:
        """Would the newest state be lost with this worker?"""
        mine, newest = worker.report.version, self.checkpoints.newest
        if mine <= 0 or (newest is not None and newest.version >= mine):
            return False
        return not any(o.report.version >= mine and around.leaving(o.host) is None and not (o.silent or o.stopped)
                       for o in self.crew.live() if o is not worker)

    def _rank(self) -> None:
        """Remember whose output is whose: the rank held, else the one it will probably have."""
        ranks = {name: rank for rank, name in enumerate(self.membership.members)}
        crew = [w for w in self.crew.all.values() if not w.ended and not w.past]
        unranked = [w.name for w in crew if w.rank < 0 and w.name not in ranks]
        said = self.membership.orders_of(unranked) if self.membership.generation > 0 and unranked else {}
        for place, worker in enumerate(crew):
            if worker.name in ranks:
                worker.rank = ranks[worker.name]
            elif worker.rank < 0:
                worker.rank = said[worker.name].provisional_rank if said else place

    # ---- where it stands

    def _settle(self, around: Surroundings) -> list[Event]:
        """The job's state after this step."""
        if self._finished:
            return self._tail(around)
        workers = [w for w in self.crew.all.values() if not w.past]
        if workers and all(w.done for w in workers):
            return self._end(JobState.SUCCEEDED, "every worker's script has ended", around)
        state, why = self._stands(around)
        return self._change(state, why, around)

    def _stands(self, around: Surroundings) -> tuple[JobState, str]:
        phase, why, live = self.membership.phase, self.membership.why, [w for w in self.crew.live() if not w.past]
        if not live:
            waits = around.why_waiting or self._cooling(around)
            return (JobState.RECOVERING if self.membership.generation else JobState.QUEUED), waits
        if phase is Phase.STARTING:
            if not self.spec.argv and any(w.seen for w in live):
                return JobState.RUNNING, f"the command runs on {len(live)} workers"
            return JobState.STARTING, why
        if phase is Phase.RUNNING or (phase is Phase.FORMING and self._cause in PLANNED):
            return JobState.RUNNING, why
        if phase is Phase.FORMING and self._cause == "start":
            return JobState.STARTING, why
        return JobState.RECOVERING, "; ".join(w for w in (why, around.why_waiting) if w)

    def _cooling(self, around: Surroundings) -> str:
        waits = [restart.ready_at(self.history, place) - around.now for place in around.given]
        return f"starts again in {max(0.0, min(waits)):.0f} s" if waits else "waits for hosts"

    def _tail(self, around: Surroundings) -> list[Event]:
        """Training has ended; the scripts run to their ends. Rank 0's is the job's."""
        first = self.crew.all.get(self._finished[0])
        if first is None or (first.ended and not first.done):
            return self._again(around)
        rest = [w for w in self.crew.live() if w.name in self._finished]
        if not first.done:
            return self._change(JobState.RUNNING, f"training has ended; {first.name} runs the script's rest", around)
        if self._done_at is None:
            self._done_at = around.now
        if rest and around.now - self._done_at < TAIL_S:
            return self._change(JobState.RUNNING, f"rank 0 has ended; waits for {rest[0].name}", around)
        return self._end(JobState.SUCCEEDED, "rank 0's script has ended", around)

    def _again(self, around: Surroundings) -> list[Event]:
        """Start all workers anew; they restore the newest checkpoint."""
        for worker in self.crew.all.values():
            worker.wanted, worker.past = False, True
        self.membership = self.sizing.membership()
        self.membership.adopt(self.record.groups[-1][0] if self.record.groups else 1, ())
        self._finished, self._group, self._done_at, self._peak = (), (), None, 0
        self._write(done=())
        return self._change(JobState.RECOVERING, "rank 0 was lost after training and before its script's end", around)

    def _cancelled(self, around: Surroundings) -> list[Event]:
        able = any(w.report.version > 0 and not w.silent for w in self.crew.live())
        if self.saving.waits(self.checkpoints.newest_version, able, around.now):
            return self._change(self.state, f"{self.record.cancelled}; waits for a last checkpoint", around)
        for worker in self.crew.live():
            worker.wanted = False
        if left := [w for w in self.crew.live() if w.seen]:
            return self._change(self.state, f"{self.record.cancelled}; waits for {left[0].name} to end", around)
        return self._end(JobState.CANCELLED, self.record.cancelled, around)

    def _end(self, state: JobState, why: str, around: Surroundings, error: str = "") -> list[Event]:
        for worker in self.crew.live():
            worker.wanted = False
        events: list[Event] = self.progress.last(self.membership, around)
        self._write(ended_at=around.unix, error=error)
        events += self._change(state, why, around)
        self.secrets = {}
        jobfile.drop_secrets(self.folder)
        self.log_bell.ring()
        return events

    def _change(self, state: JobState, why: str, around: Surroundings) -> list[Event]:
        if state is self.state:
            self.record = replace(self.record, why=why)  # of no use after a restart: not worth a write
            return []
        self._write(state=state, why=why)
        return [JobChanged(around.unix, self.id, state, why, self.record.version)]

    def _write(self, **changes: object) -> None:
        """Change the record; what a restart needs goes to disk at once."""
        before, self.record = self.record, replace(self.record, **changes)  # type: ignore[arg-type]
        if replace(before, why="", version=0) != replace(self.record, why="", version=0):
            self.unsaved = not jobfile.try_save(self.folder, self.record)
