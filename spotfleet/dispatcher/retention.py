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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.disk import jobfile
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.errors import DiskFull
from spotfleet.fleet.domain.events import JobsPruned
from spotfleet.protocol.messages import EndedJob
from spotfleet.storage import atomic

log = logging.getLogger(__name__)
KEPT = 300  # ended jobs in memory; each step of the loop and each `status` passes over them
REST_S = 60.0  # the last output of a job's workers may arrive for some time after its end
AT_ONCE = 20  # jobs that leave memory in one step of the loop, which must stay short
CACHED = 16  # jobs of `past` that requests named last
PAGE = 200  # jobs in one answer: their sizes are counted file by file


class Retention:
    """Ended jobs that have left memory, and the removal of ended jobs."""

    def __init__(self, core: Core, load: Callable[[Path], ManagedJob], is_busy: Callable[[ManagedJob], bool]) -> None:
        """`is_busy`: something of the job still has to be copied."""
        self._core, self._load, self._is_busy = core, load, is_busy
        self._folder = core.home / "past"
        self.count = len(jobfile.past(core.home))
        self._cache: dict[str, ManagedJob] = {}
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

    def step(self, unix: float) -> None:
        """Move the oldest ended jobs beyond KEPT out of memory, unless the disk is full."""
        if self._core.journal.full is not None:
            return  # their ends may not be in the ledger yet
        ended = [job for job in self._core.jobs.values() if job.state.ended]
        if len(ended) <= KEPT:
            return
        ended.sort(key=lambda job: (job.record.ended_at, jobfile.number_of(job.id)))
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
        """Return whether no host holds results of a job, which arrive after its workers' ends."""
        return not self._core.unsent.of_job(name)

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
        self.count += 1

    # ---- for `jobs --prune`

    async def list_ended(self, keep: int, after: str) -> tuple[list[EndedJob], bool]:
        """Return the next PAGE ended jobs after the one named `after`, oldest first, without the newest `keep`; and
        whether there are more."""
        names, unix = self._ended_names(self._core.unix())[:-max(1, keep)], self._core.unix()
        later = [name for name in names if jobfile.number_of(name) > jobfile.number_of(after)] if after else names
        page = [(name, self._folder_of(name)) for name in later[:PAGE]]
        return await asyncio.to_thread(lambda: [_ended(name, folder, unix) for name, folder in page]), len(later) > PAGE

    async def prune(self, names: Iterable[str]) -> list[str]:
        """Remove the files of these jobs; return those that were removed. Running jobs and the newest ended one stay:
        its end tells a restarted dispatcher for how long the fleet has been idle."""
        allowed = set(self._ended_names(self._core.unix())[:-1])
        chosen = [name for name in dict.fromkeys(names) if name in allowed]
        if not chosen:
            return []
        unix, places = self._core.unix(), [(name, self._folder_of(name)) for name in chosen]
        rows = await asyncio.to_thread(lambda: [_ended(name, folder, unix) for name, folder in places])
        self._core.journal.note(JobsPruned(unix, tuple(chosen), sum(row.bytes for row in rows),
                                           tuple(row.job for row in rows if row.unfetched_bytes)))
        with suppress(DiskFull):  # the event waits for the room that this makes
            await self._core.journal.flush()
        going = [self._take_away(name) for name in chosen if self._folder_of(name).exists()]
        await asyncio.to_thread(lambda: [shutil.rmtree(folder, ignore_errors=True) for folder in going])
        log.info("pruned %d jobs: %s", len(chosen), ", ".join(chosen))
        return chosen

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
        return going


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
