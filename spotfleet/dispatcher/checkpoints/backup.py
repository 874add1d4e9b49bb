"""Backup to the checkpoint target of the data that a dispatcher on another disk needs: ledger, jobs, secrets, bundles.

    changed data --KEEP_S, or longer where copies take long--> copied --the target refuses--> tried again after AGAIN_S
                                                                              (reported in `why` and the ledger)

Two threads copy: one for small, changing records and one for bundles, which are large and do not change. So a bundle
that takes an hour delays no record. Training waits for neither. `ledger_restore.py` reads it back:

    ledger/MACHINE-SEQ-DIGEST.db     the newest two of this machine
    jobs/JOB/sealed                  its record and, until it has ended, its secrets; encrypted. Removed when the job
                                     leaves our memory (`retention.py`)
    bundles/DIGEST                   manifests and pieces of jobs that have not ended, and of their checkpoint folders
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from spotfleet.codec import to_text
from spotfleet.dispatcher.checkpoints.ledger_restore import (
    LEDGER_NAME,
    SealedJob,
    bundle_name,
    ledger_digest,
    ledger_name,
    lock,
    machine_number,
    sealed_jobs,
    sealed_name,
)
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.bundles import BundleStore
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import JobsPruned, TargetChanged
from spotfleet.storage import atomic
from spotfleet.storage.folder import STALE_S, fleet_store, read_range

log = logging.getLogger(__name__)
KEEP_S = 3.0
SELDOM = 10  # the pause after a copy, in durations of that copy
AGAIN_S = 10.0
STALL_S = 60.0
BUNDLE_STALL_S = 3600.0  # a bundle may be large
LOOK_S = 60.0  # period of checking that bundles at the target were not removed: a bundle may have many pieces
COPIES = 2  # number of copies of the ledger


@dataclass(frozen=True)
class _Job:
    """Data of a job to copy; made on the loop."""

    job: str
    folder: Path
    live: bool
    bundles: tuple[str, ...]
    secrets_lost: bool  # the copy at the target may be the only one
    secrets: dict[str, str] = field(repr=False)


class Backup:
    """Copies of ledger, jobs and bundles at the checkpoint target."""

    def __init__(self, core: Core, bundles: BundleStore) -> None:
        boot = core.boot
        self.why = boot.spec.checkpoint.leaves_out  # the problem; "" when all is copied or being copied
        self._core, self._bundles, self._target = core, bundles, boot.spec.checkpoint.folder
        self._durable = fleet_store(self._target, boot.fleet, boot.ca)
        self._lock, self._machine = lock(boot.fleet_secret), machine_number(boot.host)
        self._whys: dict[str, str] = {}  # thread -> its problem
        self.copied_to = 0  # sequence number of the ledger's newest event at the target
        self._copied: dict[str, str] = {}  # name at the target -> digest of what was written
        self._sweep_at = self._look_at = 0.0  # monotonic
        self._safe: set[str] | None = None  # bundles that were complete at the target at the last check
        self._damaged: set[str] = set()  # jobs whose job.json was found damaged: the record in memory is whole
        self._closed: set[str] = set()  # ended jobs whose final state is copied
        self._sealed: set[str] = set()  # jobs whose records were found or written at the target
        self._listed = False  # what an earlier process wrote there is in `_sealed`

    async def run(self) -> None:
        """Copy until cancelled. Returns at once without a target, or with one in an object store."""
        if not self._target:
            return
        await asyncio.gather(self._keep("records", self._copy, SELDOM, STALL_S),
                             self._keep("bundles", self._copy_bundles, 0, BUNDLE_STALL_S))

    async def _keep(self, what: str, copy: Callable[[list[_Job]], None], seldom: int, stall_s: float) -> None:
        """Copy changes, repeatedly."""
        thread = ThreadPoolExecutor(1, f"backup-{what}")
        try:
            while True:
                begun = time.monotonic()
                done = await self._once(what, thread, copy, stall_s)
                took_s = time.monotonic() - begun
                await asyncio.sleep(max(KEEP_S, seldom * took_s) if done else AGAIN_S)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _once(self, what: str, thread: ThreadPoolExecutor, copy: Callable[[list[_Job]], None],
                    stall_s: float) -> bool:
        for job in [j for j in self._core.jobs.values() if j.id in self._damaged]:
            job.unsaved = not jobfile.try_save(job.folder, job.record)
            self._damaged.discard(job.id)
        jobs = [_Job(j.id, j.folder, not j.state.ended, (j.spec.bundle, *j.record.saved), j.secrets_lost,
                     dict(j.secrets)) for j in self._core.jobs.values()]
        copying = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(thread, copy, jobs))
        try:
            while not (await asyncio.wait([copying], timeout=stall_s))[0]:
                self._report(what, f"the checkpoint target {self._target} has not answered for {stall_s:g} s; it is "
                                "waited for")
            copying.result()
        except (OSError, SpotfleetError) as error:
            self._report(what, f"the checkpoint target {self._target} cannot be written to: "
                            f"{getattr(error, 'strerror', '') or error}; tried again each {AGAIN_S:g} s")
            return False
        self._report(what, "")
        return True

    def _report(self, what: str, problem: str) -> None:
        self._whys[what] = problem
        why = next(filter(None, self._whys.values()), "")
        if why == self.why:
            return
        if why:
            log.warning("%s", why)
        if bool(why) != bool(self.why):
            self._core.journal.note(TargetChanged(self._core.unix(), self._target, why))
        self.why = why

    # ---- in the threads

    def _copy(self, jobs: list[_Job]) -> None:
        self._check_target()
        for job in jobs:
            self._copy_job(job)
        self._copy_ledger()
        self._drop_past({job.job for job in jobs})

    def _copy_bundles(self, jobs: list[_Job]) -> None:
        self._check_target()
        live = {bundle for job in jobs if job.live for bundle in job.bundles if bundle}
        if live == self._safe and time.monotonic() < self._look_at:
            return
        safe = all([self._copy_bundle(digest) for digest in sorted(live)])
        if safe:  # else the pieces of some bundle may be unknown
            pieces = self._bundles.pieces
            wanted = {bundle_name(blob) for digest in live for blob in (digest, *pieces(digest))}
            for name in self._durable.names("bundles"):
                if name not in wanted:
                    self._durable.delete(name)
            self._safe, self._look_at = live, time.monotonic() + LOOK_S
        if time.monotonic() >= self._sweep_at:
            self._durable.sweep()
            self._sweep_at = time.monotonic() + STALE_S

    def _check_target(self) -> None:
        if not Path(self._target).is_dir():  # do not create it: it may be a mount point
            raise FileNotFoundError(errno.ENOENT, "no such folder; is it mounted?")

    def _copy_job(self, job: _Job) -> None:
        if job.job in self._closed or (job.live and job.secrets_lost):
            return
        try:
            record = jobfile.load_record(job.folder)
        except (ValueError, FileNotFoundError) as error:
            if job.folder.exists():  # else it has just left our memory, or was pruned
                log.warning("%s: job.json was damaged and is written again: %s", job.job, error)
                self._damaged.add(job.job)
            return
        if not job.live and not record.state.ended:
            return  # the disk is full: the record of its end is not written yet
        name, text = sealed_name(job.job), to_text(SealedJob(record, job.secrets if job.live else {})).encode()
        if self._is_news(name, text):
            self._durable.put(name, [self._lock.encrypt(text)])
            self._note(name, text)
        self._sealed.add(job.job)
        if not job.live:
            self._closed.add(job.job)

    def _drop_past(self, known: set[str]) -> None:
        """Drop the records of jobs that have left our memory or were pruned; the ledger's copy knows their ends."""
        if not self._listed:  # the process before this one may have been killed before it dropped some
            pruned = {job for event in self._core.journal.each() if isinstance(event, JobsPruned) for job in event.jobs}
            self._sealed |= {job for job in sealed_jobs(self._durable)
                             if job in pruned or (self._core.home / "past" / job).is_dir()}
            self._listed = True
        for job in self._sealed - known:
            self._durable.delete(sealed_name(job))
            self._copied.pop(sealed_name(job), None)
            self._closed.discard(job)
        self._sealed &= known

    def _copy_ledger(self) -> None:
        """Copy the ledger. Its name holds its digest, so a damaged copy is rejected, and an older one is used."""
        ledger = self._core.journal.ledger
        seq = ledger.append()
        if seq == self.copied_to:
            return
        copy = self._core.home / ".keeper.part"  # the name is kept: a killed dispatcher of before may have left it
        try:
            ledger.copy_to(copy)
            digest = ledger_digest(copy, self._core.boot.fleet_secret)
            self._durable.put(ledger_name(self._machine, seq, digest), read_range(copy))
        finally:
            copy.unlink(missing_ok=True)
        own = [n for n in self._durable.names("ledger")
                if (found := LEDGER_NAME.fullmatch(n)) and int(found[1]) == self._machine]
        for name in own[:-COPIES]:
            self._durable.delete(name)
        self.copied_to = seq

    def _copy_bundle(self, digest: str) -> bool:
        """Copy a bundle; return whether it is complete on both sides."""
        return self._copy_blob(digest) and all([self._copy_blob(p) for p in self._bundles.pieces(digest)])

    def _copy_blob(self, digest: str) -> bool:
        name, here = bundle_name(digest), self._bundles.path(digest)
        there = self._durable.find(name)
        if here.exists() and there is None:
            self._durable.put(name, read_range(here))
        elif there is not None and not here.exists():
            _fetch_bundle(there, here)
        return here.exists() and self._durable.find(name) is not None

    def _is_news(self, name: str, text: bytes) -> bool:
        """Return whether the target lacks this text; a file removed there counts as missing."""
        return self._copied.get(name) != hashlib.sha256(text).hexdigest() or self._durable.find(name) is None

    def _note(self, name: str, text: bytes) -> None:
        self._copied[name] = hashlib.sha256(text).hexdigest()


def _fetch_bundle(source: Path, place: Path) -> None:
    """Copy a bundle's blob from the target, if its digest is right; a host may still have a damaged one."""
    atomic.make_folder(place.parent)
    part = place.with_name(f".{place.name}.target.part")
    try:
        shutil.copyfile(source, part)
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != place.name:
                log.warning("the copy of bundle %s at %s is damaged", place.name[:12], source)
                return
        atomic.rename(part, place, sync=False)  # the target has it
    finally:
        part.unlink(missing_ok=True)
