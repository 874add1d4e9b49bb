"""Partial files in a worker's folder: files that end before the sender's did. A marker beside the folder names each.

    jobs/JOB/outputs/.HOST@SLOT@INCARNATION.partial/DIGEST    marker: the digest of the file's name; the name in it

Markers are found by their digests, and are not read: there may be as many as files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from spotfleet.storage import names

SUFFIX = ".partial"  # ends a partial file's name in downloads and archive
SHORTENED = re.compile(rf"~([0-9a-f]{{64}})(?:-[0-9]{{1,9}})?{re.escape(SUFFIX)}")  # see `names.with_suffix`


class PartialMarkers:
    """Markers of one worker's folder. Blocking."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._markers = folder, _markers(folder)
        try:
            self._digests = set(os.listdir(self._markers))
        except FileNotFoundError:
            self._digests = set()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, name: str) -> bool:
        return names.digest_of(name) in self._digests

    def add(self, name: str) -> None:
        """Mark a file as partial; its marker is on the disk before the file is."""
        if (digest := names.digest_of(name)) not in self._digests:
            self._markers.mkdir(exist_ok=True, mode=0o700)
            (self._markers / digest).write_text(name)
            self._digests.add(digest)

    def discard(self, name: str) -> None:
        if (digest := names.digest_of(name)) in self._digests:
            (self._markers / digest).unlink(missing_ok=True)
            self._digests.discard(digest)

    def public_name(self, name: str) -> str:
        """Return the name that a file has in downloads and archive."""
        return public_name(self._folder, name) if name in self else name

    def files(self) -> Iterator[str]:
        """Yield the names of the partial files that are in the folder."""
        if self._digests:
            yield from (name for name in files_in(self._folder) if name in self)


def public_name(folder: Path, partial: str) -> str:
    """Return the name of a partial file in downloads and archive: no other file has it, and file systems take it."""
    return names.with_suffix(partial, SUFFIX, lambda found: os.path.lexists(folder / found))


def find(folder: Path, name: str) -> Path | None:
    """Return the file of a worker's folder that has this name in downloads and archive; None if there is none."""
    if (folder / name).is_file() and not _is_partial(folder, name):
        return folder / name
    candidates = (partial for partial in _candidates(folder, name) if _is_partial(folder, partial))
    return next((folder / partial for partial in candidates
                 if (folder / partial).is_file() and public_name(folder, partial) == name), None)


def _candidates(folder: Path, name: str) -> Iterator[str]:
    """Yield the names of partial files that may be `name` in downloads and archive."""
    yield name.removesuffix(SUFFIX)
    above, slash, _ = name.rpartition("/")
    if (found := SHORTENED.search(name)) and os.path.lexists(_markers(folder) / found[1]):
        yield (_markers(folder) / found[1]).read_text(errors="replace")
        with suppress(OSError):  # after a power failure the marker may be empty
            yield from (partial for entry in os.listdir(folder / above)
                        if names.digest_of(partial := f"{above}{slash}{entry}") == found[1])


def _is_partial(folder: Path, name: str) -> bool:
    return os.path.lexists(_markers(folder) / names.digest_of(name))


def files_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files in a worker's folder, in order. Links are left out: programs in Ray may make some,
    also to files that they cannot read."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(folder))


def _markers(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{SUFFIX}")
