"""Task that keeps the recent past in memory: series of jobs, slow workers, counters. It drains slow hosts if asked.

Jobs are sampled each SAMPLE_S. Everything else comes from the ledger, of which a new process reads the newest events,
so charts go on across a restart, with the ledger's points each 10 s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.dispatcher.live.series import START, JobSeries
from spotfleet.dispatcher.live.slow import SlowHost, SlowWorkers, host_to_replace
from spotfleet.fleet.domain.events import Event, GenerationFormed, HostListed, HostNoticed, JobEvent, JobResumed
from spotfleet.model import CloudState
from spotfleet.protocol.messages import JobStatus, SlowWorker, WorkerReport

SAMPLE_S = 2.0
PAGE = 500  # events read at once
READ_AT_START = 50_000  # newest events of the ledger; older ones are in `spotfleet events` and `spotfleet cost`
MOST_JOBS = 50  # newest jobs with a series


class HistoryKeeper:
    """The recent past of a fleet."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._seq = max(0, core.journal.last - READ_AT_START)
        self.series: dict[str, JobSeries] = {}
        self._slow: dict[str, SlowWorkers] = {}
        self._replaced: dict[str, set[int]] = {}  # job -> ranks whose hosts were drained as slow
        self.notices: Counter[str] = Counter()  # kind of notice -> number
        self.taken = 0  # hosts that the cloud took
        self.changes: Counter[tuple[str, str]] = Counter()  # (job, cause) -> generations after the first
        self.paused_s: Counter[str] = Counter()  # job -> seconds

    async def run(self) -> None:
        """Update until cancelled."""
        while True:
            await self.catch_up()
            self.sample()
            if (slow := self.replacement()) is not None:
                await self._core.drain(slow.host, slow.why)
            await asyncio.sleep(SAMPLE_S)

    async def catch_up(self) -> None:
        """Take all events that are new in the ledger."""
        while page := await self._core.journal.page(self._seq, PAGE):
            for seq, event in page:
                self._seq = seq
                self.take(event)

    def take(self, event: Event) -> None:
        match event:
            case HostNoticed():
                self.notices[event.notice] += 1
            case HostListed(state=CloudState.TERMINATED | CloudState.STOPPED) if event.runs and event.runs[-1].taken:
                self.taken += 1
            case GenerationFormed() if event.cause != START:
                self.changes[event.job, event.cause] += 1
            case JobResumed():
                self.paused_s[event.job] += event.pause_s
        if isinstance(event, JobEvent):
            self._of(event.job).take(event)

    def sample(self) -> None:
        """Measure the jobs that have not ended."""
        unix, live = self._core.unix(), [j for j in self._core.jobs.values() if not j.state.ended]
        for job in live:
            self._of(job.id).sample(unix, job.record.version, len(job.membership.members))
            self._slow.setdefault(job.id, SlowWorkers()).update(_reports(job))
        self._slow = {job.id: self._slow[job.id] for job in live}
        self._replaced = {job: ranks for job, ranks in self._replaced.items() if job in self._slow}

    def replacement(self) -> SlowHost | None:
        """Return the slow host to replace now, if the fleet file asks for that: one at a time, and only from a fleet
        that is whole."""
        views = [v for v in self._core.views() if v.host.counts or v.leaving is not None]
        least = sum(n.target for n in self._core.ranges.values() if n.min)  # the others have what jobs need
        whole = len(views) >= least and all(v.usable for v in views)
        if not (self._core.policy.replace_slow and whole):
            return None
        for job in (self._core.jobs[name] for name in self._slow):
            known = self._replaced.setdefault(job.id, set())
            found = host_to_replace(job.id, self.slow(job.id), job.membership.members, job.spec.min_workers, known)
            if found is not None:
                known |= found.ranks
                return found
        return None

    def slow(self, job: str) -> tuple[SlowWorker, ...]:
        return self._slow[job].found if job in self._slow else ()

    def with_slow(self, status: JobStatus) -> JobStatus:
        """Return the status, naming the job's slow workers."""
        found = self.slow(status.job)
        return replace(status, slow=found) if found else status

    def _of(self, job: str) -> JobSeries:
        if job not in self.series:
            self.series[job] = JobSeries()
            while len(self.series) > MOST_JOBS:
                ended = next((j for j in self.series if j not in self._core.jobs or self._core.jobs[j].state.ended),
                             next(iter(self.series)))
                del self.series[ended]
        return self.series[job]


def _reports(job: ManagedJob) -> list[tuple[int, WorkerReport]]:
    """Return (rank, report) of the members that have made a step in the current generation."""
    group = job.membership
    workers = [(rank, job.workers.all[name].report) for rank, name in enumerate(group.members)
               if name in job.workers.all]
    return [(rank, report) for rank, report in workers if report.resumed == group.generation]
