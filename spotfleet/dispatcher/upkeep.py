"""Work on checkpoints that takes time and is done beside the loop: reading those in doubt, and the target's copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from spotfleet.dispatcher.checkpoints import CheckpointStore
from spotfleet.dispatcher.mirror import Mirror
from spotfleet.model import JobState

LOOK_S = 0.25


class Kept(Protocol):
    """A job, as far as it matters here."""

    checkpoints: CheckpointStore

    @property
    def id(self) -> str: ...

    @property
    def state(self) -> JobState: ...


class Upkeep:
    def __init__(self, jobs: Callable[[], Iterable[Kept]], mirror: Mirror | None, changed: Callable[[], None]) -> None:
        """`changed` is called when more is known of a checkpoint than before."""
        self._jobs, self._mirror, self._changed = jobs, mirror, changed

    async def run(self) -> None:
        tasks = [self._read(), *([self._copy(self._mirror), self._look(self._mirror)] if self._mirror else [])]
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
