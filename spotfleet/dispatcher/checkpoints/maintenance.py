"""Checkpoint maintenance: slow work beside the loop.

It reads checkpoints in doubt, makes those whole of which all files are here (left by a killed dispatcher, or by a full
disk), and synchronises the target: it takes what hosts have written there, and copies the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from spotfleet.dispatcher.checkpoints.replica import Replica
from spotfleet.dispatcher.checkpoints.store import CheckpointStore, Outdated
from spotfleet.dispatcher.disk.jobfile import JobRecord
from spotfleet.errors import DiskFull
from spotfleet.model import JobState
from spotfleet.protocol.messages import Checkpoint

log = logging.getLogger(__name__)
LOOK_S = 0.25
AGAIN_S = 10.0  # pause after a join that found no room


class HasCheckpoints(Protocol):
    """Part of a job that maintenance needs."""

    checkpoints: CheckpointStore

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> JobState: ...

    @property
    def record(self) -> JobRecord: ...


Job = TypeVar("Job", bound=HasCheckpoints)


class CheckpointMaintenance:
    """Background tasks for the checkpoints of all jobs."""

    def __init__(self, jobs: Callable[[], Iterable[Job]], replica: Replica | None, changed: Callable[[], None],
                 kept: Callable[[Job, Checkpoint], None]) -> None:
        """`changed` is called when the state of a checkpoint changed, `kept` for each one that has become whole."""
        self._jobs, self._replica, self._changed, self._kept = jobs, replica, changed, kept
        self._full_until: dict[str, float] = {}  # monotonic

    async def run(self) -> None:
        tasks = [self._read(), self._join()]
        if self._replica:
            tasks += [self._take(self._replica), self._copy(self._replica), self._fetch(self._replica)]
        try:
            await asyncio.gather(*tasks)
        finally:
            if self._replica:
                self._replica.close()

    async def _read(self) -> None:
        while True:
            for job in [j for j in self._jobs() if not j.state.ended]:
                for checkpoint in job.checkpoints.unsure():
                    await job.checkpoints.check(checkpoint)
                    self._changed()
            await asyncio.sleep(LOOK_S)

    async def _join(self) -> None:
        while True:
            for job in self._jobs():
                store, fence = job.checkpoints, job.record.fence
                store.parts.prune(lambda _: True) if job.state.ended else store.prune_parts(fence)
            for job in [j for j in self._jobs() if j.checkpoints.parts.ready()]:
                if time.monotonic() >= self._full_until.get(job.id, 0.0):
                    await self._join_one(job, job.checkpoints.parts.ready()[0].manifest)
            await asyncio.sleep(LOOK_S)

    async def _join_one(self, job: HasCheckpoints, ready: Checkpoint) -> None:
        try:
            whole = await job.checkpoints.join(ready, lambda: job.record.fence)
        except (OSError, DiskFull) as error:
            job.checkpoints.problem = f"checkpoint {ready.version} is here in pieces and cannot be made whole: {error}"
            log.warning("%s: %s", job.id, job.checkpoints.problem)
            self._full_until[job.id] = time.monotonic() + AGAIN_S
        except Outdated:
            pass  # its parts are pruned in the next round
        else:
            if whole is not None:
                self._kept(job, whole)

    async def _copy(self, replica: Replica) -> None:
        while True:
            replica.forget(job.id for job in self._jobs())
            for job in [j for j in self._jobs() if replica.is_behind(j.id, j.checkpoints)]:
                await replica.copy(job.id, job.checkpoints)
            await asyncio.sleep(LOOK_S)

    async def _take(self, replica: Replica) -> None:
        while True:
            await replica.show_probe()
            for job in self._jobs():
                job.checkpoints.probe = replica.probe
            for job in [j for j in self._jobs() if j.checkpoints.to_look and not j.state.ended]:
                if (taken := await replica.take(job.id, job.checkpoints, lambda job=job: job.record.fence)) is not None:
                    self._kept(job, taken)
            await asyncio.sleep(LOOK_S)

    async def _fetch(self, replica: Replica) -> None:
        while True:
            for job in [j for j in self._jobs() if j.checkpoints.seeks and not j.checkpoints.unsure()]:
                await replica.fetch_newer(job.id, job.checkpoints)
                self._changed()
            await asyncio.sleep(LOOK_S)
