"""The blobs of working directories on this disk: manifests, their pieces, archives. None is ever removed here, so that
the next `train` finds what the last one sent; at the target only those of jobs that have not ended are kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from spotfleet.bundle import pieces_of
from spotfleet.errors import UsageError

log = logging.getLogger(__name__)
LOOK_S = 1.0  # so old a look at the folder may be
NAMED = 3  # of those that are missing


class BundleStore:
    def __init__(self, home: Path) -> None:
        self.folder = home / "bundles"
        self._pieces: dict[str, frozenset[str]] = {}
        self._whole: set[str] = set()
        self._seen: tuple[float, frozenset[str]] = (0.0, frozenset())  # monotonic

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def belongs(self, digest: str, bundle: str) -> bool:
        """Is that blob the bundle's own, or one of its pieces as far as they are known here?"""
        return bool(bundle) and (digest == bundle or digest in self.pieces(bundle))

    def missing(self, digests: Iterable[str], *, old_s: float = 0.0) -> list[str]:
        """Those that are not here, by a look that is at most `old_s` old."""
        at, here = self._seen
        if time.monotonic() - at > old_s:
            here = frozenset(os.listdir(self.folder)) if self.folder.is_dir() else frozenset()
            self._seen = time.monotonic(), here
        return [digest for digest in digests if digest not in here]

    def is_whole(self, bundle: str) -> bool:
        """Is all of it here? Cheap; true a moment late."""
        if bundle in self._whole:
            return True
        whole = not self.missing([bundle], old_s=LOOK_S) and not self.missing(self.pieces(bundle), old_s=LOOK_S)
        if whole:
            self._whole.add(bundle)
        return whole

    def refuse_incomplete(self, bundle: str) -> None:
        """Raise UsageError unless all of it (if any) is here, ValueError for a manifest that cannot be read."""
        if not bundle:
            return
        hint = "PUT it to /v1/bundles first"
        if self.missing([bundle]):
            raise UsageError(f"spec.bundle: {bundle} has not been uploaded", hint=hint)
        pieces = tuple(dict.fromkeys(piece.sha256 for piece in pieces_of(self.path(bundle))))
        self._pieces[bundle] = frozenset(pieces)
        if lacking := self.missing(pieces):
            raise UsageError(f"spec.bundle: {len(lacking)} of {len(pieces)} pieces of {bundle} have not been uploaded: "
                             f"{', '.join(lacking[:NAMED])}{', ...' if lacking[NAMED:] else ''}", hint=hint)

    def pieces(self, bundle: str) -> frozenset[str]:
        """Which it needs beside its own blob; none while that is not here."""
        if bundle not in self._pieces:
            try:
                found = frozenset(piece.sha256 for piece in pieces_of(self.path(bundle)))
            except FileNotFoundError:
                return frozenset()
            except ValueError as error:
                log.warning("bundle %s: %s", bundle[:12], error)  # hosts will say so, too
                found = frozenset()
            self._pieces[bundle] = found
        return self._pieces[bundle]
