"""Restore of ledger, jobs and their secrets from the checkpoint target to an empty disk. `backup.py` wrote them.

    target --copied, each piece checked--> HOME/.restored --renamed, the ledger last--> HOME

Every host that mounts the target can write there, so ledger and jobs are accepted only if the fleet's secret made them.
A damaged piece stays there and is reported; hosts may hold the same data. Checkpoints are not restored here: a job that
needs one reads it from the target.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import re
import shutil
import sqlite3
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.checkpoints.seals import JobSeals, SealKey
from spotfleet.dispatcher.checkpoints.target_folder import TargetFolder
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import FleetCreated
from spotfleet.fleet.ledger import Ledger, read_events
from spotfleet.storage import atomic, json_file
from spotfleet.storage.folder import FolderStore, fleet_store
from spotfleet.transport.boot import DispatcherBoot

log = logging.getLogger(__name__)
RESTORE_S = 60.0  # time limit; a target that hangs is skipped
STAGE = ".restored"
FOUND = "restored.json"
LEDGER_NAME = re.compile(r"ledger/(\d{6})-(\d{12})-([0-9a-f]{64})\.db")


@dataclass(frozen=True)
class Restored:
    """Result of a restore."""

    ledger: bool = False
    jobs: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()  # data that could not be restored, for people


@dataclass(frozen=True)
class SealedJob:
    """Job as stored at the target, encrypted with `lock`."""

    record: JobRecord
    secrets: dict[str, str] = field(repr=False)


def sealed_name(job: str) -> str:
    return f"jobs/{job}/sealed"


def ledger_name(machine: int, seq: int, digest: str) -> str:
    """Return the name of a copy. A higher name is newer, across machines; the digest verifies content and fleet."""
    return f"ledger/{machine:06d}-{seq:012d}-{digest}.db"


def ledger_digest(path: Path, fleet_secret: str) -> str:
    """Return the digest of a copy in hex; only this fleet's dispatchers can compute it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return hmac.new(fleet_secret.encode(), b"ledger\0" + digest, hashlib.sha256).hexdigest()


def bundle_name(digest: str) -> str:
    return f"bundles/{digest}"


def lock(fleet_secret: str) -> Fernet:
    """Return the cipher for jobs at the target, where others may read and write."""
    key = HKDF(SHA256(), 32, salt=None, info=b"spotfleet secrets of jobs").derive(fleet_secret.encode())
    return Fernet(base64.urlsafe_b64encode(key))


def machine_number(host: str) -> int:
    """Return the number N of the dispatcher's machine FLEET-d-N; 0 if there is none."""
    number = host.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def found_before(home: Path) -> Restored:
    """Return the result of an earlier process that was killed before its first start was complete."""
    try:
        return from_json(Restored, json_file.read(home / FOUND))
    except FileNotFoundError:
        return Restored()
    except ValueError as error:
        return Restored(troubles=(f"the list of what was restored is damaged: {error}",))


async def restore(boot: DispatcherBoot, home: Path) -> Restored:
    """Fill an empty home from the target, as far as possible."""
    target = boot.spec.checkpoint.folder
    if not target:
        return Restored()
    stage = home / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        async with asyncio.timeout(RESTORE_S):
            found = await asyncio.to_thread(_fetch, boot, stage)
    except TimeoutError:
        return Restored(troubles=(f"{target} has not answered within {RESTORE_S:g} s",))
    except OSError as error:
        return Restored(troubles=(f"{target} cannot be read: {error.strerror or error}",))
    for trouble in found.troubles:
        log.warning("%s", trouble)
    past = jobfile.past(home)
    for job in found.jobs:
        place = home / "jobs" / job
        atomic.make_folder(place.parent)
        if not place.exists() and job not in past:
            atomic.rename(stage / "jobs" / job, place)
    write_json(home / FOUND, to_json(found))  # for the next process, if we are killed now
    if found.ledger:
        atomic.rename(stage / "ledger.db", home / "ledger.db")
    shutil.rmtree(stage, ignore_errors=True)
    return found


def _fetch(boot: DispatcherBoot, stage: Path) -> Restored:
    """Copy everything valid to `stage`; blocking."""
    if not Path(boot.spec.checkpoint.folder).is_dir():
        return Restored(troubles=(f"{boot.spec.checkpoint.folder} is no folder here: is it mounted?",))
    durable = fleet_store(boot.spec.checkpoint.folder, boot.fleet, boot.ca)
    stage.mkdir(parents=True, mode=0o700)
    troubles: list[str] = []
    ledger = _fetch_ledger(durable, boot, stage / "ledger.db", troubles)
    jobs = [job for job in sealed_jobs(durable) if _fetch_job(durable, boot, job, stage / "jobs" / job, troubles)]
    return Restored(ledger, tuple(jobs), tuple(troubles))


def _fetch_ledger(durable: FolderStore, boot: DispatcherBoot, place: Path, troubles: list[str]) -> bool:
    """Copy the newest valid copy of the ledger to `place`; return whether there is one."""
    for name in reversed([n for n in durable.names("ledger") if LEDGER_NAME.fullmatch(n)]):
        source = durable.find(name)
        problem = "it has just gone" if source is None else _copy_ledger(source, name, boot, place)
        if not problem:
            troubles += _not_included(durable, boot, name, place)
            return True
        place.unlink(missing_ok=True)
        troubles.append(f"the copy {name} of the records is refused: {problem}")
    return False


def _not_included(durable: FolderStore, boot: DispatcherBoot, chosen: str, place: Path) -> list[str]:
    """Name the copies of earlier dispatchers whose history is not part of the ledger at `place`: one that took over
    while the target was away began a ledger of its own."""
    found: list[str] = []
    newest = {m[1]: n for n in durable.names("ledger") if (m := LEDGER_NAME.fullmatch(n)) and m[1] < chosen[7:13]}
    other = place.with_name(".other.db")
    for machine, name in sorted(newest.items()):
        source = durable.find(name)
        if source is not None and not _copy_ledger(source, name, boot, other) and not _begins_with(place, other):
            found.append(f"the {int(name[14:26])} events of the fleet's dispatcher {int(machine)} are not part of "
                         f"these records, so `cost` lacks them: they stay at {durable.folder / name}")
        other.unlink(missing_ok=True)
    return found


def _begins_with(longer: Path, shorter: Path) -> bool:
    """Return whether a ledger contains the last event of another one at the same place."""
    one, other = Ledger(longer), Ledger(shorter)
    try:
        last = other.append()
        return one.events(last - 1, 1) == other.events(last - 1, 1)
    finally:
        one.close()
        other.close()


def _copy_ledger(source: Path, name: str, boot: DispatcherBoot, place: Path) -> str:
    """Copy and check one copy of the ledger; return the problem, or ""."""
    shutil.copyfile(source, place)
    if ledger_digest(place, boot.fleet_secret) != name[-67:-3]:
        return "its digest is wrong"
    try:
        created = next((e for e in read_events(place) if isinstance(e, FleetCreated)), None)
        Ledger(place).close()  # opened once, so that it can be written to from now on
    except (SpotfleetError, sqlite3.Error) as error:
        return str(error)
    return "" if created is not None and created.fleet == boot.fleet else "it is not this fleet's"


def sealed_jobs(durable: FolderStore) -> list[str]:
    """Return the names of the jobs with a record at the target."""
    found = [n.split("/") for n in durable.names("jobs") if n.endswith("/sealed")]
    return [parts[1] for parts in found if len(parts) == 3]


def _trained(durable: FolderStore, boot: DispatcherBoot, job: SealedJob) -> int:
    """Return the newest generation with a checkpoint that counts at the target: the copied record may be older."""
    seals = JobSeals(SealKey(boot.fleet_secret), machine_number(boot.host), lambda: job.record, lambda: job.secrets)
    found = TargetFolder(durable, boot.spec.checkpoint.folder, job.record.job, seals).offers()
    return max((c.generation for c in found), default=0)


def _fetch_job(durable: FolderStore, boot: DispatcherBoot, job: str, place: Path, troubles: list[str]) -> bool:
    try:
        source = durable.find(sealed_name(job))
        found = from_json(SealedJob,
                          json.loads(lock(boot.fleet_secret).decrypt(source.read_bytes() if source else b"")))
        record = found.record
        if record.job != job:
            raise ValueError(f"it is that of {record.job}")
        trained = _trained(durable, boot, found)
        jobfile.save(place, replace(record, fence=max(record.fence, trained), ordered=max(record.ordered, trained)))
        if found.secrets:
            jobfile.save_secrets(place, found.secrets)
    except (ValueError, InvalidToken) as error:
        shutil.rmtree(place, ignore_errors=True)
        troubles.append(f"the copy of job {job} is refused: {str(error) or type(error).__name__}")
        return False
    return True
