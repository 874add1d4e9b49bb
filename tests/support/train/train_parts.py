"""What a dispatcher does with checkpoints: parts are copied when they are reported, and joined when all are there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from spotfleet.protocol.messages import Checkpoint
from spotfleet.train.checkpoint.file import digest_of


class Kept:
    """The checkpoints of one job. `newest` is whole, its file is ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()
        self._parts: dict[tuple[int, int, int], dict[int, Path]] = {}
        self.whole: list[Checkpoint] = []

    @property
    def newest(self) -> Checkpoint | None:
        return max(self.whole, key=lambda c: (c.generation, c.version), default=None)

    def take(self, told: Checkpoint) -> None:
        if told.url and told not in self.whole:
            self.whole.append(told)
        source = Path(told.path)
        if told.digest in self._seen or not source.is_file():
            return
        self._seen.add(told.digest)
        self._folder.mkdir(exist_ok=True)
        key = (told.generation, told.version, told.parts)
        path = self._folder / f"{told.generation}-{told.version}-{told.part}-of-{told.parts}"
        shutil.copyfile(source, path)
        assert digest_of(path) == told.digest
        parts = self._parts.setdefault(key, {})
        parts[told.part] = path
        if len(parts) < told.parts:
            return
        joined = self._folder / f"{told.version}-{told.generation}.ckpt"
        with open(joined, "wb") as out:
            for part in range(told.parts):
                out.write(parts[part].read_bytes())
        self.whole.append(replace(told, part=0, parts=1, path=str(joined), digest=digest_of(joined),
                                  bytes=joined.stat().st_size))
