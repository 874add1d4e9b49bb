"""Job files on the dispatcher's disk, from which a job continues after this process was killed.

    jobs/JOB/job.json       its specification and state
    jobs/JOB/secrets.json   mode 0600, removed when the job has ended
    jobs/JOB/logs, checkpoints, outputs
    past/JOB                the same of jobs that have ended long ago: `retention.py`

A damaged file is set aside. `recovery/lost_jobs.py` makes the job's record again, or reports the job as lost.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.disk import space
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.disk.files import write_atomic, write_json
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.fleet.domain.events import JobSubmitted
from spotfleet.model import JobSpec, JobState
from spotfleet.storage import atomic, json_file

NAME_CHARS = 60
JOB_NAME = re.compile(r"\w[\w.-]{0,99}")
START = re.compile(r"(?:d(\d+)-)?(?:(\d+)-)?\d+")  # a worker's incarnation, see `jobs/desk.py: WorkerNames`


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
    secrets_digest: str = ""  # digest_of_json of secrets.json; "" once the job has ended, or from an earlier release
    seals: bool = False  # its checkpoints count only with proofs; False: submitted to a release without `seals.py`
    ordered: int = 0  # the highest generation that is known to have been ordered by a dispatcher of this fleet
    floor: int = 0  # the lowest serial number of a seal at the checkpoint target, after the last copy
    restarts: int = 0  # number of times that all processes were started anew, see `jobs/rounds.py`
    failures: int = 0  # those of them that followed a failure of the script
    exit_status: int = 0  # status of the process that failed the job
    saved_at: float = 0.0  # when the newest of them was whole, Unix; 0: none was saved
    saved: tuple[str, ...] = ()  # bundles of its checkpoint folder: the newest, and the one before it
    preempted: str = ""  # for which job it was sent back to the queue, and why; empty once it has hosts again

    def age_s(self, now: float) -> float:
        """Return the time from its submission until its end, or until `now`, Unix, while it has none."""
        return max(0.0, (self.ended_at or now) - self.submitted_at)


@dataclass(frozen=True)
class StoredJob:
    """A job as it was found on the disk."""

    folder: Path
    record: JobRecord
    secrets: dict[str, str] = field(repr=False, default_factory=dict)
    secrets_lost: bool = False


def save(folder: Path, record: JobRecord) -> None:
    write_json(folder / "job.json", to_json(record))


def try_save(folder: Path, record: JobRecord) -> bool:
    """Save the record, with the room of a spare if need be; return False when the disk is full, to try again."""
    home = folder.parents[1]
    while True:
        try:
            save(folder, record)
        except OSError as error:
            if not is_full(error):
                raise
            if not space.remove_spare(home):
                return False
        else:
            space.create_spares(home)
            return True


def save_secrets(folder: Path, secrets: dict[str, str]) -> None:
    """Write the job's secrets, without a digest among them: `JobRecord.secrets_digest` has it."""
    write_atomic(folder / "secrets.json", json.dumps(secrets, indent=1))


def drop_secrets(folder: Path) -> None:
    """Remove the job's secrets, also damaged ones, so that no power failure brings them back."""
    for path in list(folder.glob("secrets.json*")):
        atomic.remove(path)


def load(folder: Path) -> tuple[JobRecord, dict[str, str]]:
    """Read a job's record and secrets. Raises ValueError for a damaged file, FileNotFoundError without job.json."""
    record = load_record(folder)
    return record, {} if record.state.ended else load_secrets(folder, record)


def load_record(folder: Path) -> JobRecord:
    record = from_json(JobRecord, json_file.read(folder / "job.json"))
    if record.job != folder.name:
        raise ValueError(f"it is that of {record.job[:NAME_CHARS]}")
    return record


def load_ended(folder: Path) -> StoredJob:
    """Read the record of a job that has ended. Raises ValueError for a damaged one."""
    return StoredJob(folder, load_record(folder))


def load_secrets(folder: Path, record: JobRecord) -> dict[str, str]:
    """Read a job's secrets. Raises ValueError if they are damaged, FileNotFoundError if they must exist and do not."""
    path = folder / "secrets.json"
    if not record.secrets_digest and not path.exists():
        return {}
    secrets = from_json(dict[str, str], json_file.read(path))
    if record.secrets_digest and json_file.digest_of_json(secrets) != record.secrets_digest:
        raise ValueError("it has another content than was written")
    return secrets


def submission(record: JobRecord, secrets: dict[str, str]) -> JobSubmitted:
    """Return the event of the job's submission, without secrets."""
    spec, command = record.spec, " ".join(record.spec.argv) or record.spec.run
    for value in sorted(filter(None, secrets.values()), key=len, reverse=True):  # one may begin with another
        command = command.replace(value, "***")
    deadline_at = record.submitted_at + spec.deadline_s if spec.deadline_s else 0.0
    return JobSubmitted(record.submitted_at, record.job, spec.name, command, spec.min_workers, spec.max_workers,
                        deadline_at, spec.work_s, spec.work_steps, spec.work_host_s, spec.kind_of)


def name_for(spec: JobSpec, known: Iterable[str], above: int, fleet: str = "", groups: Iterable[str] = ()) -> str:
    """Return the name of a job and of its folder. Its number is above all `known` ones and above `above`. It is no name
    that a machine of `fleet` may have: these are FLEET-N, FLEET-GROUP-N and FLEET-d-N."""
    stem = re.sub(r"[^\w.-]+", "-", spec.name)[:NAME_CHARS].strip("-.") or "job"
    stem = f"{stem}-run" if fleet and stem in (fleet, *(f"{fleet}-{part}" for part in ("d", *groups))) else stem
    return f"{stem}-{max([above, *map(number_of, known)]) + 1}"


def number_of(name: str) -> int:
    """Return the number in a job's name; 0 if it has none."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def folders(home: Path) -> list[Path]:
    return [path for path in (home / "jobs").glob("*") if path.is_dir()]


def past(home: Path) -> list[str]:
    """Return the names of jobs that have left memory."""
    folder = home / "past"
    return [name for name in os.listdir(folder) if JOB_NAME.fullmatch(name)] if folder.is_dir() else []


def load_all(home: Path, damage: DamagedFiles) -> list[StoredJob]:
    """Load the jobs on disk, oldest first. A folder without job.json is not an accepted job, or a lost one; a damaged
    job.json is set aside."""
    found = []
    for folder in folders(home):
        try:
            found.append(_stored(folder, load_record(folder), damage))
        except FileNotFoundError:
            continue
        except ValueError as error:
            damage.set_aside(folder / "job.json", str(error), "agents and the ledger are asked for the job")
    return sorted(found, key=lambda s: (s.record.submitted_at, s.record.job))


def _stored(folder: Path, record: JobRecord, damage: DamagedFiles) -> StoredJob:
    if record.state.ended:
        drop_secrets(folder)  # the last process may have died before this
        return StoredJob(folder, record)
    atomic.sync_folder(folder)  # nor may it have synced the name of job.json
    path, then = folder / "secrets.json", f"agents are asked for them; without them {record.job} fails"
    try:
        return StoredJob(folder, record, load_secrets(folder, record))
    except FileNotFoundError:
        damage.missing(path, then)
    except ValueError as error:
        damage.set_aside(path, str(error), then)
    return StoredJob(folder, record, secrets_lost=True)


def workers_in(jobs: Iterable[StoredJob]) -> set[str]:
    """Return the names of workers in the jobs' records."""
    records = [job.record for job in jobs]
    return {n for r in records for n in (*r.done, *(m for _, group in r.groups for m in group))}


def highest_start(names: Iterable[str], machine: int) -> int:
    """Return the highest start of this dispatcher's machine in names of workers, see `next_boot`; 0 without one."""
    found = filter(None, (START.fullmatch(name.rpartition("/")[2]) for name in names))
    return max((int(start[2] or 1) for start in found if int(start[1] or 0) == machine), default=0)


def next_boot(home: Path, used: int, damage: DamagedFiles, *, first: bool = False) -> int:
    """Count this start of the dispatcher and return the number of starts; it makes workers' names unique.

    `used`: the highest number in a name of a worker, 0 if there was none. `first`: no earlier start was completed here.
    A damaged count goes on from the clock, which is above all counts.
    """
    path = home / "boots.json"
    then = "names of new workers go on from the clock; nothing is to be done"
    number = max(int(time.time()), used + 1)
    try:
        counted = from_json(int, json_file.read(path))
        if counted < max(used, 1):
            raise ValueError(f"it has {counted}, and {max(used, 1)} was counted before")
        number = counted + 1
    except FileNotFoundError:
        if first and not used:
            number = 1
        else:
            damage.missing(path, then)
    except ValueError as error:
        damage.set_aside(path, str(error), then)
    try:
        write_json(path, number)
    except OSError as error:
        if not is_full(error):
            raise
        return int(time.time())  # also unique, without a write
    return number
