"""Job files on the dispatcher's disk, from which a job continues after this process was killed.

    jobs/JOB/job.json       its specification and state
    jobs/JOB/secrets.json   mode 0600, removed when the job has ended
    jobs/JOB/logs, checkpoints, outputs
    past/JOB                the same of jobs that have ended long ago: `retention.py`
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.fleet.domain.events import JobSubmitted
from spotfleet.model import JobSpec, JobState

NAME_CHARS = 60


@dataclass(frozen=True)
class JobRecord:
    """Content of job.json. `groups` are written before any worker receives them."""

    job: str
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    why: str = ""
    error: str = ""
    ended_at: float = 0.0
    cancelled: str = ""  # why it is to end; empty while it is not
    version: int = 0
    repeated: int = 0
    groups: tuple[tuple[int, tuple[str, ...]], ...] = ()  # the newest generations, newest last
    done: tuple[str, ...] = ()  # workers whose scripts have ended
    unfinished: tuple[str, ...] = ()  # those of `done` in whose scripts elastic.run had not returned
    fence: int = 0  # checkpoints of lower generations are refused
    told: int = 0  # version of the last event CheckpointInTime; the name is that in job.json
    hosts: tuple[str, ...] = ()  # hosts that ever had a worker: only their reports about this job count
    asked: int = 0  # the last request of its resize policy, in workers; 0: none yet, -1: no limit
    size: int = 0  # size of the newest formed generation
    recomputed: int = 0
    outside: int = 0  # steps of a worker outside elastic.run
    hint: str = ""  # the next thing to try, once it has ended
    tail: tuple[str, ...] = ()  # failures of scripts after training, on other ranks than 0
    fetched_at: float = 0.0  # when the last whole download of its outputs began, Unix; 0: there was none


def save(folder: Path, record: JobRecord) -> None:
    write_json(folder / "job.json", to_json(record))


def try_save(folder: Path, record: JobRecord) -> bool:
    """Save the record; return False when the disk is full, to try again."""
    try:
        save(folder, record)
    except OSError as error:
        if not is_full(error):
            raise
        return False
    return True


def save_secrets(folder: Path, secrets: dict[str, str]) -> None:
    write_json(folder / "secrets.json", secrets)


def drop_secrets(folder: Path) -> None:
    (folder / "secrets.json").unlink(missing_ok=True)


def load(folder: Path) -> tuple[JobRecord, dict[str, str]]:
    record = from_json(JobRecord, json.loads((folder / "job.json").read_text()))
    try:
        secrets = from_json(dict[str, str], json.loads((folder / "secrets.json").read_text()))
    except FileNotFoundError:
        secrets = {}
    return record, secrets


def submission(record: JobRecord, secrets: dict[str, str]) -> JobSubmitted:
    """Return the event of the job's submission, without secrets."""
    spec, command = record.spec, " ".join(record.spec.argv) or record.spec.run
    for value in sorted(filter(None, secrets.values()), key=len, reverse=True):  # one may begin with another
        command = command.replace(value, "***")
    deadline_at = record.submitted_at + spec.deadline_s if spec.deadline_s else 0.0
    return JobSubmitted(record.submitted_at, record.job, spec.name, command, spec.min_workers, spec.max_workers,
                        deadline_at, spec.work_s, spec.work_steps, spec.work_host_s)


def name_for(spec: JobSpec, known: Iterable[str], above: int) -> str:
    """Return the name of a job and of its folder. Its number is above all `known` ones and above `above`."""
    stem = re.sub(r"[^\w.-]+", "-", spec.name)[:NAME_CHARS].strip("-.") or "job"
    return f"{stem}-{max([above, *map(number_of, known)]) + 1}"


def number_of(name: str) -> int:
    """Return the number in a job's name; 0 if it has none."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def folders(home: Path) -> list[Path]:
    """Return the folders of jobs on disk, oldest first. A folder without job.json is not an accepted job."""
    found = [p.parent for p in (home / "jobs").glob("*/job.json")]
    return sorted(found, key=lambda p: (load(p)[0].submitted_at, p.name))


def next_boot(home: Path) -> int:
    """Count this start of the dispatcher and return the number of starts; it makes workers' names unique."""
    path = home / "boots.json"
    number = json.loads(path.read_text()) + 1 if path.exists() else 1
    try:
        write_json(path, number)
    except OSError as error:
        if not is_full(error):
            raise
        return int(time.time())  # also unique, without a write
    return number
