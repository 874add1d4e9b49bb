"""A job's checkpoints on the dispatcher's disk: the newest `keep`, and none of a generation that has been replaced.

    checkpoints/index.json         what is kept, oldest first; written after the file it names
    checkpoints/VERSION-GENERATION.ckpt
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.files import receive, write_json
from spotfleet.errors import SpotfleetError
from spotfleet.messages import Checkpoint

LIMIT_BYTES = 256 << 30


class Outdated(SpotfleetError):
    """The checkpoint belongs to a generation that has been replaced; its writer must not go on with it."""


class CheckpointStore:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = max(1, keep)
        self._kept = self._load()

    @property
    def newest(self) -> Checkpoint | None:
        return self._kept[-1] if self._kept else None

    def find(self, version: int) -> Path | None:
        """The file of this version; None when it is not kept."""
        kept = next((c for c in self._kept if c.version == version), None)
        return self._path(kept) if kept else None

    async def put(self, offered: Checkpoint, fence: Callable[[], int], chunks: AsyncIterator[bytes]) -> Checkpoint:
        """Keep `offered` once its bytes are here and have its digest; Outdated for generations below `fence`."""
        self._refuse_outdated(offered, fence())
        same = next((c for c in self._kept if (c.version, c.digest) == (offered.version, offered.digest)), None)
        if same is not None and same.generation == offered.generation:
            async for _ in chunks:  # sent again after a lost answer; the sender expects its body to be read
                pass
            return same
        path = self._path(offered)
        size = await receive(chunks, path, LIMIT_BYTES, offered.digest)
        kept = replace(offered, bytes=size, path="")
        self._refuse_outdated(kept, fence())  # a newer one may have come, or begun, while this one was on its way
        self._add(kept)
        return kept

    def _refuse_outdated(self, offered: Checkpoint, fence: int) -> None:
        newest = self.newest
        floor = max(fence, newest.generation if newest else 0)
        if offered.generation < floor:
            raise Outdated(f"a checkpoint of generation {offered.generation} is refused: generation {floor} has begun",
                           hint="this worker was replaced; it should end")

    def _add(self, kept: Checkpoint) -> None:
        others = [c for c in self._kept if c.version != kept.version]
        ordered = sorted([*others, kept], key=lambda c: (c.generation, c.version))
        self._kept = ordered[-self._keep:]
        write_json(self.folder / "index.json", to_json(self._kept))
        wanted = {self._path(c) for c in self._kept}
        for path in self.folder.glob("*.ckpt"):
            if path not in wanted:
                path.unlink(missing_ok=True)

    def _path(self, checkpoint: Checkpoint) -> Path:
        return self.folder / f"{checkpoint.version}-{checkpoint.generation}.ckpt"

    def _load(self) -> list[Checkpoint]:
        try:
            kept = from_json(list[Checkpoint], json.loads((self.folder / "index.json").read_text()))
        except FileNotFoundError:
            return []
        return [c for c in kept if self._path(c).exists()]
