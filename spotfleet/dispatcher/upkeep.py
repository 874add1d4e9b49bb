"""Work on checkpoints that takes time and is done beside the loop: reading those in doubt, joining those whose parts
are all here (a killed dispatcher left them, or the disk was full), and the target's copies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from spotfleet.dispatcher.checkpoints import CheckpointStore, Outdated
from spotfleet.dispatcher.jobfile import JobRecord
from spotfleet.dispatcher.mirror import Mirror
from spotfleet.errors import DiskFull
from spotfleet.messages import Checkpoint
from spotfleet.model import JobState

log = logging.getLogger(__name__)
LOOK_S = 0.25
AGAIN_S = 10.0  # a join that found no room


class Kept(Protocol):
    """A job, as far as it matters here."""

    checkpoints: CheckpointStore

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> JobState: ...

    @property
    def record(self) -> JobRecord: ...


Job = TypeVar("Job", bound=Kept)


class Upkeep:
    def __init__(self, jobs: Callable[[], Iterable[Job]], mirror: Mirror | None, changed: Callable[[], None],
                 kept: Callable[[Job, Checkpoint], None]) -> None:
        """`changed` is called when more is known of a checkpoint than before, `kept` for each that has become whole."""
        self._jobs, self._mirror, self._changed, self._kept = jobs, mirror, changed, kept
        self._full_until: dict[str, float] = {}  # monotonic

    async def run(self) -> None:
        tasks = [self._read(), self._join()]
        if self._mirror:
            tasks += [self._copy(self._mirror), self._look(self._mirror)]
        try:
            await asyncio.gather(*tasks)
        finally:
            if self._mirror:
                self._mirror.close()

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
                    await self._join_one(job, job.checkpoints.parts.ready()[0][0])
            await asyncio.sleep(LOOK_S)

    async def _join_one(self, job: Kept, ready: Checkpoint) -> None:
        try:
            whole = await job.checkpoints.join(ready, lambda: job.record.fence)
        except (OSError, DiskFull) as error:
            job.checkpoints.problem = f"checkpoint {ready.version} is here in parts and cannot be joined: {error}"
            log.warning("%s: %s", job.id, job.checkpoints.problem)
            self._full_until[job.id] = time.monotonic() + AGAIN_S
        except Outdated:
            pass  # its parts are pruned at the next look
        else:
            if whole is not None:
                self._kept(job, whole)

    async def _copy(self, mirror: Mirror) -> None:
        while True:
            for job in [j for j in self._jobs() if mirror.owes(j.id, j.checkpoints)]:
                await mirror.copy(job.id, job.checkpoints)
            await asyncio.sleep(LOOK_S)

    async def _look(self, mirror: Mirror) -> None:
        while True:
            for job in [j for j in self._jobs() if j.checkpoints.seeks and not j.checkpoints.unsure()]:
                await mirror.look(job.id, job.checkpoints)
                self._changed()
            await asyncio.sleep(LOOK_S)
