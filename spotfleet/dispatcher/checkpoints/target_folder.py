"""Checkpoints of one job at a mounted target.

    jobs/JOB/checkpoints/VERSION-GENERATION/FILE    kept by a dispatcher; counts with the seal of the record beside it
    jobs/JOB/arriving/VERSION-GENERATION.parts/FILE-SHA256    by the job's hosts while they have a dispatcher, which
                                                    moves the files in place and seals a record once all are there
    jobs/JOB/quarantine/VERSION-GENERATION.parts/FILE-SHA256    left by hosts without a dispatcher; counts with the
                                                    mark and the grant in the record of its manifest

Earlier releases kept tars, and left tars and their parts: they are read until two releases after 0.1. Names: see
`storage/folder.py`; proofs: see `seals.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from spotfleet.codec import from_json, parse, to_json
from spotfleet.dispatcher.checkpoints.seals import JobSeals
from spotfleet.dispatcher.checkpoints.store import SHA256
from spotfleet.dispatcher.disk.records import AT_TARGET, age, digest_of, name_of, named
from spotfleet.protocol.checkpoint_files import (
    MANIFEST,
    MANIFEST_BYTES,
    METADATA,
    CheckpointManifest,
    in_order,
    is_file_name,
    parse_manifest,
)
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import atomic, verified
from spotfleet.storage.folder import (
    ARRIVING,
    QUARANTINE,
    FolderStore,
    arriving_name,
    checkpoint_name,
    part_called,
    quarantine_name,
    read_range,
    record_name,
)

CHUNK_BYTES = 1 << 20
MOST_ARRIVING = 3  # incomplete checkpoints that hosts write: hosts that are slow in turn must not fill the target
RECORD_BYTES = 1 << 16  # a longer record is none


class TargetFolder:
    """Checkpoints of one job at the target; those in quarantine have a `mark`. Blocking; any method may raise
    OSError."""

    def __init__(self, durable: FolderStore, target: str, job: str, seals: JobSeals | None = None) -> None:
        """`seals`: None: every record counts, and nothing in quarantine does."""
        self._durable, self._target, self._job, self._seals = durable, target, job, seals
        self.wrong = ""  # name of the file with another digest that ended the last `fetch`
        self.refused: list[tuple[Checkpoint, str]] = []  # at the last `offers` or `take`, with the reasons
        self.late: list[Checkpoint] = []  # dropped by the last `take` because MOST_ARRIVING newer ones arrive
        self.newest: Checkpoint | None = None  # that arrives

    def whole(self) -> list[Checkpoint]:
        """Return the dispatchers' checkpoints that count, oldest first."""
        return self._judge()[0]

    def names(self) -> list[Checkpoint]:
        """Return all checkpoints outside quarantine, as parsed from the names of files and folders."""
        folder = f"jobs/{self._job}/checkpoints/"
        found = {name.removeprefix(folder).partition("/")[0].partition(".")[0] for name in self._all()}
        return [c for c in map(named, sorted(found)) if c is not None]

    def offers(self) -> list[Checkpoint]:
        """Return the checkpoints that can be fetched, oldest first; a tar with `parts` above 1 in parts, without a
        digest."""
        kept, self.refused = self._judge()
        whole = {name_of(c): c for c in kept}
        unsealed = self._seals is None or (self._seals.takes_unsealed and not any(c.seal for c in kept))
        groups = [*self._left(), *(self._parted() if unsealed else ())]
        found = {name_of(p[0]): replace(p[0], path="", **({"digest": "", "part": 0} if len(p) > 1 else {}))
                 for p in groups}
        return sorted((found | whole).values(), key=age)

    def _judge(self) -> tuple[list[Checkpoint], list[tuple[Checkpoint, str]]]:
        """Return the dispatchers' checkpoints that count, oldest first, and the others with the reasons."""
        named = {name: c for name in self.names() if (c := self._record(name)) and self._is_there(name, c)}
        found = [c for name, c in named.items() if name_of(c) == name_of(name)]
        if self._seals is None:
            return sorted(found, key=age), []
        whys = {c: self._seals.problem(c) for c in found}
        counted = sorted((c for c in found if not whys[c]), key=age)
        for checkpoint in counted:
            self._seals.note(checkpoint.serial)
        if self._seals.takes_unsealed:  # older ones of the release before are no news, and count if there are no others
            unsealed = [c for c in found if not c.seal and (not counted or age(c) < age(counted[-1]))]
            whys = {c: why for c, why in whys.items() if c not in unsealed}
            counted = counted or sorted(unsealed, key=age)
        others = {at: f"its record is that of {name_of(c)}" for at, c in named.items() if name_of(c) != name_of(at)}
        return counted, [(c, why) for c, why in (whys | others).items() if why]

    def _is_there(self, at: Checkpoint, record: Checkpoint) -> bool:
        last = f"{self._stem(at)}/{METADATA}" if record.name else f"{self._stem(at)}.ckpt"
        return self._durable.find(last) is not None

    def _parted(self) -> list[list[Checkpoint]]:
        """Return the checkpoints that hosts of an earlier release left, with all parts there, in order, with paths."""
        return _complete(replace(part, path=str(self._durable.folder / name))
                         for name in self._all() if (part := part_called(name)))

    def _left(self) -> list[list[Checkpoint]]:
        """Return the checkpoints in quarantine that count, as one item; a tar with all its parts, in order, with paths.
        Add the others to `refused`."""
        if self._seals is None:
            return []
        found, whole = [], []
        for name in self._durable.names(f"jobs/{self._job}/{QUARANTINE}"):
            made = self._read(name) if name.endswith(".json") else None
            if made is None or record_name(quarantine_name(self._job, made)) != name:
                continue  # a file of a checkpoint, or no record of one
            path = self._durable.find(quarantine_name(self._job, made))
            if path is None or not 0 <= made.part < made.parts or made.name not in ("", MANIFEST):
                continue  # a piece, which counts by its manifest
            if why := self._seals.problem_in_quarantine(made):
                self.refused.append((made, why))
            elif not made.name:
                found.append(replace(made, path=str(path)))
            elif self._pieces(made):
                whole.append([replace(made, part=0, parts=1)])
        return [*_complete(found), *whole]

    def _pieces(self, made: Checkpoint) -> Mapping[str, Path]:
        """Return the files of a checkpoint in quarantine by their names; empty unless all are there."""
        listed = _listed(self._durable.path(quarantine_name(self._job, made)), made)
        digests = {MANIFEST: made.digest, **{n: e.sha256 for n, e in listed.files.items()}} if listed else {}
        found = {name: self._durable.find(quarantine_name(self._job, replace(made, name=name, digest=digest)))
                 for name, digest in digests.items()}
        return {name: path for name, path in found.items() if path} if all(found.values()) else {}

    def _all(self) -> list[str]:
        if not Path(self._target).is_dir():
            raise FileNotFoundError(f"{self._target} is no folder; is it mounted?")
        return self._durable.names(f"jobs/{self._job}/checkpoints")

    def put(self, checkpoint: Checkpoint, place: Path) -> bool:
        """Copy a checkpoint to the target; return False if our own files have other digests than its record."""
        if not (self._put_files(checkpoint, place) if checkpoint.name else self._put_tar(checkpoint, place)):
            return False
        self._durable.put(f"{self._stem(checkpoint)}.json", [json.dumps(to_json(checkpoint)).encode()])
        return True

    def take(self, above: tuple[int, int], here: Iterable[Checkpoint]) -> Checkpoint | None:
        """Put the files of the newest checkpoint in place that hosts have written to the target; return it with its
        folder's url, None if none newer than `above` is complete and counts. `here`: files that came to the dispatcher
        instead, with paths: they join the others. What is not above `above` is removed.

        A digest is compared by each reader. A killed dispatcher goes on where it was: a file in place counts as well.
        """
        folder = f"jobs/{self._job}/{ARRIVING}/"
        stems = {name.removeprefix(folder).partition(".")[0] for name in self._durable.names(folder[:-1])}
        arriving, pieces = sorted(filter(None, map(named, stems)), key=age, reverse=True), list(here)
        self.refused, self.late, self.newest = [], [], None
        if not arriving:
            return None
        least = next(map(age, reversed(self.whole())), (-1, -1))  # after a takeover none may be known here
        coming = [c for c in arriving if age(c) > above and age(c) >= least]
        self.late, self.newest = coming[MOST_ARRIVING:], next(iter(coming), None)
        for checkpoint in [c for c in arriving if c not in coming] + self.late:
            self._clear_arriving(checkpoint)
        for checkpoint in coming[:MOST_ARRIVING]:
            for piece in [p for p in pieces if name_of(p) == name_of(checkpoint)]:
                if self._durable.find(arriving_name(self._job, piece)) is None:
                    self._durable.put(arriving_name(self._job, piece), read_range(Path(piece.path)))
            for found, listed in self._manifests(checkpoint):
                if self._seals is None or (why := self._seals.problem_in_manifest(listed)):
                    self.refused.append((found, why if self._seals is not None else "nothing is sealed"))
                elif self._place(found, listed):
                    made = replace(found, bytes=found.bytes + listed.bytes)
                    about = json.dumps(to_json(self._seals.sealed(made))).encode()
                    self._durable.put(f"{self._stem(made)}.json", [about])
                    return replace(made, url=f"{AT_TARGET}{self._durable.path(self._stem(made))}")
        return None

    def _manifests(self, checkpoint: Checkpoint) -> list[tuple[Checkpoint, CheckpointManifest]]:
        """Return the manifests that have arrived for a checkpoint, with their contents."""
        folder, found = arriving_name(self._job, checkpoint).rpartition("/")[0], []
        for name in self._durable.names(folder):
            file, _, digest = name.rpartition("/")[2].rpartition("-")
            made = replace(checkpoint, name=MANIFEST, digest=digest)
            path = self._durable.path(name)
            if file == MANIFEST and (listed := _listed(path, made)) is not None:
                found.append((replace(made, bytes=path.stat().st_size), listed))
        return found

    def _place(self, made: Checkpoint, listed: CheckpointManifest) -> bool:
        """Move the files of a checkpoint in place, if all are there with their sizes; return whether they are."""
        digests = {MANIFEST: (made.digest, made.bytes), **{n: (e.sha256, e.bytes) for n, e in listed.files.items()}}
        moves = []
        for name in in_order(listed.files):
            digest, size = digests[name]
            source = self._durable.path(arriving_name(self._job, replace(made, name=name, digest=digest)))
            place = self._durable.path(f"{self._stem(made)}/{name}")
            if _size(source) == size:
                moves.append((source, place))
            elif _size(place) != size:
                return False
        atomic.make_folder(self._durable.path(self._stem(made)))
        for source, place in moves:
            if place.name == MANIFEST:  # a killed dispatcher finds the checkpoint by the one that stays
                self._durable.put(str(place.relative_to(self._durable.folder)), read_range(source))
            else:
                atomic.rename(source, place)
        return True

    def _clear_arriving(self, checkpoint: Checkpoint) -> None:
        folder = arriving_name(self._job, checkpoint).rpartition("/")[0]
        for name in self._durable.names(folder):
            self._durable.delete(name)
        with contextlib.suppress(OSError):  # a host has just written there
            self._durable.path(folder).rmdir()

    def _put_tar(self, checkpoint: Checkpoint, file: Path) -> bool:
        if digest_of(file) != checkpoint.digest:
            return False
        self._durable.put(f"{self._stem(checkpoint)}.ckpt", read_range(file))
        return True

    def _put_files(self, checkpoint: Checkpoint, folder: Path) -> bool:
        listed = _listed(folder / MANIFEST, checkpoint)
        if listed is None or not all((folder / name).is_file() for name in listed.files):
            return False
        for name in in_order(listed.files):
            key = f"{self._stem(checkpoint)}/{name}"
            expected = checkpoint.digest if name == MANIFEST else listed.files[name].sha256
            if self._durable.put(key, read_range(folder / name)) != expected:
                self._durable.delete(key)
                return False
        return True

    def drop(self, checkpoint: Checkpoint) -> None:
        stem = self._stem(checkpoint)
        self._durable.delete(f"{stem}.json")
        self._durable.delete(f"{stem}.ckpt")
        for folder in (stem, f"{stem}.parts"):
            for name in sorted(self._durable.names(folder), key=lambda name: not name.endswith(f"/{METADATA}")):
                self._durable.delete(name)
            with contextlib.suppress(FileNotFoundError):
                (self._durable.folder / folder).rmdir()

    def release(self) -> None:
        """Empty the quarantine of all that is no newer than the newest kept one."""
        newest = next(map(age, reversed(self.whole())), (-1, -1))
        folder = f"jobs/{self._job}/{QUARANTINE}/"
        for stem in {name.removeprefix(folder).partition(".")[0] for name in self._durable.names(folder[:-1])}:
            if (left := named(stem)) is not None and age(left) <= newest:
                self.drop(replace(left, mark=QUARANTINE))

    def fetch(self, checkpoint: Checkpoint, place: Path, moved: Callable[[], None]) -> Checkpoint | None:
        """Copy one of `offers` to `place`; return its new record. None, and no file, if a digest is wrong."""
        part = place.with_name(f".{place.name}.target.part")  # `files.sweep` removes such files
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            found = (self._fetch_files if checkpoint.name else self._fetch_tar)(checkpoint, part, moved)
            if found is not None:
                verified.remove(place)
                atomic.rename(part, place, sync=False)  # the target has it
            return found
        finally:
            verified.remove(part)

    def _fetch_tar(self, checkpoint: Checkpoint, part: Path, moved: Callable[[], None]) -> Checkpoint | None:
        """Copy a tar, joining its parts."""
        sources, whole = self._sources(checkpoint), hashlib.sha256()
        with part.open("wb") as out:
            wrong = next((s for s in sources if _copy(Path(s.path), out, moved, whole) != s.digest), None)
            size = out.tell()
        self.wrong = "" if wrong is None else self._shown(Path(wrong.path))
        if wrong is not None or not sources:
            return None
        return replace(checkpoint, digest=whole.hexdigest(), bytes=size, parts=1, grant="", mark="")

    def _fetch_files(self, checkpoint: Checkpoint, part: Path, moved: Callable[[], None]) -> Checkpoint | None:
        """Copy the manifest and all files that it names."""
        marked = self._pieces(checkpoint) if checkpoint.mark else {}
        folder = self._durable.path(self._stem(checkpoint))
        manifest = marked.get(MANIFEST, folder / MANIFEST)
        listed, size = _listed(manifest, checkpoint), 0
        self.wrong = self._shown(manifest)
        if listed is None:
            return None
        verified.remove(part)
        part.mkdir(mode=0o700)
        for name in in_order(listed.files):
            source = marked.get(name, folder / name)
            self.wrong = self._shown(source)
            if not source.is_file():
                return None
            with (part / name).open("wb") as out:
                found, size = _copy(source, out, moved), size + source.stat().st_size
            if found != (checkpoint.digest if name == MANIFEST else listed.files[name].sha256):
                return None
        self.wrong = ""
        return replace(checkpoint, bytes=size, part=0, parts=1, grant="", mark="")

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self._durable.folder))

    def _sources(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        if checkpoint.mark or checkpoint.parts > 1:
            groups = self._left() if checkpoint.mark else self._parted()
            return next((p for p in groups if _same(p[0], checkpoint)), [])
        return [replace(checkpoint, path=str(self._durable.folder / f"{self._stem(checkpoint)}.ckpt"))]

    def _record(self, checkpoint: Checkpoint) -> Checkpoint | None:
        return self._read(f"{self._stem(checkpoint)}.json")

    def _read(self, name: str) -> Checkpoint | None:
        """Read a record; None if there is none, or one that no dispatcher or host of ours has written."""
        try:
            data = b"".join(self._durable.get(name, end=RECORD_BYTES))
            found = from_json(Checkpoint, parse(data.decode()))
        except (FileNotFoundError, ValueError):
            return None
        good = SHA256.fullmatch(found.digest) and named(name_of(found)) is not None
        return found if good and (not found.name or is_file_name(found.name)) else None

    def _stem(self, checkpoint: Checkpoint) -> str:
        """Return the key of the checkpoint's folder; with .json that of its record."""
        name = checkpoint_name(self._job, checkpoint.version, checkpoint.generation).removesuffix(".ckpt")
        return name.replace("/checkpoints/", f"/{QUARANTINE}/") if checkpoint.mark else name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _listed(path: Path, checkpoint: Checkpoint) -> CheckpointManifest | None:
    """Return the content of a checkpoint's manifest; None if the file is another one."""
    try:
        data = b"".join(read_range(path, 0, MANIFEST_BYTES))
        found = parse_manifest(data)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    same = (found.version, found.generation) == (checkpoint.version, checkpoint.generation)
    return found if same and hashlib.sha256(data).hexdigest() == checkpoint.digest else None


def _complete(found: Iterable[Checkpoint]) -> list[list[Checkpoint]]:
    """Return the checkpoints of which all parts were found, the parts of each in order."""
    held: dict[tuple[str, int], dict[int, Checkpoint]] = {}
    for part in found:
        held.setdefault((name_of(part), part.parts), {})[part.part] = part
    return [[by_part[part] for part in range(parts)] for (_, parts), by_part in held.items() if len(by_part) == parts]


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (name_of(one), one.parts) == (name_of(other), other.parts)


def _copy(source: Path, out: BinaryIO, moved: Callable[[], None], *also: Any) -> str:
    """Append a file to `out`; return its sha256, and add its bytes to `also`."""
    own = hashlib.sha256()
    with open(source, "rb") as data:
        while chunk := data.read(CHUNK_BYTES):
            out.write(chunk)
            for sha in (own, *also):
                sha.update(chunk)
            moved()
    return own.hexdigest()
