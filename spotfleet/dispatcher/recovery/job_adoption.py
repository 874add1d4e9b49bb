"""Adoption of jobs that are missing or outdated on this dispatcher's disk, from data that agents hold.

    an agent reports workers of such a job --request (`AgentOrders.tell`)--> answer (`AgentReport.held`)
        answer with a WorkerLaunch, by a host of the ledger --> the job is adopted, and requested no more
        answer without one, and the settle window is over --> dropped here: its workers never had anything to run

Until then an agent leaves the workers alone. A job on our disk is requested too, for its newest generation, if the disk
may be behind: its record was restored from the checkpoint target, or an agent reports a higher generation.

Unknown jobs are accepted for ADOPT_S after a new machine has taken over, and never otherwise: an intruder on a host
must not be able to create jobs. A job that had ended stays ended, whatever a host still holds of it.

A job of the ledger whose job.json was lost is accepted from its own hosts. So are the secrets of a job whose
secrets.json was damaged; with a digest in job.json they must have it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.dispatcher.jobs import validation
from spotfleet.dispatcher.reports import LARGEST, WORKER_NAME
from spotfleet.errors import UsageError
from spotfleet.fleet.domain.events import Event, JobChanged, JobsPruned, TakenOver
from spotfleet.model import JobState
from spotfleet.protocol.messages import AgentReport, Assignment, HeldJob, WorkerLaunch
from spotfleet.storage.json_file import digest_of_json

log = logging.getLogger(__name__)
ADOPT_S = 3600.0
JOB_NAME = re.compile(r"\w[\w.-]{0,99}")

Groups = tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class AdoptedJob:
    """Job made from data that hosts hold."""

    record: JobRecord
    secrets: dict[str, str] = field(repr=False)
    hosts: tuple[str, ...]  # hosts that hold it


class Adoption:
    """Requests to agents about jobs, and their answers."""

    def __init__(self, granted: Callable[[str, Assignment], bool] = lambda job, given: False) -> None:
        """`granted` returns whether a dispatcher of this fleet has ordered an assignment of a job."""
        self._granted = granted
        self.open_until = 0.0  # Unix; unknown jobs are accepted until then
        self.behind: set[str] = set()  # jobs on our disk that were restored: agents may have newer data
        self.lost: dict[str, frozenset[str]] = {}  # jobs of the ledger that our disk has lost -> their hosts
        self.ended: set[str] = set()  # jobs that had ended, see `ended_in`: none of them runs again
        self._asked: dict[str, tuple[str, ...]] = {}  # host -> jobs
        self._answers: dict[str, dict[str, HeldJob]] = {}  # host -> job -> its answer

    def receive(self, report: AgentReport, known: Mapping[str, JobRecord], unix: float, *, settled: bool) -> None:
        """Store an agent's answers, and decide its next request."""
        here = dict.fromkeys(w.report.job for w in report.workers)
        answers = self._answers.setdefault(report.host, {})
        answers.update((held.job, held) for held in report.held if held.job in self.asked(report.host))
        strange = [job for job in here if job not in known and self._may_bring(report.host, job, unix)]
        if settled:
            asked = [job for job in strange if job not in answers or answers[job].launch is not None]
        else:
            ahead = [job for job in here if job in known and (job in self.behind or _ahead(report, known[job]))]
            asked = list(here) if strange or ahead else []  # nothing is ordered yet: listed workers are left alone
        self._asked[report.host] = tuple(asked)

    def _may_bring(self, host: str, job: str, unix: float) -> bool:
        return job not in self.ended and (unix < self.open_until or host in self.lost.get(job, ()))

    def asked(self, host: str) -> tuple[str, ...]:
        return self._asked.get(host, ())

    def awaits_answer(self, host: str) -> bool:
        """Return whether this host still has to answer a request."""
        return any(job not in self._answers.get(host, {}) for job in self.asked(host))

    def any_unknown(self, known: Collection[str]) -> bool:
        """Return whether an agent holds an unknown job that we might take over."""
        return any(job not in known for jobs in self._asked.values() for job in jobs)

    def groups(self, job: str, hosts: Collection[str]) -> Groups:
        """Return the generations that these hosts were ordered to form, lowest first."""
        found = {a.generation: a.members for host, held in self._of(job).items() if host in hosts
                 for a in held.assignments if a.generation}
        return tuple(sorted(found.items()))

    def ordered(self, job: str, hosts: Collection[str]) -> int:
        """Return the highest generation that a dispatcher has ordered these hosts to form, by its own grant; 0: none is
        known."""
        return max((a.generation for host, held in self._of(job).items() if host in hosts
                    for a in held.assignments if self._granted(job, a)), default=0)

    def holders(self, job: str, spec: object, secrets: dict[str, str]) -> set[str]:
        """Return hosts that were given exactly this job: they hold its secrets."""
        return {host for host, held in self._of(job).items()
                if held.launch is not None and (held.launch.spec, held.launch.secrets) == (spec, secrets)}

    def secrets_of(self, record: JobRecord) -> dict[str, str] | None:
        """Return the job's secrets from a host that was given them; None if no host sends the right ones."""
        for host, held in sorted(self._of(record.job).items()):
            launch = held.launch
            if launch is None or host not in record.hosts or launch.spec != record.spec:
                continue
            if record.secrets_digest in ("", digest_of_json(launch.secrets)):
                return launch.secrets
        return None

    def with_bundle(self, digest: str) -> list[str]:
        return sorted(host for host, jobs in self._answers.items()
                      if any(h.bundle and h.launch is not None and h.launch.spec.bundle == digest
                             for h in jobs.values()))

    def found(self, known: Collection[str], hosts: Collection[str], reports: Iterable[AgentReport],
              unix: float) -> list[AdoptedJob]:
        """Return the unknown jobs that can be adopted, oldest first. `hosts`: those of the ledger; only they count."""
        answered = {job for jobs in self._answers.values() for job in jobs} - set(known)
        allowed = {job: [h for h in hosts if self._may_bring(h, job, unix)] for job in answered}
        made = [self._make(job, allowed[job], list(reports), unix) for job in answered]
        return sorted((a for a in made if a is not None), key=lambda a: (a.record.submitted_at, a.record.job))

    def _make(self, job: str, hosts: Collection[str], reports: list[AgentReport], unix: float) -> AdoptedJob | None:
        held = {host: h for host, h in sorted(self._of(job).items()) if host in hosts}
        launch = next((h.launch for h in held.values() if h.launch is not None), None)
        if launch is None:
            return None
        age_s = max(h.launch.age_s for h in held.values() if h.launch is not None)
        own = [w.report for r in reports for w in r.workers if w.report.job == job]
        given = [a for h in held.values() for a in h.assignments]
        record = JobRecord(job, launch.spec, unix - age_s, JobState.RECOVERING,
                           f"taken over by a new dispatcher from {', '.join(held)}", groups=self.groups(job, held),
                           repeated=max((r.repeated for r in own), default=0),
                           recomputed=max((r.recomputed for r in own), default=0),
                           seals=not given or any(a.grant for a in given), ordered=self.ordered(job, held))
        return AdoptedJob(record, launch.secrets, tuple(held))

    def _of(self, job: str) -> dict[str, HeldJob]:
        return {host: jobs[job] for host, jobs in self._answers.items() if job in jobs}


def ended_in(events: Iterable[Event]) -> set[str]:
    """Return the jobs that had ended when the newest dispatcher machine took over, and the pruned ones.

    One that ended later counts only if it was pruned: it may be one that failed as lost, which a late host still holds.
    """
    ended, before, pruned = set[str](), set[str](), set[str]()
    for event in events:
        match event:
            case JobChanged() if event.state.ended:
                ended.add(event.job)
            case JobChanged():
                ended.discard(event.job)
                before.discard(event.job)
            case TakenOver():
                before = set(ended)
            case JobsPruned():
                pruned.update(event.jobs)
    return before | pruned


def _ahead(report: AgentReport, record: JobRecord) -> bool:
    """Return whether a worker reports a later generation than our record."""
    newest = max((generation for generation, _ in record.groups), default=0)
    reports = [w.report for w in report.workers if w.report.job == record.job]
    return any(max(r.generation, r.failed) > newest for r in reports)


def merged(groups: Groups, answers: Groups, keep: int) -> Groups:
    """Merge both, lowest generation first, and keep the newest `keep`. Our own records win."""
    return tuple(sorted({**dict(answers), **dict(groups)}.items()))[-keep:]


def with_hosts(record: JobRecord, more: Iterable[str]) -> JobRecord:
    members = {name.partition("/")[0] for _, group in record.groups for name in group}
    return replace(record, hosts=tuple(dict.fromkeys((*record.hosts, *sorted(members | set(more))))))


def check(report: AgentReport) -> None:
    """Raise ValueError for data that no agent of ours would hold: it would become names of files and workers here."""
    for held in report.held:
        launch = held.launch
        if not JOB_NAME.fullmatch(held.job) or (launch is not None and launch.job != held.job):
            raise ValueError(f"AgentReport.held: {held.job!r} is no job")
        if launch is not None:
            _check_launch(launch)
        if any(not 0 <= a.generation < LARGEST for a in held.assignments):
            raise ValueError(f"AgentReport.held: {held.job} has a generation of no sense")
        for name in (m for a in held.assignments for m in a.members):
            if not WORKER_NAME.fullmatch(name):
                raise ValueError(f"AgentReport.held: {name!r} is no worker")


def _check_launch(launch: WorkerLaunch) -> None:
    if not 1 <= launch.spec.min_workers <= launch.spec.max_workers:
        raise ValueError(f"AgentReport.held: {launch.job} has no range of workers")
    try:
        validation.check(launch.spec, launch.secrets)
    except UsageError as error:
        raise ValueError(f"AgentReport.held: {launch.job}: {error}") from None
