"""Work on checkpoints that takes time and is done beside the loop: reading those whose digest is in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from spotfleet.dispatcher.checkpoints import CheckpointStore

LOOK_S = 0.25


class Kept(Protocol):
    """A job, as far as it matters here."""

    checkpoints: CheckpointStore


class Upkeep:
    def __init__(self, jobs: Callable[[], Iterable[Kept]], changed: Callable[[], None]) -> None:
        """`jobs`: those that may need a checkpoint; `changed` is called when one of theirs was found good or bad."""
        self._jobs, self._changed = jobs, changed

    async def run(self) -> None:
        while True:
            for job in list(self._jobs()):
                for checkpoint in job.checkpoints.unsure():
                    await job.checkpoints.check(checkpoint)
                    self._changed()
            await asyncio.sleep(LOOK_S)
