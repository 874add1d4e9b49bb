"""Job desk: submission of jobs, their names, their folders on disk, and the hosts that each job holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from spotfleet.dispatcher.checkpoints.seals import JobSeals, SealKey
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile, space
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.dispatcher.disk.jobfile import JobRecord, StoredJob
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.jobs.restart import Slot
from spotfleet.dispatcher.lifecycle.shutdown import FleetShutdown
from spotfleet.dispatcher.policy import PolicyController
from spotfleet.dispatcher.retention import Retention
from spotfleet.errors import NoCapacity, UsageError
from spotfleet.fleet.domain.events import CheckpointKept, Event, JobChanged, JobSubmitted
from spotfleet.membership.schedule import Allocation, HostRoom, allocate, by_priority
from spotfleet.model import RAY_KIND, JobSpec
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.folder import name_of_fleet
from spotfleet.storage.json_file import digest_of_json
from spotfleet.transport.boot import DispatcherBoot

NUMBERS = 1000  # job numbers per dispatcher machine: the next machine may know none of them, and begins above them


class WorkerNames:
    """Names for workers. They are unique across processes and machines of the dispatcher."""

    def __init__(self, machine: int, start: int) -> None:
        """`machine`: see `machine_number`; `start`: see `jobfile.next_boot`."""
        self.machine = machine
        self._life, self._named = start, 0

    def next(self, place: Slot) -> str:
        self._named += 1
        lives = [f"d{self.machine}"] * (self.machine > 0) + [str(self._life)] * (self._life > 1)
        incarnation = "-".join([*lives, str(self._named)])
        return f"{place[0]}/{place[1]}/{incarnation}"


def load_job(boot: DispatcherBoot, stored: StoredJob, names: WorkerNames) -> ManagedJob:
    """Manage a job of our disk."""
    job = ManagedJob(stored.folder, stored.record, stored.secrets, names.next)
    job.secrets_lost = stored.secrets_lost
    spec = boot.spec.checkpoint
    job.checkpoints.target = spec.folder
    job.checkpoints.url = spec.url and f"{spec.url}/{name_of_fleet(boot.fleet, boot.ca)}/{job.id}"
    job.checkpoints.use_seals(JobSeals(SealKey(boot.fleet_secret), names.machine, lambda: job.record,
                                       lambda: job.secrets))
    return job


class JobDesk:
    """Submission and allocation of jobs."""

    def __init__(self, core: Core, names: WorkerNames, bundles: BundleStore, policy: PolicyController,
                 shutdown: FleetShutdown, retention: Retention, waits: Callable[[], str]) -> None:
        """`waits` returns why machines wait; empty if they do not."""
        self._core, self.names, self.bundles = core, names, bundles
        self._policy, self._shutdown, self._waits = policy, shutdown, waits
        self.retention = retention
        self._anew = core.journal.state.taken_over is not None  # copies may lack jobs that hosts or target know
        self.last_known = 0  # the highest number of a job at our start, lost ones included
        self.allocation = Allocation({}, {})
        self.prepared: Callable[[JobSpec], JobSpec] = lambda spec: spec  # the spec of a new job as it is kept
        self._lacks: dict[str, float] = {}  # monotonic: since when each job lacks hosts for its fewest workers
        for job in core.jobs.values():
            job.is_whole = bundles.is_whole

    async def submit(self, spec: JobSpec, secrets: dict[str, str], *, wait: bool) -> str:
        await asyncio.to_thread(self.bundles.refuse_incomplete, spec.bundle)
        self._check(spec, wait)
        spec = self.prepared(spec)
        space.refuse_if_full(self._core.home)
        record = JobRecord(self.name_for(spec), self._policy.sized(spec), self._core.unix(), seals=True)
        job = self.add(record, secrets)
        self._core.step_soon()
        return job.id

    def name_for(self, spec: JobSpec) -> str:
        """Return the name of the next job."""
        jobs = self._core.jobs
        used = max(self._core.journal.state.last_job, self._past_number, self.last_known)
        first = NUMBERS * self.names.machine if not (jobs or used) or self._anew else 0
        groups = [g.name for g in self._core.boot.spec.groups]
        return jobfile.name_for(spec, jobs, max(used, first), self._core.boot.fleet, groups)

    @cached_property
    def _past_number(self) -> int:
        """The highest number in `past` at our start: a damaged ledger does not know it."""
        return self.retention.last_number

    def find(self, name: str) -> ManagedJob | None:
        """Return the job of that name, also if it has left memory; None while it is being pruned."""
        return None if self.retention.is_going(name) else self._core.jobs.get(name) or self.retention.find(name)

    def was_given(self, name: str, host: str) -> bool:
        """Return whether a host was ever given a worker of this job, which may have left memory."""
        try:
            found = self.find(name)
        except ValueError:  # its record is damaged
            return False
        return found is not None and found.was_given_to(host)

    def add(self, record: JobRecord, secrets: dict[str, str], *, in_ledger: bool = False) -> ManagedJob:
        """Write a new job to the disk and, unless it is there, to the ledger, and manage it from now on."""
        folder = self._core.home / "jobs" / record.job
        if record.state.ended:
            jobfile.drop_secrets(folder)
        else:
            record = replace(record, secrets_digest=digest_of_json(secrets))
            jobfile.save_secrets(folder, secrets)
        jobfile.save(folder, record)  # last: a folder without it is not a job
        job = self._core.jobs[record.job] = load_job(self._core.boot, StoredJob(folder, record, secrets), self.names)
        job.is_whole = self.bundles.is_whole
        if not in_ledger:
            self._core.journal.note(jobfile.submission(record, secrets))
        return job

    def allocate(self, jobs: list[ManagedJob], rooms: Sequence[HostRoom], now: float) -> None:
        """Allocate the hosts to these jobs, which have not ended; `now` is monotonic."""
        order = {name: n for n, name in enumerate(self._core.jobs)}
        needs = by_priority([j.need(order[j.id], now - self._lacks.get(j.id, now)) for j in jobs],
                            {j.id: j.spec.priority for j in jobs})
        self.allocation = allocate(needs, rooms, self.allocation.held)
        self._lacks = {job: self._lacks.get(job, now) for job in self.allocation.lacking}

    def hold(self, job: ManagedJob) -> None:
        """Allocate to the job the hosts that its workers are on."""
        held = {**self.allocation.held, job.id: tuple(sorted(job.workers.hosts()))}
        self.allocation = Allocation(held, self.allocation.why)

    def cancel(self, job: ManagedJob) -> None:
        job.cancel("asked by `spotfleet cancel`")
        self._core.step_soon()

    def save_folder(self, job: ManagedJob, digest: str) -> None:
        """Make a whole bundle the newest state of the job's checkpoint folder, and drop those that nobody needs."""
        self._drop(job.save_folder(digest, self._core.unix()))
        self._core.step_soon()

    def offer_folder(self, job: ManagedJob, digest: str) -> None:
        """Note the bundle of the job's checkpoint folder that a host begins to send."""
        before, job.offered = job.bundles, digest
        self._drop(before)

    def _drop(self, bundles: set[str]) -> None:
        """Remove those of `bundles` that no job needs any more."""
        kept = {bundle for job in self._core.jobs.values() for bundle in job.bundles}
        for bundle in bundles - kept:
            self.bundles.drop(bundle, kept)

    def checkpoint_kept(self, job: ManagedJob, kept: Checkpoint) -> None:
        """Record that the dispatcher holds a whole checkpoint."""
        event = CheckpointKept(self._core.unix(), job.id, kept.version, kept.generation, kept.digest, kept.bytes,
                               kept.url)
        self._core.journal.note(event)
        self._core.step_soon()

    def _check(self, spec: JobSpec, wait: bool) -> None:
        """Raise UsageError for an impossible job, NoCapacity for one that must start now but would wait."""
        if self._shutdown.why:
            raise NoCapacity(f"the fleet goes down: {self._shutdown.why}", hint="start it again with `spotfleet up`")
        if not spec.argv and not spec.run:
            raise UsageError("spec.run: the job has neither a script nor a command", hint="name a script")
        if spec.kind != RAY_KIND:  # the Ray cluster has hosts of any group, as its demand makes them
            self._check_group(spec.group)
        self._policy.check(spec)
        if not 1 <= spec.min_workers <= spec.max_workers:
            raise UsageError(f"spec.min_workers: {spec.min_workers} to {spec.max_workers} is no range from 1 on")
        if not wait:
            self._check_capacity(spec)

    def _check_group(self, group: str) -> None:
        fleet = self._core.boot.spec
        known = ", ".join(g.name for g in fleet.groups)
        if group and group not in self._core.ranges:
            raise UsageError(f"spec.group: {group[:40]!r} is no group of this fleet's hosts",
                             hint=f"use one of: {known}" if known else "this fleet has no groups: leave it out")
        if not group and not fleet.shares_jobs:
            raise UsageError(f"spec.group: the groups have different machines, and the job names none of them: {known}",
                             hint=f"--group {fleet.groups[0].name}")

    def _check_capacity(self, spec: JobSpec) -> None:
        views = [v for v in self._core.views() if v.host.counts and spec.group in ("", v.host.group)]
        nodes = self._core.ranges[spec.group] if spec.group else self._core.nodes
        slots = 1 if spec.per_host else max([1, *(v.slots for v in views)])
        if nodes.min == 0 and not views and not spec.per_host:
            return  # the slots are known once a host is up: until then, `status` has the reason of the wait
        most, of = nodes.max * slots, f"its group {spec.group}" if spec.group else "the fleet"
        if most < spec.min_workers:
            what, option = ("hosts", "--nodes") if spec.per_host else ("workers", "--np")
            raise NoCapacity(f"the job needs {spec.min_workers} {what}; {of} has at most {most}",
                             hint=f"lower {option}, or raise nodes.max in the fleet file and run `spotfleet up` again")
        if spec.kind == RAY_KIND:
            return
        up, soon = sum(1 if spec.per_host else v.slots for v in views if v.usable), self._policy.held * slots
        waits = self._waits()
        target = nodes.target if nodes.min else nodes.max
        if up + soon < spec.min_workers and (waits or target * slots < spec.min_workers):
            raise NoCapacity(f"too few workers can start: the job needs {spec.min_workers}, there is room for {up} now"
                             + (f"; {waits}" if waits else ""),
                             hint="add --wait to queue it until capacity comes, or lower --np", scope="region")


def unwritten(events: Iterable[Event], jobs: Iterable[ManagedJob]) -> list[Event]:
    """Return events that the ledger lacks and jobs on disk imply: the last process died between the two writes."""
    submitted, ended, jobs = set(), set(), list(jobs)
    for event in events:
        if isinstance(event, JobSubmitted):
            submitted.add(event.job)
        elif isinstance(event, JobChanged) and event.state.ended:
            ended.add(event.job)
    found: list[Event] = [jobfile.submission(j.record, j.secrets) for j in jobs if j.id not in submitted]
    return found + [JobChanged(j.record.ended_at, j.id, j.state, j.record.why, j.record.version)
                    for j in jobs if j.state.ended and j.id not in ended]
