"""Pieces of checkpoints, which their writers' hosts send file by file: stored until all of one are here, then linked
into its folder. Nothing is copied.

    checkpoints/VERSION-GENERATION.parts/FILE-SHA256    names of FILE: see `protocol/checkpoint_files.py`

    arriving --its digest is right--> kept --its manifest and all that it names are here--> linked into a draft
        removed by: a newer whole one, a later generation,        '-- a file is damaged: it is removed, the others
        MOST newer ones that are not whole either                     wait until a host sends it again

    draft --renamed, recorded--> whole; the pieces are removed

After a kill at any write, the dispatcher finds the pieces or the whole.

A host that sends its pieces slower than they are made skips to the newest, each host to another one, so no checkpoint
would become whole. Therefore each one that is dropped for newer ones doubles the interval, and EASE whole ones in a row
halve it again.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.dispatcher.disk.records import Seen, digest_of, seen_at
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.protocol.checkpoint_files import MANIFEST, CheckpointManifest, in_order, is_file_name, parse_manifest
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic

MOST = 3  # limit of incomplete checkpoints: hosts that are slow in turn must not fill the disk
MOST_ALIKE = 2  # files of one name in one checkpoint: a rank may have written it again, and a host may send anything
MOST_DOUBLINGS = 6
EASE = 8
_FILE = re.compile("(.+)-([0-9a-f]{64})")


class PieceDamaged(SpotfleetError):
    """Piece whose file differs from the data that arrived, or is missing."""

    def __init__(self, piece: Checkpoint) -> None:
        super().__init__(f"{piece.name} of checkpoint {piece.version} is damaged on this disk",
                         hint="the next checkpoint takes its place")
        self.piece = piece
        self.what = f"its piece {Path(piece.path).name} is damaged on this disk"


Key = tuple[int, int]  # generation and version: sorted by age


@dataclass(frozen=True)
class _Held:
    piece: Checkpoint  # with its path
    seen: Seen | None  # state of the file when this process compared its digest; None: it has not
    listed: CheckpointManifest | None = None  # if it is a manifest


@dataclass(frozen=True)
class CompleteSet:
    """A manifest and all files that it names, by name."""

    manifest: Checkpoint
    files: Mapping[str, _Held]


class Parts:
    """Pieces in one job's folder. Used on the event loop; `assemble` runs in threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[Key, dict[tuple[str, str], _Held]] = {}  # by name and digest
        self._doublings = self._in_a_row = 0
        self._paced: Key = (0, 0)  # the newest at the last change of pace; older ones do not count for the new pace
        for path in folder.glob("*.parts"):
            self._read(path)

    def holds(self, offered: Checkpoint) -> bool:
        held = self._held.get(_key(offered), {}).get((offered.name, offered.digest))
        return held is not None and Path(held.piece.path).is_file()

    def arrival(self, offered: Checkpoint) -> Path:
        """Return the path for the data before `keep`; `files.sweep` removes such files."""
        return self._folder / f".{_name(offered)}-{_file(offered)}.part"

    def keep(self, offered: Checkpoint, arrived: Path) -> None:
        """Store the verified file `arrived` as this piece. UsageError for a manifest of another checkpoint."""
        listed = _listed(offered, arrived)
        path = self._place(offered) / _file(offered)
        atomic.make_folder(path.parent)
        atomic.rename(arrived, path)
        self._add(replace(offered, path=str(path), bytes=path.stat().st_size), seen_at(path), listed)
        for old in sorted(self._held)[:-MOST]:
            self.is_late(old, max(self._held))
            self._drop(old)

    def _add(self, piece: Checkpoint, seen: Seen | None, listed: CheckpointManifest | None) -> None:
        found = self._held.setdefault(_key(piece), {})
        found[piece.name, piece.digest] = _Held(piece, seen, listed)
        for key in [key for key in found if key[0] == piece.name][:-MOST_ALIKE]:
            Path(found.pop(key).piece.path).unlink(missing_ok=True)

    @property
    def stretch(self) -> int:
        """Factor on the interval between two checkpoints."""
        return 1 << self._doublings

    def has_joined(self, whole: Checkpoint) -> None:
        self._in_a_row += _key(whole) > self._paced
        if self._in_a_row >= EASE:
            self._in_a_row, self._doublings = 0, max(0, self._doublings - 1)

    def is_late(self, key: Key, newest: Key) -> None:
        """Slow the pace: the checkpoint `key` is dropped for newer ones."""
        if key > self._paced and key[0] == newest[0]:  # else it is incomplete because its generation ended
            self._paced, self._in_a_row = newest, 0
            self._doublings = min(MOST_DOUBLINGS, self._doublings + 1)

    def pieces(self) -> list[Checkpoint]:
        """Return all pieces that are here, with their paths."""
        return [held.piece for found in self._held.values() for held in found.values()]

    def ready(self) -> list[CompleteSet]:
        """Return the checkpoints of which all files are here, newest first."""
        found = []
        for _, held in sorted(self._held.items(), reverse=True):
            for manifest in [h for h in held.values() if h.listed is not None]:
                files = {name: held.get((name, entry.sha256)) for name, entry in manifest.listed.files.items()}
                here = {name: file for name, file in files.items() if file is not None}
                if len(here) == len(files):
                    found.append(CompleteSet(manifest.piece, {**here, MANIFEST: manifest}))
        return found

    def forget(self, piece: Checkpoint) -> None:
        Path(piece.path).unlink(missing_ok=True)
        self._held.get(_key(piece), {}).pop((piece.name, piece.digest), None)

    def prune(self, useless: Callable[[Key], bool]) -> None:
        """Drop the pieces of checkpoints for which `useless((generation, version))` is true."""
        for key in [key for key in self._held if useless(key)]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        del self._held[key]
        generation, version = key
        remove(self._folder / f"{version}-{generation}.parts")

    def _place(self, checkpoint: Checkpoint) -> Path:
        return self._folder / f"{_name(checkpoint)}.parts"

    def _read(self, place: Path) -> None:
        """Read the pieces that an earlier process left. Parts of tars, by earlier releases, are removed."""
        files = sorted(place.iterdir(), key=lambda f: f.stat().st_mtime_ns) if place.is_dir() else []
        version, _, generation = place.name.removesuffix(".parts").partition("-")
        known = version.isdecimal() and generation.isdecimal()
        for path in files if known else []:
            found = _FILE.fullmatch(path.name)
            if found is None or not is_file_name(found[1]):
                continue
            piece = Checkpoint(int(version), found[2], path.stat().st_size, int(generation), str(path), name=found[1])
            try:
                self._add(piece, None, _listed(piece, path))
            except UsageError:
                path.unlink(missing_ok=True)  # damaged: its host sends it again
        if known and (int(generation), int(version)) not in self._held:
            remove(place)


def _listed(offered: Checkpoint, path: Path) -> CheckpointManifest | None:
    """Return the content of a manifest, None for another file. UsageError if it is none of this checkpoint."""
    if offered.name != MANIFEST:
        return None
    try:
        found = parse_manifest(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"name: {MANIFEST}: {error}") from error
    if (found.version, found.generation) != (offered.version, offered.generation):
        raise UsageError(f"name: {MANIFEST} is that of checkpoint {found.version}-{found.generation}, "
                         f"not of {_name(offered)}")
    return found


def assemble(found: CompleteSet, draft: Path) -> Checkpoint:
    """Link the files of a checkpoint into the folder `draft`, whose names are then on the disk; blocking. Raises
    PieceDamaged or OSError; then no folder remains."""
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(mode=0o700)
        for name in in_order(found.files):
            _link(found.files[name], draft / name)
        atomic.sync_folder(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    made, size = found.manifest, sum(held.piece.bytes for held in found.files.values())
    return Checkpoint(made.version, made.digest, size, made.generation, name=MANIFEST)


def _link(held: _Held, target: Path) -> None:
    path = Path(held.piece.path)
    try:
        if seen_at(path) != held.seen and digest_of(path) != held.piece.digest:
            raise PieceDamaged(held.piece)
        os.link(path, target)
    except FileNotFoundError:
        raise PieceDamaged(held.piece) from None


def remove(place: Path) -> None:
    """Remove a file, or a folder, whole or not at all."""
    if not place.is_dir():
        return place.unlink(missing_ok=True)
    going = place.with_name(f".{place.name}.part")  # `files.sweep` removes such names
    shutil.rmtree(going, ignore_errors=True)
    atomic.rename(place, going, sync=False)
    shutil.rmtree(going, ignore_errors=True)


def _key(checkpoint: Checkpoint) -> Key:
    return (checkpoint.generation, checkpoint.version)


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.version}-{checkpoint.generation}"


def _file(piece: Checkpoint) -> str:
    return f"{piece.name}-{piece.digest}"
