"""Jobs of which this dispatcher's disk knows nothing, or too little, from what the agents hold.

    an agent reports workers of such a job --asked (`AgentOrders.tell`)--> told (`AgentReport.held`)
        told, with a Launch, by a host of the ledger --> the job is adopted (`Dispatcher`, which asks no more)
        told without a Launch, and the settle window is over --> given up here: its workers never had anything to run

Until then an agent leaves the workers alone. A job that is on our disk is asked about too, for its newest generation,
where the disk may be behind: it was copied back from the checkpoint target, or an agent reports a higher one.

Unknown jobs are believed in for ADOPT_S after a new machine has taken over, and never otherwise: a host that was
broken into must not be able to make jobs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from spotfleet.dispatcher import startable
from spotfleet.dispatcher.jobfile import JobRecord
from spotfleet.dispatcher.reports import LARGEST, WORKER_NAME
from spotfleet.errors import UsageError
from spotfleet.messages import AgentReport, HeldJob, Launch
from spotfleet.model import JobState

log = logging.getLogger(__name__)
ADOPT_S = 3600.0
JOB_NAME = re.compile(r"\w[\w.-]{0,99}")

Groups = tuple[tuple[int, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Adopted:
    """A job made of what hosts hold."""

    record: JobRecord
    secrets: dict[str, str] = field(repr=False)
    hosts: tuple[str, ...]  # that hold it


class Adoption:
    """Who was asked about which jobs, and what was told."""

    def __init__(self) -> None:
        self.open_until = 0.0  # Unix; unknown jobs are believed in before
        self.behind: set[str] = set()  # jobs on our disk that were copied back: others know them better
        self._asked: dict[str, tuple[str, ...]] = {}  # host -> jobs
        self._told: dict[str, dict[str, HeldJob]] = {}  # host -> job -> what it holds

    def hear(self, report: AgentReport, known: Mapping[str, JobRecord], unix: float, *, settled: bool) -> None:
        """Decide what this agent is to be asked, and keep what it tells."""
        here = dict.fromkeys(w.report.job for w in report.workers)
        told = self._told.setdefault(report.host, {})
        told.update((held.job, held) for held in report.held if held.job in self.asked(report.host))
        strange = [job for job in here if job not in known and unix < self.open_until]
        if settled:
            asked = [job for job in strange if job not in told or told[job].launch is not None]
        else:
            ahead = [job for job in here if job in known and (job in self.behind or _ahead(report, known[job]))]
            asked = list(here) if strange or ahead else []  # nothing is ordered yet: every worker is left alone
        self._asked[report.host] = tuple(asked)

    def asked(self, host: str) -> tuple[str, ...]:
        return self._asked.get(host, ())

    def owes(self, host: str) -> bool:
        """Has this host still to tell what it was asked?"""
        return any(job not in self._told.get(host, {}) for job in self.asked(host))

    def any_unknown(self, known: Collection[str]) -> bool:
        """Does an agent hold a job that we might take over?"""
        return any(job not in known for jobs in self._asked.values() for job in jobs)

    def groups(self, job: str, hosts: Collection[str]) -> Groups:
        """The generations that these hosts were ordered to form, lowest first."""
        found = {a.generation: a.members for host, held in self._of(job).items() if host in hosts
                 for a in held.assignments if a.generation}
        return tuple(sorted(found.items()))

    def holders(self, job: str, spec: object, secrets: dict[str, str]) -> set[str]:
        """Hosts that were given exactly this job: they know its secrets."""
        return {host for host, held in self._of(job).items()
                if held.launch is not None and (held.launch.spec, held.launch.secrets) == (spec, secrets)}

    def with_bundle(self, digest: str) -> list[str]:
        return sorted(host for host, jobs in self._told.items()
                      if any(h.bundle and h.launch is not None and h.launch.spec.bundle == digest
                             for h in jobs.values()))

    def found(self, known: Collection[str], hosts: Collection[str], reports: Iterable[AgentReport],
              unix: float) -> list[Adopted]:
        """The unknown jobs that can be gone on with, oldest first. `hosts`: those of the ledger, which count."""
        if unix >= self.open_until:
            return []
        told = {job for jobs in self._told.values() for job in jobs} - set(known)
        made = [self._make(job, hosts, list(reports), unix) for job in told]
        return sorted((a for a in made if a is not None), key=lambda a: (a.record.submitted_at, a.record.job))

    def _make(self, job: str, hosts: Collection[str], reports: list[AgentReport], unix: float) -> Adopted | None:
        held = {host: h for host, h in sorted(self._of(job).items()) if host in hosts}
        launch = next((h.launch for h in held.values() if h.launch is not None), None)
        if launch is None:
            return None
        age_s = max(h.launch.age_s for h in held.values() if h.launch is not None)
        repeated = max((w.report.repeated for r in reports for w in r.workers if w.report.job == job), default=0)
        record = JobRecord(job, launch.spec, unix - age_s, JobState.RECOVERING,
                           f"taken over by a new dispatcher from {', '.join(held)}", repeated=repeated,
                           groups=self.groups(job, held))
        return Adopted(record, launch.secrets, tuple(held))

    def _of(self, job: str) -> dict[str, HeldJob]:
        return {host: jobs[job] for host, jobs in self._told.items() if job in jobs}


def _ahead(report: AgentReport, record: JobRecord) -> bool:
    """Does a worker know a later generation than was written down here?"""
    newest = max((generation for generation, _ in record.groups), default=0)
    mine = [w.report for w in report.workers if w.report.job == record.job]
    return any(max(r.generation, r.failed) > newest for r in mine)


def merged(groups: Groups, told: Groups, keep: int) -> Groups:
    """Both, lowest generation first, the newest `keep`. What we wrote ourselves stands."""
    return tuple(sorted({**dict(told), **dict(groups)}.items()))[-keep:]


def with_hosts(record: JobRecord, more: Iterable[str]) -> JobRecord:
    members = {name.partition("/")[0] for _, group in record.groups for name in group}
    return replace(record, hosts=tuple(dict.fromkeys((*record.hosts, *sorted(members | set(more))))))


def check(report: AgentReport) -> None:
    """ValueError for what no agent of ours would hold: it would become names of files and of workers here."""
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


def _check_launch(launch: Launch) -> None:
    if not 1 <= launch.spec.min_workers <= launch.spec.max_workers:
        raise ValueError(f"AgentReport.held: {launch.job} has no range of workers")
    try:
        startable.check(launch.spec, launch.secrets)
    except UsageError as error:
        raise ValueError(f"AgentReport.held: {launch.job}: {error}") from None
