"""Store of the blobs of working directories: manifests, their pieces, archives.

No blob of a working directory is ever removed here, so that the next `train` finds those of the last one. Of the
checkpoint folders of jobs that are started anew, only the newest is kept. At the target, only blobs of jobs that have
not ended are kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from spotfleet.bundle import pieces_of
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.disk.records import Seen, digest_of, seen_at
from spotfleet.errors import UsageError
from spotfleet.storage import atomic

log = logging.getLogger(__name__)
LOOK_S = 1.0  # largest age of a cached folder listing
NAMED = 3  # number of missing pieces that an error names


class BundleStore:
    """Blobs on the dispatcher's disk, by sha256."""

    def __init__(self, home: Path, damage: DamagedFiles) -> None:
        self.folder = home / "bundles"
        self._damage = damage
        self._pieces: dict[str, frozenset[str]] = {}
        self._whole: set[str] = set()
        self._sound: dict[str, Seen] = {}  # blobs whose content was right
        self._seen: tuple[float, frozenset[str]] = (0.0, frozenset())  # monotonic

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def belongs(self, digest: str, bundle: str) -> bool:
        """Return whether a blob is the bundle's manifest or one of its known pieces."""
        return bool(bundle) and (digest == bundle or digest in self.pieces(bundle))

    def missing(self, digests: Iterable[str], *, old_s: float = 0.0) -> list[str]:
        """Return the digests without a blob here, by a folder listing that is at most `old_s` old."""
        at, here = self._seen
        if time.monotonic() - at > old_s:
            here = frozenset(os.listdir(self.folder)) if self.folder.is_dir() else frozenset()
            self._seen = time.monotonic(), here
        return [digest for digest in digests if digest not in here]

    def is_whole(self, bundle: str) -> bool:
        """Return whether the whole bundle is here. Cheap; it may become true a moment late."""
        if bundle in self._whole:
            return True
        whole = not self.missing([bundle], old_s=LOOK_S) and not self.missing(self.pieces(bundle), old_s=LOOK_S)
        if whole:
            self._whole.add(bundle)
        return whole

    def refuse_incomplete(self, bundle: str) -> None:
        """Raise UsageError unless the whole bundle (if any) is here, ValueError for a manifest that never was one.

        A damaged manifest is removed, and counts as missing: its sender has it. Afterwards its name and those of the
        pieces survive a power failure.
        """
        if not bundle:
            return
        hint = "PUT it to /v1/bundles first"
        if self.missing([bundle]) or not self.is_sound(bundle):
            raise UsageError(f"spec.bundle: {bundle} has not been uploaded", hint=hint)
        pieces = tuple(dict.fromkeys(piece.sha256 for piece in pieces_of(self.path(bundle))))
        self._pieces[bundle] = frozenset(pieces)
        if lacking := self.missing(pieces):
            raise UsageError(f"spec.bundle: {len(lacking)} of {len(pieces)} pieces of {bundle} have not been uploaded: "
                             f"{', '.join(lacking[:NAMED])}{', ...' if lacking[NAMED:] else ''}", hint=hint)
        atomic.sync_folder(self.folder)  # once for all of them

    def offer(self, digest: str, manifest: bytes) -> list[str]:
        """Write a manifest that a host sends; return the pieces that are missing here. UsageError if it is none.
        Blocking."""
        atomic.make_folder(self.folder)
        if not self.path(digest).exists():
            with atomic.replacing(self.path(digest), data_synced=False) as file:
                file.write(manifest)
        try:
            pieces = tuple(dict.fromkeys(piece.sha256 for piece in pieces_of(self.path(digest))))
        except ValueError as error:
            atomic.remove(self.path(digest))
            raise UsageError(f"folder: {error}") from None
        self._pieces[digest] = frozenset(pieces)
        if not (missing := self.missing(pieces)):
            atomic.sync_folder(self.folder)
        return missing

    def drop(self, bundle: str, kept: Iterable[str]) -> None:
        """Remove the blobs of a bundle that no bundle of `kept` has."""
        needed = {blob for other in kept for blob in (other, *self.pieces(other))}
        for blob in {bundle, *self.pieces(bundle)} - needed:
            self.path(blob).unlink(missing_ok=True)
        self._pieces.pop(bundle, None)
        self._whole.clear()
        self._seen = (0.0, frozenset())

    def is_sound(self, digest: str) -> bool:
        """Return whether this blob is here and has the content that its name says; a damaged one is removed, because
        its sender has it. Blocking: it is read once, and again when it has changed."""
        path = self.path(digest)
        seen = seen_at(path)
        if seen is None or self._sound.get(digest) == seen:
            return seen is not None
        if digest_of(path) == digest:
            self._sound[digest] = seen
            return True
        if seen_at(path) != seen:  # it has just been sent again
            return self.is_sound(digest)
        self._damage.drop(path, "its content is not that of its name", "`spotfleet train` sends it again")
        self._pieces.pop(digest, None)
        self._whole.clear()
        return False

    def pieces(self, bundle: str) -> frozenset[str]:
        """Return the digests of its pieces, besides its own blob; none while that blob is not here."""
        if bundle not in self._pieces:
            if not self.is_sound(bundle):
                return frozenset()
            try:
                found = frozenset(piece.sha256 for piece in pieces_of(self.path(bundle)))
            except ValueError as error:
                log.warning("bundle %s: %s", bundle[:12], error)  # hosts will report it, too
                found = frozenset()
            self._pieces[bundle] = found
        return self._pieces[bundle]
