"""Parts of checkpoints that several ranks write: stored until all parts of one are here, then joined into its file.

    checkpoints/VERSION-GENERATION.parts/PART-PARTS-SHA256    joined in the order of PART

    arriving --its digest is right--> kept --all are here--> joined into a draft --> renamed, recorded; parts removed
        removed by: a newer whole one, a later generation,        '-- a part is damaged: it is removed, the others
        MOST newer ones that are not whole either                     wait until a host sends it again

After a kill at any write, the dispatcher finds the parts or the whole. A join needs additional room of the parts' size.

A host that sends its parts slower than they are made skips to the newest, each host to another one, so no checkpoint
would become whole. Therefore each one that is dropped for newer ones doubles the interval, and EASE joined ones in a
row halve it again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from spotfleet.dispatcher.disk.space import refuse_if_full
from spotfleet.errors import SpotfleetError
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic
from spotfleet.storage.folder import part_called

MOST_PARTS = 4096
MOST = 3  # limit of incomplete checkpoints: hosts that are slow in turn must not fill the disk
MOST_DOUBLINGS = 6
EASE = 8
CHUNK_BYTES = 1 << 20


class PartDamaged(SpotfleetError):
    """Part whose file differs from the data that arrived, or is missing."""

    def __init__(self, part: Checkpoint) -> None:
        super().__init__(f"part {part.part} of {part.parts} of checkpoint {part.version} is damaged on this disk",
                         hint="the next checkpoint takes its place")
        self.part = part
        self.what = f"part {part.part} of {part.parts}, {Path(part.path).name}, is damaged on this disk"


Key = tuple[int, int, int]  # generation, version, parts: sorted by age


class Parts:
    """Parts in one job's folder. Used on the event loop; `join` runs in threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[Key, dict[int, Checkpoint]] = {}
        self._doublings = self._in_a_row = 0
        self._paced: Key = (0, 0, 0)  # the newest at the last change of pace; older ones do not count for the new pace
        for path in folder.glob("*.parts"):
            self._read(path)

    def holds(self, offered: Checkpoint) -> bool:
        held = self._held.get(_key(offered), {}).get(offered.part)
        return held is not None and held.digest == offered.digest and Path(held.path).is_file()

    def arrival(self, offered: Checkpoint) -> Path:
        """Return the path for the data before `keep`; `files.sweep` removes such files."""
        return self._folder / f".{_name(offered)}-{_file(offered)}.part"

    def keep(self, offered: Checkpoint, arrived: Path) -> Checkpoint:
        """Store the verified file `arrived` as this part."""
        path = self._place(offered) / _file(offered)
        atomic.make_folder(path.parent)
        atomic.rename(arrived, path)
        kept = replace(offered, path=str(path), bytes=path.stat().st_size)
        found = self._held.setdefault(_key(offered), {})
        before, found[offered.part] = found.get(offered.part), kept
        if before is not None and before.path != kept.path:
            Path(before.path).unlink(missing_ok=True)
        for old in sorted(self._held)[:-MOST]:
            self._is_late(old)
            self._drop(old)
        return replace(kept, path="")

    @property
    def stretch(self) -> int:
        """Factor on the interval between two checkpoints."""
        return 1 << self._doublings

    def has_joined(self, whole: Checkpoint) -> None:
        self._in_a_row += _key(whole) > self._paced
        if self._in_a_row >= EASE:
            self._in_a_row, self._doublings = 0, max(0, self._doublings - 1)

    def _is_late(self, key: Key) -> None:
        """Slow the pace: this checkpoint is dropped for newer ones."""
        newest = max(self._held)
        if key > self._paced and key[0] == newest[0]:  # else it is incomplete because its generation ended
            self._paced, self._in_a_row = newest, 0
            self._doublings = min(MOST_DOUBLINGS, self._doublings + 1)

    def ready(self) -> list[list[Checkpoint]]:
        """Return the checkpoints with all parts here, newest first; the parts of each are in order."""
        return [[found[part] for part in range(key[2])]
                for key, found in sorted(self._held.items(), reverse=True) if len(found) == key[2]]

    def forget(self, part: Checkpoint) -> None:
        Path(part.path).unlink(missing_ok=True)
        self._held.get(_key(part), {}).pop(part.part, None)

    def prune(self, useless: Callable[[tuple[int, int]], bool]) -> None:
        """Drop the parts of checkpoints for which `useless((generation, version))` is true."""
        for key in [k for k in self._held if useless(k[:2])]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        del self._held[key]
        generation, version, _ = key
        if any(k[:2] == key[:2] for k in self._held):
            return  # also held in another number of parts; the folder is removed with the last of them
        place = self._folder / f"{version}-{generation}.parts"
        going = place.with_name(f".{place.name}.part")  # whole or absent; `files.sweep` removes such names
        shutil.rmtree(going, ignore_errors=True)
        if place.exists():
            atomic.rename(place, going, sync=False)
        shutil.rmtree(going, ignore_errors=True)

    def _place(self, checkpoint: Checkpoint) -> Path:
        return self._folder / f"{_name(checkpoint)}.parts"

    def _read(self, place: Path) -> None:
        files = sorted(place.iterdir(), key=lambda f: f.stat().st_mtime_ns) if place.is_dir() else []
        for path in files:  # in order of time: the last process may have been killed before it removed a replaced part
            if part := part_called(f"{place.name}/{path.name}"):
                part = replace(part, path=str(path), bytes=path.stat().st_size)
                self._held.setdefault(_key(part), {})[part.part] = part


def join(parts: Sequence[Checkpoint], draft: Path) -> Checkpoint:
    """Join `parts` into the file `draft`, synced; blocking. Raises PartDamaged for a damaged part, OSError or DiskFull
    without room; then no file remains."""
    refuse_if_full(draft.parent, sum(part.bytes for part in parts))
    whole = hashlib.sha256()
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out, \
                ThreadPoolExecutor(1, "join") as beside:
            for part in parts:
                _append(part, whole, out, beside)
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return Checkpoint(parts[0].version, whole.hexdigest(), size, parts[0].generation)


def _append(part: Checkpoint, whole: Any, out: BinaryIO, beside: ThreadPoolExecutor) -> None:
    """Append a part to the draft. Its own digest and that of the whole are computed on two cores."""
    own_sha = hashlib.sha256()
    try:
        with open(part.path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                of_whole = beside.submit(whole.update, chunk)
                out.write(chunk)
                own_sha.update(chunk)
                of_whole.result()
    except FileNotFoundError:
        raise PartDamaged(part) from None
    if own_sha.hexdigest() != part.digest:
        raise PartDamaged(part)


def _key(checkpoint: Checkpoint) -> Key:
    return (checkpoint.generation, checkpoint.version, checkpoint.parts)


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.version}-{checkpoint.generation}"


def _file(part: Checkpoint) -> str:
    return f"{part.part}-{part.parts}-{part.digest}"
