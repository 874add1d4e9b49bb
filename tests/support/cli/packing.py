"""A shelf of blobs, as a dispatcher and a host have one, filled by the real packer."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from spotfleet import bundle


class Shelf:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)

    def put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / digest).write_bytes(data)
        return digest

    def pack(self, workdir: Path, *, needles: bundle.SecretValues = bundle.SecretValues(), **options) -> str:
        """The digest of the bundle of `workdir`, whose blobs are all here."""
        return self.packed(workdir, needles=needles, **options)[0]

    def packed(self, workdir: Path, *, needles: bundle.SecretValues = bundle.SecretValues(), **options,
               ) -> tuple[str, bundle.Packed]:
        found = bundle.pack(bundle.scan(workdir, **options), lambda made: self.put(made.blob), needles=needles)
        return self.put(bundle.dump(found.manifest)), found

    def path(self, digest: str) -> Path:
        return self.folder / digest

    def unpack(self, digest: str, into: Path) -> Path:
        bundle.unpack(self.path(digest), self.path, into)
        return into

    def pieces(self, digest: str) -> set[str]:
        return {piece.sha256 for piece in bundle.pieces_of(self.path(digest))}


def picture(folder: Path) -> dict[bytes, object]:
    """Everything in `folder`: None for a folder, a link's target, or whether a file may be executed and its bytes."""
    found: dict[bytes, object] = {}
    for top, folders, files in os.walk(os.fsencode(folder)):
        for name in (*folders, *files):
            path = os.path.join(top, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                what: object = os.readlink(path)
            elif stat.S_ISDIR(mode):
                what = None
            else:
                with open(path, "rb") as file:
                    what = (bool(mode & stat.S_IXUSR), file.read())
            found[os.path.relpath(path, os.fsencode(folder))] = what
    return found
