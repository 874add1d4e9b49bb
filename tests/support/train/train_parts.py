"""What a dispatcher does with checkpoints: their files are copied when they are reported, until all are there. And how
they are read whole."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from spotfleet.protocol.checkpoint_files import MANIFEST
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage.checkpoint_folder import Progress, digest_of, files_of, ignore, problem_in
from spotfleet.train.checkpoint import restore
from spotfleet.train.checkpoint.host_copy import HostFolder
from spotfleet.train.state.position import Copy


def restored(named: Checkpoint, progress: Progress = ignore) -> Copy:
    """Return the copy with all tensors in memory; `named` may be as its only writer has reported it."""
    path = Path(named.path)
    with restore.opened(replace(named, path=str(path.parent if path.name == MANIFEST else path)), progress) as held:
        return replace(held, tensors=list(held.tensors))


def restored_url(named: Checkpoint, place: HostFolder) -> Copy:
    with restore.opened_url(named, place) as held:
        return replace(held, tensors=list(held.tensors))


class Kept:
    """The checkpoints of one job. `newest` is whole, its files are ours."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()
        self._manifests: dict[Path, Checkpoint] = {}
        self.whole: list[Checkpoint] = []

    @property
    def newest(self) -> Checkpoint | None:
        return max(self.whole, key=lambda c: (c.generation, c.version), default=None)

    def take(self, told: Checkpoint) -> None:
        if told.url and told not in self.whole:
            self.whole.append(told)
        if told.digest in self._seen or not Path(told.path).is_file():
            return
        self._seen.add(told.digest)
        place = self._folder / f"{told.version}-{told.generation}"
        place.mkdir(parents=True, exist_ok=True)
        for file in files_of(told):
            shutil.copyfile(file.path, place / file.name)
            assert digest_of(place / file.name) == file.digest
        if told.name == MANIFEST:
            self._manifests[place] = replace(told, part=0, parts=1, path=str(place))
        if place in self._manifests and not problem_in(place, self._manifests[place].digest):
            self.whole.append(self._manifests[place])
