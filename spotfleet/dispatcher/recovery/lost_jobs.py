"""Jobs of the ledger whose job.json is damaged or missing.

    ended, by the ledger    its record is made again from the ledger: logs, checkpoints and outputs are where they were
    not ended               its agents are asked for it (`job_adoption.py`) --none holds it, or settled without them-->
                            failed, as lost; its record is made again, so that `jobs`, `logs` and `outputs` know it
    not in the ledger       a folder that was never an accepted job: its secrets are removed

The number of such a job is not given again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.disk.jobfile import JobRecord, StoredJob
from spotfleet.fleet.domain.events import Event, GenerationFormed, JobChanged, JobsPruned, JobSubmitted, ScriptsRan
from spotfleet.model import JobSpec, JobState

LOST = "its job.json was lost, and no host that answers holds the job: submit it again with `spotfleet train`"


@dataclass(frozen=True)
class LedgerJob:
    """A job as the ledger knows it."""

    submitted: JobSubmitted
    changed: JobChanged | None = None  # the newest
    hosts: frozenset[str] = frozenset()  # hosts that had a worker in a generation, or outside one

    @property
    def ended(self) -> bool:
        return self.changed is not None and self.changed.state.ended

    def record(self, state: JobState, why: str, at: float) -> JobRecord:
        """Return a record of the ended job, without the parts of its spec that the ledger does not have."""
        job = self.submitted
        spec = JobSpec(job.name, run=job.command, min_workers=job.min_workers, max_workers=job.max_workers)
        return JobRecord(job.job, spec, job.at, state, why, ended_at=at, hosts=tuple(sorted(self.hosts)),
                         version=self.changed.version if self.changed else 0)


def jobs_in(events: Iterable[Event]) -> dict[str, LedgerJob]:
    """Return the jobs of the ledger that were not pruned."""
    found: dict[str, LedgerJob] = {}
    for event in events:
        match event:
            case JobSubmitted() if event.job not in found:
                found[event.job] = LedgerJob(event)
            case JobChanged() if event.job in found:
                found[event.job] = replace(found[event.job], changed=event)
            case GenerationFormed(members=workers) | ScriptsRan(workers=workers) if event.job in found:
                job = found[event.job]
                found[event.job] = replace(job, hosts=job.hosts | {name.partition("/")[0] for name in workers})
            case JobsPruned(jobs=names):
                for name in names:
                    found.pop(name, None)
    return found


def workers_in(events: Iterable[Event]) -> set[str]:
    """Return the names of workers in the ledger."""
    found: set[str] = set()
    for event in events:
        match event:
            case GenerationFormed(members=workers) | ScriptsRan(workers=workers):
                found.update(workers)
    return found


def senders(folder: Path) -> frozenset[str]:
    """Return the hosts that have sent logs or outputs of a job: only hosts that worked for it may."""
    names = [path.name for kind in ("logs", "outputs") for path in (folder / kind).glob("[!.]*")]
    return frozenset(re.split("[@#]", name)[0] for name in names if re.search("[@#]", name))


def names_in(home: Path, events: Iterable[Event]) -> set[str]:
    """Return the names of all jobs of the ledger, and of all job folders, also without a record."""
    return {event.job for event in events if isinstance(event, JobSubmitted)} | {f.name for f in jobfile.folders(home)}


def find_jobs(home: Path, events: Iterable[Event], damage: DamagedFiles, *,
              takes_over: bool = False) -> tuple[list[StoredJob], dict[str, LedgerJob]]:
    """Load the jobs on disk; also return the lost ones, which the ledger has and which have not ended. With
    `takes_over` the ledger came from another disk, and a job that is not here yet is no damage."""
    stored = jobfile.load_all(home, damage)
    ledger = {name: replace(job, hosts=job.hosts | senders(home / "jobs" / name))
              for name, job in jobs_in(events).items()}
    past = set(jobfile.past(home))
    known = {job.record.job for job in stored}
    lost = {name: job for name, job in ledger.items() if name not in known | past and not job.ended}
    for name in lost:
        path = home / "jobs" / name / "job.json"
        if not takes_over and not damage.reported(path):
            damage.missing(path, "agents are asked for the job; without them it fails")
    for folder in jobfile.folders(home):
        job = ledger.get(folder.name)
        if folder.name in known or folder.name in lost:
            continue
        jobfile.drop_secrets(folder)
        if job is not None and job.changed is not None and folder.name not in past:
            record = job.record(job.changed.state, job.changed.why, job.changed.at)
            if not damage.reported(folder / "job.json"):
                damage.missing(folder / "job.json", "the ledger has the job's end: only its spec is lost")
            jobfile.try_save(folder, record)  # on a full disk the next start makes it
            stored.append(StoredJob(folder, record))
    return sorted(stored, key=lambda job: (job.record.submitted_at, job.record.job)), lost
