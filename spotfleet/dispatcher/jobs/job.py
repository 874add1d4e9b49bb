"""Managed job: which workers should exist, their outcomes, and the job's state.

    QUEUED --has slots--> STARTING --first generation formed--> RUNNING <--> RECOVERING
        ^                                                      |
        '--- preempted for a job of a higher priority ---------'
       any of these --> SUCCEEDED | FAILED | CANCELLED

The reason for each wait is in `why`; it ends as follows:
- QUEUED: slots become free (the schedule names the job or host it waits for), or `cancel`.
- STARTING, RECOVERING: Membership (`membership/`) waits, with its own time limits.
- the end after training: the rest of the script on rank 0 finishes; it is started again if it is lost. Other ranks get
  TAIL_S after it; their failures are reported (`failures.py`).
- CANCELLED is reached when the agents report none of its workers, or the workers are confirmed gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet.dispatcher.checkpoints.last_copy import LastCopyTracker, StateSnapshot
from spotfleet.dispatcher.checkpoints.store import CheckpointStore
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.disk.logs import JobLogs
from spotfleet.dispatcher.disk.outputs import Outputs
from spotfleet.dispatcher.jobs import failures, restart, rounds
from spotfleet.dispatcher.jobs.context import JobContext
from spotfleet.dispatcher.jobs.divergence import DivergenceTracker
from spotfleet.dispatcher.jobs.failures import blame_early, classify_exits
from spotfleet.dispatcher.jobs.orders import restart_orders, worker_orders
from spotfleet.dispatcher.jobs.outside import Outside, OutsideTracker, advice
from spotfleet.dispatcher.jobs.progress import ProgressTracker
from spotfleet.dispatcher.jobs.restart import Cause, Slot
from spotfleet.dispatcher.jobs.sizing import Sizing
from spotfleet.dispatcher.jobs.workers import JobWorker, JobWorkers, started
from spotfleet.dispatcher.signal import Signal
from spotfleet.fleet.domain.events import Event, GenerationFormed, JobChanged, RanksDiverged
from spotfleet.membership import Change, Finished, Formed, Ordered, Phase, WorkerView
from spotfleet.membership.desk import Condition, observe, release, view_of
from spotfleet.membership.machine import RESTART_GAP
from spotfleet.membership.schedule import JobNeed
from spotfleet.model import RAY_KIND, HostState, JobSpec, JobState
from spotfleet.protocol.messages import AgentReport, GangOrder, SlotOrder, Stage
from spotfleet.words import size

SAVE_S = 15.0  # time for a running job's last checkpoint when the fleet goes down
SENDS_S = 2.0  # scripts whose results arrive sooner are not reported as sending
TAIL_S = 20.0  # time for the other ranks to end, once rank 0's script has ended
SECRETS_LOST = ("its secrets.json was damaged, and no host that answers holds its secrets: submit it again with "
                "`spotfleet train`")
FOLDER_S = 60.0  # wait for the newest checkpoint folder, while an older one is here
LOGS_S = 15.0  # wait for a job's last output after its end
MOST_REPORTED = 256  # workers of one host that ended under an earlier dispatcher
GROUPS = 8  # number of generations that a restarted dispatcher fences
PREEMPT_S = 5.0  # a job lacks hosts for this long before it takes those of another: a lost host may be replaced
OVERDUE_S = 1800.0  # jobs submitted later overtake one that waits for hosts for this time at most
PLANNED = ("join", "drain", "notice")  # causes of a generation that forms while the old one continues training


class ManagedJob:
    """Job with its workers, membership, checkpoints, logs and outputs.

    `name_for` returns the name of a slot's next worker; every name is unique.
    """

    def __init__(self, folder: Path, record: JobRecord, secrets: dict[str, str],
                 name_for: Callable[[Slot], str]) -> None:
        self.folder, self.record, self.secrets, self._name_for = folder, record, secrets, name_for
        self.workers = JobWorkers(record.job)
        self.sizing = Sizing(record.job, record.spec, record.asked, record.size)
        self.membership = self.sizing.membership()
        self.progress = ProgressTracker(record.job, record.repeated, record.recomputed)
        self.outside = OutsideTracker(record.job, record.spec)
        self.history = restart.History()
        self.round = rounds.RoundWatch()
        self._gang: GangOrder | None = None  # that of the current round
        self.offered = ""  # bundle of its checkpoint folder that a host sends now
        self.is_whole: Callable[[str], bool] = lambda bundle: True  # whether all of a bundle is on our disk
        self._unsaved_since: float | None = None  # monotonic: since when the newest checkpoint folder is missing here
        self.logs = JobLogs(folder / "logs")
        self.log_signal = Signal()
        self.outputs = Outputs(folder / "outputs")
        self.checkpoints = CheckpointStore(folder / "checkpoints", record.spec.checkpoint.keep)
        self.last_copy = LastCopyTracker(record.told)
        self.divergence = DivergenceTracker()
        self.unsaved = False  # the disk was full: its record is older than ours
        self.secrets_lost = False  # its secrets.json was damaged: it fails, unless a host sends them back
        self._group: tuple[str, ...] = ()  # newest generation that had members
        self._cause = ""  # cause of the newest generation
        self._finished: tuple[str, ...] = ()  # by rank, once training has ended
        self._done_at: float | None = None  # when rank 0's script ended
        self._adopted = False  # taken over from an earlier dispatcher process
        self._reported: set[str] = set()  # workers that only their agents know
        self._peak = 0  # most workers at once: for a script without init(), as many must end

    @property
    def id(self) -> str:
        return self.record.job

    @property
    def spec(self) -> JobSpec:
        return self.record.spec

    @property
    def state(self) -> JobState:
        return self.record.state

    def relocate(self, folder: Path) -> None:
        """Use `folder`, to which the job's was renamed."""
        self.folder, self.logs.folder, self.outputs.folder = folder, folder / "logs", folder / "outputs"
        self.checkpoints.relocate(folder / "checkpoints")

    def outputs_fetched(self, began: float) -> None:
        """Record a download of all outputs that began at `began`, Unix."""
        self._write(fetched_at=began)

    def move(self, by_s: float) -> None:
        """Move the record's instants, which were taken from a time that was wrong by `by_s`."""
        record = self.record
        self._write(submitted_at=record.submitted_at + by_s, ended_at=record.ended_at and record.ended_at + by_s,
                    fetched_at=record.fetched_at and record.fetched_at + by_s)

    # ---- queries

    def need(self, order: int, lacks_s: float = 0.0) -> JobNeed:
        """Return what the schedule is to know; `lacks_s` is the time for which the job has lacked hosts."""
        trains = self.membership.phase is Phase.RUNNING and self.record.version > 0 and self.outside.kind is None
        return JobNeed(self.id, self.sizing.least, self.sizing.places, order, self.spec.per_host,
                       takes=lacks_s >= PREEMPT_S, overdue=lacks_s >= OVERDUE_S,
                       yields=(self.spec.restarts and self.spec.retry) or self.spec.kind == RAY_KIND,
                       shrinks=(trains and not self.spec.restarts) or self.spec.kind == RAY_KIND,
                       group=self.spec.group)

    def has_worker_on(self, host: str) -> bool:
        return any(not w.ended for w in self.workers.on(host))

    def was_given_to(self, host: str) -> bool:
        """Return whether this host was ever given a worker. Logs and outputs may arrive after the workers' ends."""
        return host in self.record.hosts or self.has_worker_on(host)

    def knows_worker(self, worker: str) -> bool:
        """Return whether this is a worker of the job, ended or not, of which this process or the disk knows."""
        return worker in self.workers.named or worker in self._reported or self.outputs.has(worker)

    def accept_reported(self, worker: str) -> bool:
        """Return whether output of a worker is taken that only its agent knows; the number is limited for each host."""
        host = worker.partition("/")[0]
        if sum(name.startswith(f"{host}/") for name in self._reported) >= MOST_REPORTED:
            return False
        self._reported.add(worker)
        return True

    def takes_checkpoints_of(self, host: str) -> bool:
        """Return whether a checkpoint from this host counts: it has a worker, or sends its last one as the job ends."""
        return self.has_worker_on(host) or (bool(self.record.cancelled) and not self.state.ended
                                            and host in self.record.hosts)

    @property
    def bundles(self) -> set[str]:
        """The bundles that its hosts may need: working directory, checkpoint folder."""
        return {self.spec.bundle, *self.record.saved, self.offered, self._gang.saved if self._gang else ""} - {""}

    def leads(self, worker: str, generation: int) -> bool:
        """Return whether this worker is rank 0 of the newest generation, or was until its end is reported."""
        newest = next((g for g in reversed(self.record.groups) if g[1]), (0, ()))
        return self.spec.restarts and generation == newest[0] and worker in newest[1][:1] and not self.state.ended

    def save_folder(self, digest: str, at: float) -> set[str]:
        """Note the newest bundle of its checkpoint folder; return those that it needed before."""
        before = self.bundles
        self.offered = ""
        self._write(saved=(digest, *(old for old in self.record.saved[:1] if old != digest)), saved_at=at)
        return before

    def _restored(self) -> str:
        """Return the newest bundle of the checkpoint folder that is whole here; "" if there is none."""
        return next(filter(self.is_whole, self.record.saved), "")

    def _why_unsaved(self, now: float) -> str:
        """Return why the checkpoint folder is waited for: a new dispatcher fetches it from the checkpoint target."""
        if not self.record.saved or self.is_whole(self.record.saved[0]):
            self._unsaved_since = None
            return ""
        if self._unsaved_since is None:
            self._unsaved_since = now
        if self._restored() and now - self._unsaved_since >= FOLDER_S:
            return ""
        return "waits for its checkpoint folder, which is not whole on the dispatcher's disk"

    def log_rank(self, worker: str) -> int:
        return self.workers.all[worker].rank if worker in self.workers.all else -1

    def logs_complete(self, unix: float) -> bool:
        """Return True once every worker's last output has arrived, or the wait for it has ended."""
        over = unix - self.record.ended_at > LOGS_S
        return self.state.ended and (over or not any(w.seen for w in self.workers.live()))

    def held(self) -> dict[Slot, str]:
        """Return the slots with a process that exists or should exist, and their workers."""
        return {w.place: w.name for w in self.workers.live()}

    def cancel(self, why: str, save_until: float = 0.0) -> None:
        """End the job. With `save_until` (monotonic) it may continue until its progress is in a checkpoint."""
        if not self.state.ended and not self.record.cancelled:
            self._write(cancelled=why)
            self.last_copy.want(self.workers.version(), save_until)

    def orders(self) -> dict[str, list[SlotOrder]]:
        """Return by host the workers that should exist there."""
        wanted = [w for w in self.workers.live() if w.wanted]
        names = [w.name for w in wanted]
        self.checkpoints.look_at_hosts(w.host for w in wanted)
        by_worker = restart_orders(self.membership, names) if self.spec.restarts else worker_orders(
            self.membership, self.checkpoints, self.spec.checkpoint.interval_s, names, self.last_copy.wanted,
            self.progress.step_why)
        found: dict[str, list[SlotOrder]] = {}
        for worker in wanted:
            order = SlotOrder(worker.name, self.id, worker.slot, worker.local_rank, by_worker[worker.name], self._gang,
                              self.checkpoints.mounted)
            found.setdefault(worker.host, []).append(order)
        return found

    def receive(self, report: AgentReport, now: float) -> None:
        """Process an agent's report about this job; `now` is monotonic."""
        self.workers.receive(report)
        self.checkpoints.receive_probe(report.host, report.target)
        self._receive_store_reports(report)
        for damaged in report.damaged:
            if damaged.job == self.id and self.has_worker_on(report.host):
                self.checkpoints.report_damaged(damaged.version, damaged.digest, now)

    def _receive_store_reports(self, report: AgentReport) -> None:
        own = [w.report for w in report.workers if w.report.worker in self.workers.all and not self.state.ended]
        self.checkpoints.receive_reports(own, self.record.fence, self.membership.generation)

    def adopt(self, reports: list[AgentReport]) -> None:
        """After a restart, adopt the workers that agents report, and the last orders. Reports of hosts that never had
        this job are ignored: adopted workers would give those hosts its secrets."""
        self._adopted = True
        reports = [r for r in reports if not self.record.hosts or r.host in self.record.hosts]
        for report in reports:
            own = sorted((w for w in report.workers if w.report.job == self.id), key=lambda w: w.slot)
            for local_rank, state in enumerate(own):
                self.workers.add(state.report.worker, local_rank).seen = True
        for name in self.record.done:
            worker = self.workers.add(name, 0)
            worker.cause, worker.classified, worker.recorded = Cause.DONE, True, name not in self.record.unfinished
            if not worker.recorded and self.record.groups:
                worker.report = replace(worker.report, stage=Stage.INIT)
        for generation, members in self.record.groups:
            self.membership.adopt(generation, members)
            self._group = members or self._group
        newest = self.checkpoints.newest
        trained = max(self.record.fence, newest.generation if newest else 0)
        if trained > self.membership.generation:  # our record is behind: its numbers must not be used again
            self.membership.adopt(trained, ())
        if self.record.preempted:  # its processes have been asked to end
            self.membership, self._group = self.sizing.membership(self.membership.generation + RESTART_GAP), ()
            for worker in self.workers.live():
                worker.wanted, worker.past = False, True
        for name in self._group:
            if name not in self.workers.all:
                worker = self.workers.add(name, 0)
                worker.silent = worker.seen = True  # its agent has not reconnected; the worker may still train
        self._write(hosts=tuple(dict.fromkeys((*self.record.hosts, *sorted(self.workers.hosts())))))
        for report in reports:
            self.workers.receive(report)
            self._receive_store_reports(report)
        resumed = max((w.report.resumed for w in self.workers.all.values()), default=0)
        steppers = [m for g, m in self.record.groups if m and (g != self.record.fence or resumed >= g)]
        self.progress.adopt(self.workers, steppers[-1] if steppers else (), self.record.version)
        self._prepare_gang()

    # ---- one step

    def step(self, context: JobContext) -> list[Event]:
        """Update the job with everything known now; return the events to record."""
        for host in self.workers.hosts():
            view = context.hosts.get(host)
            if view is None or view.host.state is HostState.STOPPED or view.host.revoked:
                self.workers.lose(host)
        if self.state.ended:
            self.workers.forget(lambda _: False)
            return []
        if self.secrets_lost:
            return self._end(JobState.FAILED, SECRETS_LOST, context)
        self.history = restart.progressed(self.history, self.workers.version())
        events = [*self.checkpoints.take_news(self.id, context.unix), *self.logs.take_news(self.id, context.unix),
                  *self._classify_exits(context)]
        if not self.state.ended:
            events += self._react_to_divergence(context) or self._advance(context)
        return events

    def _react_to_divergence(self, context: JobContext) -> list[Event]:
        found = self.divergence.update(self.workers.all.values(), self.checkpoints.newest_version)
        if found is None:
            return []
        event = RanksDiverged(context.unix, self.id, found.version, found.checkpoint, found.error)
        ends = self._end(JobState.FAILED, found.why, context, found.error) if found.fails else []
        return [event, *(ends or self._restart_all(found.why, context))]

    def _advance(self, context: JobContext) -> list[Event]:
        if self.record.cancelled:
            return self._cancelled(context)
        if context.preempted:
            return self._preempt(context)
        if self.record.preempted and context.given:
            self._write(preempted="")
        shrunk = [self._remark(f"gives hosts to {context.shrunk}", context)] if context.shrunk else []
        return [*shrunk, *self._train(context)]

    def _train(self, context: JobContext) -> list[Event]:
        outside = self.outside.update(self.workers, self.membership, self.record.version, context)
        if not self.spec.restarts and self.outside.loss(self._group, self.workers, context):
            return [*outside, *self._outside_lost(context)]
        self._fill(context)
        self.sizing.update(self.membership, self.workers)
        if self.spec.restarts and (why := self._why_no_round(context)):
            return [*outside, *self._change(*self._waits(why), context)]
        self.membership.is_withheld = self.unsaved
        before = self.membership.generation
        changes = observe(self.membership, self.workers.all, self._views(context), self._coming(context), context.now)
        if self.spec.restarts and (end := self.round.update(
                self._round_members(), self.membership, changes, before, context)) is not None:
            return [*outside, *self._end_round(end, context)]
        events = [e for change in changes for e in self._apply(change, context)]
        founding = self.membership.generation == 1 and self.membership.phase is Phase.FORMING and not self._adopted
        self.checkpoints.need(self.membership.needs_restore and not founding and not self.spec.restarts)
        leaving = {w.name for w in self.workers.live() if context.leaving(w.host) is not None
                   and not context.keeps(w.host)}
        release(self.membership, self.workers.live(), leaving, self.checkpoints.newest_version)
        self._rank()
        events += [*outside, *self.progress.update(self.workers, self.membership, context),
                   *self._update_last_copy(context)]
        self._write(version=max(self.membership.version, 0) or self.record.version, repeated=self.progress.repeated,
                    recomputed=self.progress.recomputed, asked=self.sizing.asked, size=self.sizing.size,
                    outside=self.outside.steps, floor=max(self.record.floor, self.checkpoints.floor))
        # Workers that train alone do not wait for a lost one of their group.
        group = () if self.outside.kind is Outside.ALONE else self._group
        self.workers.forget(lambda w: w.name in group or w.done or context.now - w.ended_at <= restart.TOGETHER_S)
        return [*events, *self._settle(context)]

    def _classify_exits(self, context: JobContext) -> list[Event]:
        early = [] if self.spec.gang else blame_early(
            self.workers, self.spec, self.membership.generation, self.record.version, context)
        outcome = classify_exits(self.id, self.workers, self.history, lambda: frozenset(self._group) or started(
            w for w in self.workers.all.values() if not w.ended or context.now - w.ended_at <= restart.TOGETHER_S),
            context, lambda w: self.spec.restarts and rounds.belongs(w, self._group))
        self.history = outcome.history
        done = [w for w in self.workers.all.values() if w.done and not w.past]
        self._write(done=tuple(w.name for w in done), unfinished=tuple(w.name for w in done if not w.returned))
        events: list[Event] = list(outcome.events)
        if early:
            events.append(self._remark(failures.clauses(f"{w.name}: {w.error}" for w in early), context))
        first = self.workers.all.get((self._finished or self._group or ("",))[0])
        if outcome.failed is None or (first is not None and first.returned and (first.done or not first.ended)):
            return events  # after training rank 0 alone decides about the job
        return [*events, *self._end(JobState.FAILED, outcome.failed.why, context, outcome.failed.error)]

    def _fill(self, context: JobContext) -> None:
        """Start a worker in each given slot that has none, unless the slot cools down or the script has ended."""
        if self._finished:
            return
        workers = [w for w in self.workers.all.values() if not w.past and (w.done or not w.ended)]
        if self.spec.restarts and not (self.spec.gang or workers):
            self._gang = GangOrder((), self.record.restarts, self._restored())
        self._peak = max(self._peak, len(workers))
        # once a script has ended, the number of workers does not exceed the earlier peak
        room = self._peak - len(workers) if any(w.done for w in workers) else len(context.given)
        local: dict[str, int] = {}
        fresh: list[str] = []
        for host, slot in context.given:
            local_rank = local[host] = local.get(host, -1) + 1
            free = len(fresh) < room and self.workers.at((host, slot)) is None
            if free and restart.ready_at(self.history, (host, slot)) <= context.now:
                self.workers.add(self._name_for((host, slot)), local_rank)
                fresh.append(host)
        self._peak = max(self._peak, len(workers) + len(fresh))
        if not set(fresh) <= set(self.record.hosts):
            self._write(hosts=tuple(dict.fromkeys((*self.record.hosts, *fresh))))

    def _views(self, context: JobContext) -> list[WorkerView]:
        order = {slot: n for n, slot in enumerate(context.given)}
        workers = sorted((w for w in self.workers.all.values() if not w.past),
                         key=lambda w: (order.get(w.place, len(order)), w.name))
        return [self._view(w, context) for w in workers]

    def _view(self, worker: JobWorker, context: JobContext) -> WorkerView:
        leaving, stage = context.leaving(worker.host), worker.report.stage
        exited, silent = worker.ended or worker.gone, worker.silent
        if self.spec.restarts:
            stage = Stage.READY if stage is Stage.INIT else stage  # it waits in init() for the next round
            if worker.name in self._group:  # the round ends for it when `rounds` has judged its end
                exited = worker.ended and not (worker.done or rounds.belongs(worker, self._group))
            if worker.done:
                silent, leaving = False, None
        condition = Condition(exited, leaving.seconds_left if leaving else None, leaving.why if leaving else "")
        return view_of(worker, condition, context.now, stage, silent)

    def _coming(self, context: JobContext) -> int:
        """Return the number of workers that are about to be started."""
        cooling = len(context.given) - sum(self.workers.at(place) is not None for place in context.given)
        return cooling + context.coming

    def _apply(self, change: Change, context: JobContext) -> list[Event]:
        match change:
            case Ordered():
                members = [self.workers.all[m] for m in change.members if m in self.workers.all]
                fresh = change.generation > 1 and members and all(m.report.generation == 0 for m in members)
                self._cause = change.cause
                self._group = change.members or self._group
                self._write(groups=(*self.record.groups, (change.generation, change.members))[-GROUPS:],
                            ordered=max(self.record.ordered, change.generation),
                            fence=change.generation if fresh else self.record.fence)
                self._prepare_gang()
            case Formed():
                self.progress.formed(change, self.checkpoints.newest_version)
                return [GenerationFormed(context.unix, self.id, change.generation, change.members, change.cause,
                                         change.why, max(change.version, 0)),
                        *self.sizing.formed(change, self.workers, context.unix)]
            case Finished():
                self._finished = change.members
        return []

    def _update_last_copy(self, context: JobContext) -> list[Event]:
        """Update the tracker of the last copy: is the progress in a checkpoint before all of its holders leave?"""
        if self._finished:
            return []
        group, live = self.membership, self.workers.live()
        events = self.last_copy.update(self.id, context.unix, StateSnapshot(
            context.now, group.leaves_s, self.workers.version(), self.checkpoints.newest_version,
            any(w.report.generation > 0 for w in live), not group.needs_restore, bool(self.checkpoints.parts.ready()),
            context.hinted(w.host for w in live)))
        self._write(told=self.last_copy.reported)
        return list(events)

    def _rank(self) -> None:
        """Update the rank under which each worker's output is logged: the rank it holds, else its probable one."""
        ranks = {name: rank for rank, name in enumerate(self.membership.members)}
        workers = [w for w in self.workers.all.values() if not w.ended and not w.past]
        unranked = [w.name for w in workers if w.rank < 0 and w.name not in ranks]
        orders = self.membership.orders_of(unranked) if self.membership.generation > 0 and unranked else {}
        for place, worker in enumerate(workers):
            if worker.name in ranks:
                worker.rank = ranks[worker.name]
            elif worker.rank < 0:
                probable = orders[worker.name].provisional if orders else None
                worker.rank = probable.rank if probable else place

    # ---- state

    def _settle(self, context: JobContext) -> list[Event]:
        """Update the job's state after this step."""
        if self._finished:
            return self._tail(context)
        workers = [w for w in self.workers.all.values() if not w.past]
        if workers and all(w.done for w in workers):
            return self._end(JobState.SUCCEEDED, self.outside.ended_why, context)
        state, why = self._stands(context)
        return self._change(state, why, context)

    def _stands(self, context: JobContext) -> tuple[JobState, str]:
        phase, why, live = self.membership.phase, self.membership.why, [w for w in self.workers.live() if not w.past]
        if not live:
            return self._waits(context.why_waiting or self._cooling(context) + self._refused())
        if sends := self._sends(live, context):
            return JobState.RUNNING, f"its script has ended; {sends}"
        if self.spec.restarts and (hangs := rounds.hanging(self.id, self._round_members(), context.now)):
            return JobState.RUNNING, hangs
        if context.ray is not None:
            begun = JobState.RECOVERING if context.ray.lost else JobState.STARTING
            return JobState.RUNNING if context.ray.up else begun, context.ray.why + self._refused()
        if not self.spec.gang and (outside := self.outside.why(sum(w.begun for w in live))):
            return JobState.RUNNING if self.outside.sure else JobState.STARTING, outside
        if self.record.restarts and phase in (Phase.STARTING, Phase.FORMING):
            return JobState.RECOVERING, why
        if phase is Phase.STARTING:
            return JobState.STARTING, why
        if phase is Phase.RUNNING or (phase is Phase.FORMING and self._cause in PLANNED):
            return JobState.RUNNING, why
        if phase is Phase.FORMING and self._cause == "start":
            return JobState.STARTING, why
        return JobState.RECOVERING, "; ".join(w for w in (why, context.why_waiting) if w)

    def _waits(self, why: str) -> tuple[JobState, str]:
        """Return the state of a job without processes that waits for hosts, or for its last processes to end."""
        if self.record.preempted:
            return JobState.QUEUED, f"preempted by {self.record.preempted}; {why}"
        return JobState.RECOVERING if self.membership.generation or self.record.restarts else JobState.QUEUED, why

    def _sends(self, live: list[JobWorker], context: JobContext) -> str:
        """Return who sends results, once the scripts of all these workers have ended; else ""."""
        for worker in live:
            if worker.gone and worker.gone_at is None:
                worker.gone_at = context.now
        if any(w.gone_at is None or context.now - w.gone_at < SENDS_S for w in live):
            return ""
        left = [u for results in context.unsent.values() for u in results if u.worker in {w.name for w in live}]
        more = f", {size(sum(u.bytes for u in left))} left" if left else ""
        return f"{live[0].host} sends its output{more}"

    def _outside_lost(self, context: JobContext) -> list[Event]:
        """End the job of a script that cannot survive a loss, once the loss's cause can be known."""
        failed = self.outside.failure(self._group, self.workers, context)
        if failed is not None:
            return self._end(JobState.FAILED, failed.why, context, failed.error)
        return self._change(self.state, self.outside.loss(self._group, self.workers, context), context)

    def _cooling(self, context: JobContext) -> str:
        waits = [restart.ready_at(self.history, place) - context.now for place in context.given]
        return f"starts again in {max(0.0, min(waits)):.0f} s" if waits else "waits for hosts"

    def _refused(self) -> str:
        """Return why the last host was refused that has joined no Ray cluster; "" if there is none."""
        failed = self.history.setups[-1:] if self.spec.kind == RAY_KIND else ()
        return "".join(f"; {restart.first_line(end.error)}" for end in failed)

    def _tail(self, context: JobContext) -> list[Event]:
        """Wait for the scripts to end after training. The end of rank 0's script is the job's end."""
        first = self.workers.all.get(self._finished[0])
        if first is None or (first.ended and not first.done):
            return self._restart_all("rank 0 was lost after training and before its script's end", context)
        events: list[Event] = self._note_tail(failures.after_training(self._finished, self.workers.all), context)
        rest = [w for w in self.workers.live() if w.name in self._finished]
        if not first.done:
            why = self._sends([first], context) or f"{first.name} runs the script's rest"
            why = f"training has ended; {why}"
            return [*events, *self._change(JobState.RUNNING, why, context)]
        if self._done_at is None:
            self._done_at = context.now
        if rest and context.now - self._done_at < TAIL_S:
            return [*events, *self._change(JobState.RUNNING, f"rank 0 has ended; waits for {rest[0].name}", context)]
        events += self._note_tail(failures.cut_off(self._finished, rest, TAIL_S), context)
        why = "; ".join(filter(None, ["rank 0's script has ended", failures.clauses(self.record.tail)]))
        return [*events, *self._end(JobState.SUCCEEDED, why, context)]

    def _note_tail(self, clauses: tuple[str, ...], context: JobContext) -> list[Event]:
        """Record and report failures of scripts after training that are not recorded yet."""
        if not (new := tuple(c for c in clauses if c not in self.record.tail)):
            return []
        self._write(tail=(*self.record.tail, *new))
        return [self._remark(failures.clauses(new), context)]

    def _round_members(self) -> list[JobWorker]:
        """Return the members of the round, sorted by rank."""
        return [self.workers.all[m] for m in self._group if m in self.workers.all]

    def _prepare_gang(self) -> None:
        """Note what the processes of the newest generation need to start."""
        if not self.spec.gang:
            return
        members = [self.workers.all[m] for m in self.membership.members if m in self.workers.all]
        self._gang = rounds.gang_order(members, self.record.restarts, self._restored()) if members else None

    def _why_no_round(self, context: JobContext) -> str:
        """Return why no round may begin: a process of an earlier one may still run on a host that answers, or the
        checkpoint folder is not here. "" if one may, or runs."""
        if self.membership.generation:
            return ""
        left = next((w for w in self.workers.live() if w.past and not w.silent), None)
        return f"waits for {left.name} to end" if left else self._why_unsaved(context.now)

    def _end_round(self, end: rounds.RoundEnd, context: JobContext) -> list[Event]:
        """End all processes, to start them anew or to fail the job."""
        if fails := rounds.may_restart(self.spec, end, self.record.failures):
            self._write(exit_status=end.status)
            return self._end(JobState.FAILED, fails, context, end.error)
        why = rounds.restart_why(self.spec, end, self.record.failures)
        waiting = [w for w in self.workers.live() if self.spec.gang and w.name not in self._group and not w.past]
        self.round, self._gang = rounds.RoundWatch(), None
        self._write(restarts=self.record.restarts + 1, failures=self.record.failures + end.failed)
        events = self._restart_all(why, context)
        for worker in waiting:  # nothing of theirs has begun
            worker.wanted, worker.past = True, False
        return events

    def _preempt(self, context: JobContext) -> list[Event]:
        """End all processes, in the time that they get to save, and go back to the queue."""
        begun = any(w.begun for w in self.workers.live())
        self.round, self._gang = rounds.RoundWatch(), None
        self._write(preempted=context.preempted, restarts=self.record.restarts + begun)
        why = f"preempted by {context.preempted}; its processes get {self.spec.grace_s:.0f} s to save"
        return self._restart_all(why, context, JobState.QUEUED)

    def _restart_all(self, why: str, context: JobContext, state: JobState = JobState.RECOVERING) -> list[Event]:
        """Restart all workers; they restore the newest checkpoint."""
        for worker in self.workers.all.values():
            worker.wanted, worker.past = False, True
        newest = self.record.groups[-1][0] if self.record.groups else 1
        if self.spec.restarts:
            self.membership = self.sizing.membership(newest)
        else:
            self.membership = self.sizing.membership()
            self.membership.adopt(newest, ())
        self._finished, self._group, self._done_at, self._peak = (), (), None, 0
        self._write(done=(), unfinished=(), tail=())
        return self._change(state, why, context)

    def _cancelled(self, context: JobContext) -> list[Event]:
        able = any(w.report.version > 0 and not w.silent for w in self.workers.live())
        if self.last_copy.waits(self.checkpoints.newest_version, able, context.now):
            return self._change(self.state, f"{self.record.cancelled}; waits for a last checkpoint", context)
        for worker in self.workers.live():
            worker.wanted = False
        if left := [w for w in self.workers.live() if w.seen]:
            why = self._sends(left, context) or f"waits for {left[0].name} to end"
            return self._change(self.state, f"{self.record.cancelled}; {why}", context)
        holders = [h for h, of in context.unsent.items() if any(u.kind == "checkpoint" for u in of)]
        if context.going_down and holders and holders[0] in context.hosts:
            return self._change(self.state, f"{self.record.cancelled}; {holders[0]} sends a checkpoint", context)
        return self._end(JobState.CANCELLED, self.record.cancelled, context)

    def _end(self, state: JobState, why: str, context: JobContext, error: str = "") -> list[Event]:
        for worker in self.workers.live():
            worker.wanted = False
        present = [w.report.version for w in self.workers.all.values() if not w.past]
        self._write(version=max([self.record.version, *present]))  # the last reports may have come in this step
        events: list[Event] = [*self.outside.last(context), *self.progress.last(self.record.version, context)]
        line = advice(error)
        why = f"{why}: {line}" if line else why
        hint = line or (self.outside.ended_hint if state is JobState.SUCCEEDED else self.outside.hint)
        self._write(ended_at=context.unix, error=error, hint=hint, secrets_digest="")
        events += self._change(state, why, context)
        self.secrets = {}
        jobfile.drop_secrets(self.folder)
        self.log_signal.notify()
        return events

    def _remark(self, why: str, context: JobContext) -> JobChanged:
        return JobChanged(context.unix, self.id, self.state, why, self.record.version)

    def _change(self, state: JobState, why: str, context: JobContext) -> list[Event]:
        if state is self.state:
            self.record = replace(self.record, why=why)  # not needed after a restart, so it is not written
            return []
        self._write(state=state, why=why)
        return [self._remark(why, context)]

    def _write(self, **changes: object) -> None:
        """Change the record; write it to disk at once if a restart needs the change."""
        before, self.record = self.record, replace(self.record, **changes)  # type: ignore[arg-type]
        if replace(before, why="", version=0, outside=0) != replace(self.record, why="", version=0, outside=0):
            self.unsaved = not jobfile.try_save(self.folder, self.record)
