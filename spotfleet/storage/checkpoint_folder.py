"""Folders of checkpoints on this machine's disk, in the layout of `protocol/checkpoint_files.py`."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from spotfleet.protocol.checkpoint_files import MANIFEST, CheckpointFile, CheckpointManifest, in_order, parse_manifest
from spotfleet.protocol.messages import Checkpoint

CHUNK_BYTES = 1 << 20
SHOWN_CHARS = 12  # length of a digest in messages

Progress = Callable[[int], None]  # receives the size of each chunk


def ignore(size: int) -> None:
    pass


def digest_of(path: Path, progress: Progress = ignore) -> str:
    """Return the sha256 of a file in hex."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.update(chunk)
            progress(len(chunk))
    return found.hexdigest()


def problem_in(folder: Path, digest: str, progress: Progress = ignore) -> str:
    """Compare all files of a checkpoint with its manifest, which has the sha256 `digest`; return which one is wrong, as
    a clause, "" if none is. Blocking; OSError where one cannot be read."""
    try:
        data = (folder / MANIFEST).read_bytes()
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            return _other(MANIFEST, found, digest)
        progress(len(data))
        for name, entry in parse_manifest(data).files.items():
            found = digest_of(folder / name, progress)
            if found != entry.sha256:
                return _other(name, found, entry.sha256)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except ValueError as error:
        return str(error)
    return ""


def _other(name: str, found: str, expected: str) -> str:
    return f"{name} has sha256 {found[:SHOWN_CHARS]}, not {expected[:SHOWN_CHARS]}"


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read the manifest of a folder. ValueError for one that is none, OSError where it cannot be read."""
    return parse_manifest((folder / MANIFEST).read_bytes())


def files_of(made: Checkpoint) -> list[Checkpoint]:
    """Return the files for which `made` stands on this host, `made` among them: beside a manifest lie pieces of the
    same writer. OSError for a manifest that cannot be read."""
    if made.name != MANIFEST:
        return [made]
    folder = Path(made.path).parent
    try:
        files: Mapping[str, CheckpointFile] = read_manifest(folder).files
    except ValueError as error:
        raise OSError(errno.EIO, str(error), made.path) from error
    own = {name: replace(made, name=name, digest=entry.sha256, bytes=entry.bytes, path=str(folder / name), mark="")
           for name, entry in files.items() if (folder / name).is_file()}
    return [own.get(name, made) for name in in_order(own)]


def link_files(made: Checkpoint, into: Path) -> list[Checkpoint]:
    """Link the files for which `made` stands into the folder `into`, so that they stay here when their writer removes
    them; return them with their new paths. Raises as `files_of`; then nothing stays."""
    try:
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True, mode=0o700)
        linked = []
        for file in files_of(made):
            path = into / (file.name or Path(file.path).name)
            os.link(file.path, path)
            linked.append(replace(file, path=str(path)))
        return linked
    except BaseException:
        shutil.rmtree(into, ignore_errors=True)
        raise
