"""Retention of ended jobs: the newest stay in memory, older ones on the disk alone, until a person prunes them.

    HOME/jobs/JOB --ended for REST_S, nothing of it on its way, KEPT newer ones have ended--> HOME/past/JOB
    either, ended --`spotfleet jobs --prune`: event JobsPruned--> .JOB.part --> removed

A job in `past` is loaded when a request names it, and dropped again. The ledger keeps the events of every job, and with
them its cost; the number in a job's name comes from the ledger and is never given twice.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.journal import POLL_S
from spotfleet.errors import DiskFull, UsageError
from spotfleet.fleet.domain.events import JobsPruned
from spotfleet.protocol.messages import EndedJob
from spotfleet.storage import atomic

log = logging.getLogger(__name__)
KEPT = 300  # ended jobs in memory; each step of the loop and each `status` passes over them
REST_S = 60.0  # the last output of a job's workers may arrive for some time after its end
AT_ONCE = 20  # jobs that leave memory in one step of the loop, which must stay short
CACHED = 16  # jobs of `past` that requests named last
ROOM_S = 5.0  # the ledger, tried again each second, is waited for once there is room
PAGE = 200  # jobs in one answer: their sizes are counted file by file


class Retention:
    """Ended jobs that have left memory, and the removal of ended jobs."""

    def __init__(self, core: Core, load: Callable[[Path], ManagedJob], is_busy: Callable[[ManagedJob], bool]) -> None:
        """`is_busy`: something of the job still has to be copied."""
        self._core, self._load, self._is_busy = core, load, is_busy
        self._folder = core.home / "past"
        self.count = len(jobfile.past(core.home))
        self._cache: dict[str, ManagedJob] = {}
        self._using: Counter[str] = Counter()  # jobs whose files requests read or write now -> how many do
        self._going: set[str] = set()  # jobs that are being pruned: no request finds them
        self.left: set[str] = set()  # jobs that this process moved out of memory or pruned
        self._archives = 0  # requests that read the files of all jobs now
        self._pruning = asyncio.Lock()
        self._twice: set[str] = set()  # jobs that are in `jobs` and in `past`, and were reported

    @property
    def last_number(self) -> int:
        """The highest number in the names of jobs in `past`."""
        return max(map(jobfile.number_of, jobfile.past(self._core.home)), default=0)

    def find(self, name: str) -> ManagedJob | None:
        """Return a job that has left memory; None if there is none. Raises ValueError for a damaged record."""
        if name in self._cache:
            return self._cache[name]
        folder = self._folder / name
        if not jobfile.JOB_NAME.fullmatch(name) or not (folder / "job.json").is_file():
            return None
        found = self._cache[name] = self._load(folder)
        while len(self._cache) > CACHED:
            del self._cache[next(iter(self._cache))]
        return found

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Keep the files of a job where they are, while a request reads or writes them."""
        self._using[name] += 1
        try:
            yield
        finally:
            self._using[name] -= 1
            if not self._using[name]:
                del self._using[name]

    @asynccontextmanager
    async def archiving(self) -> AsyncIterator[None]:
        """Keep the files of all jobs where they are, while a request reads them."""
        async with self._pruning:  # else it would be read without a part of the files
            self._archives += 1
        try:
            yield
        finally:
            self._archives -= 1

    def step(self, unix: float) -> None:
        """Move the oldest ended jobs beyond KEPT out of memory, unless the disk is full."""
        if self._archives or self._core.journal.full is not None:
            return  # on a full disk their ends may not be in the ledger yet
        ended = [job for job in self._core.jobs.values() if job.state.ended]
        if len(ended) <= KEPT:
            return
        ended.sort(key=_by_end)
        try:
            for job in [j for j in ended[:-KEPT] if self._is_still(j, unix) and self._has_place(j)][:AT_ONCE]:
                self._retire(job)
        except OSError as error:
            if not is_full(error):
                raise  # else a later step tries again

    def _is_still(self, job: ManagedJob, unix: float) -> bool:
        """Return whether nothing of an ended job is on its way any more."""
        return (job.state.ended and abs(unix - job.record.ended_at) > REST_S and not job.unsaved
                and not job.workers.all and not job.outputs.is_busy and not self._is_busy(job)
                and self._is_free(job.id))

    def _is_free(self, name: str) -> bool:
        """Return whether no request uses the files of a job, and no host holds results of it: they arrive after its
        workers' ends."""
        return name not in self._using and name not in self._going and not self._core.unsent.of_job(name)

    def is_going(self, name: str) -> bool:
        """Return whether a job is being pruned."""
        return name in self._going

    def _has_place(self, job: ManagedJob) -> bool:
        """Return whether nothing is where the job is to go: two folders of one job are for a person to look at."""
        place = self._folder / job.id
        if place.exists() and job.id not in self._twice:
            self._twice.add(job.id)
            log.warning("%s stays in %s: %s exists, too", job.id, job.folder, place)
        return not place.exists()

    def _retire(self, job: ManagedJob) -> None:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        place = self._folder / job.id
        atomic.rename(job.folder, place, sync=False)  # after a power failure it is in one of the two
        job.relocate(place)  # a request under way goes on with it
        del self._core.jobs[job.id]
        self.left.add(job.id)
        self.count += 1

    # ---- for `jobs --prune`

    async def list_ended(self, keep: int, after: str) -> tuple[list[EndedJob], bool]:
        """Return the next PAGE ended jobs after the one named `after`, oldest first, without the newest `keep`; and
        whether there are more."""
        names, unix = self._prunable(keep), self._core.unix()
        later = [name for name in names if jobfile.number_of(name) > jobfile.number_of(after)] if after else names
        page = [(name, self._folder_of(name)) for name in later[:PAGE]]
        return await asyncio.to_thread(lambda: [_ended(name, folder, unix) for name, folder in page]), len(later) > PAGE

    async def prune(self, names: Iterable[str]) -> list[str]:
        """Remove the files of these jobs; return the names of the removed ones. Running jobs stay, and so do the ended
        one with the highest number and the one that ended last. Raises UsageError while the archive is read."""
        async with self._pruning:
            if self._archives or self._core.journal.state.down is not None:
                raise UsageError("the fleet's archive is being copied, and would lack these jobs",
                                 hint="`spotfleet down` copies all of them; then nothing is left to remove")
            allowed = set(self._prunable(1))
            chosen = [name for name in dict.fromkeys(names) if name in allowed]
            if chosen:
                self._going.update(chosen)
                try:
                    await self._remove(chosen)
                finally:
                    self._going.difference_update(chosen)
            return chosen

    async def _remove(self, chosen: list[str]) -> None:
        unix, places = self._core.unix(), [(name, self._folder_of(name)) for name in chosen]
        rows = await asyncio.to_thread(lambda: [_ended(name, folder, unix) for name, folder in places])
        self._core.journal.note(JobsPruned(unix, tuple(chosen), sum(row.bytes for row in rows),
                                           tuple(row.job for row in rows if row.unfetched_bytes)))
        with suppress(DiskFull):  # the event waits for the room that this makes
            await self._core.journal.flush()
        going = [self._take_away(name) for name in chosen if self._folder_of(name).exists()]
        await asyncio.to_thread(lambda: [shutil.rmtree(folder, ignore_errors=True) for folder in going])
        await self._wait_for_ledger()
        log.info("pruned %d jobs: %s", len(chosen), ", ".join(chosen))

    async def _wait_for_ledger(self) -> None:
        """Wait until events that a full disk refused are written: without its end in the ledger, a job whose files are
        removed counts as lost after a restart."""
        journal, until = self._core.journal, time.monotonic() + ROOM_S
        while journal.full is not None and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        with suppress(DiskFull):
            await journal.flush()

    def _prunable(self, keep: int) -> list[str]:
        """Return the ended jobs without the newest `keep`, and without the one that ended last: its end tells a
        restarted dispatcher for how long the fleet has been idle."""
        ended = [job for job in self._core.jobs.values() if job.state.ended]
        last = max(ended, key=_by_end).id if ended else ""
        return [name for name in self._ended_names(self._core.unix())[:-max(1, keep)] if name != last]

    def _ended_names(self, unix: float) -> list[str]:
        here = [job.id for job in self._core.jobs.values() if self._is_still(job, unix)]
        past = [name for name in jobfile.past(self._core.home) if self._is_free(name)]
        return sorted({*past, *here}, key=lambda name: (jobfile.number_of(name), name))

    def _folder_of(self, name: str) -> Path:
        job = self._core.jobs.get(name)
        return self._folder / name if job is None else job.folder

    def _take_away(self, name: str) -> Path:
        """Take a job out of the dispatcher; return its folder, which `files.sweep` removes too."""
        folder, going = self._folder_of(name), self._core.home / f".{name}.part"
        shutil.rmtree(going, ignore_errors=True)
        atomic.rename(folder, going, sync=False)
        if self._core.jobs.pop(name, None) is None:
            self.count -= 1
        self._cache.pop(name, None)
        self.left.add(name)
        return going


def _by_end(job: ManagedJob) -> tuple[float, int]:
    return job.record.ended_at, jobfile.number_of(job.id)


def _ended(name: str, folder: Path, unix: float) -> EndedJob:
    """Describe an ended job. Blocking. Its outputs count as fetched if no file is newer than the last download."""
    try:
        record = jobfile.load(folder)[0]
    except (ValueError, OSError):
        return EndedJob(name, "", "unknown", 0.0, sum(size for _, size in _files(folder)), _unfetched(folder, 0.0))
    return EndedJob(name, record.spec.name, record.state.value, max(0.0, unix - record.ended_at),
                    sum(size for _, size in _files(folder)), _unfetched(folder, record.fetched_at))


def _unfetched(folder: Path, fetched_at: float) -> int:
    """Return the bytes of output that no download has included."""
    return sum(size for path, size in _files(folder / "outputs") if path.stat().st_mtime >= fetched_at)


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.stat().st_size
