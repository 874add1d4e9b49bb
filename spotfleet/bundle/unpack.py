"""Unpacking of a working directory from its manifest and pieces, or from an archive."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from spotfleet.bundle import archive
from spotfleet.bundle.manifest import BundlePiece, FileEntry, Manifest, is_manifest, load

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW


class DamagedPiece(ValueError):
    """Error for a file that does not have the content of the piece it is named after; `sha256` names the piece."""

    def __init__(self, sha256: str, why: str) -> None:
        super().__init__(f"piece {sha256[:12]} is damaged: {why}")
        self.sha256 = sha256


def unpack(bundle: Path, blob: Callable[[str], Path], into: Path, look: Callable[[int], object] | None = None) -> None:
    """Unpack the manifest or archive at `bundle`; `blob(sha256)` returns the path of a piece.

    Nothing is written outside `into`, which is new or empty. Raises ValueError for a bundle that is damaged or tries to
    write outside, and DamagedPiece for a damaged piece. `look` gets the size of each piece before it is written, and
    may raise.
    """
    if not is_manifest(bundle):
        archive.extract(bundle, into, look)
        return
    manifest = load(bundle)
    into.mkdir(parents=True, exist_ok=True)
    for name in manifest.folders:
        os.mkdir(into / name, 0o755)
    _write_files(manifest, _contents(manifest, blob, look), str(into))
    for name, target in manifest.links:  # links come last, so that no file is written through one
        os.symlink(target, into / name)


def read_piece(piece: BundlePiece, path: Path) -> bytes:
    """Return the unpacked bytes of `piece`. Raises DamagedPiece if the file at `path` is not that piece."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DamagedPiece(piece.sha256, "it has gone") from None
    if hashlib.sha256(data).hexdigest() != piece.sha256:
        raise DamagedPiece(piece.sha256, "it has another digest")
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, piece.unpacked_bytes + 1)
    except zlib.error as error:
        raise ValueError(f"piece {piece.sha256[:12]} cannot be unpacked: {error}") from None
    if len(text) != piece.unpacked_bytes or not stream.eof:
        raise ValueError(f"piece {piece.sha256[:12]} is not as long as the manifest says")
    return text


def _contents(manifest: Manifest, blob: Callable[[str], Path], look: Callable[[int], object] | None) -> Iterator[bytes]:
    for piece in manifest.pieces:
        if look is not None:
            look(piece.unpacked_bytes)
        yield read_piece(piece, blob(piece.sha256))


def _write_files(manifest: Manifest, contents: Iterator[bytes], into: str) -> None:
    rest = memoryview(b"")
    for file in manifest.files:
        with open(os.open(os.path.join(into, file.name), _FLAGS, _mode(file)), "wb", buffering=0) as out:
            left = file.bytes
            while left:
                if not rest:
                    rest = memoryview(next(contents))
                part, rest = rest[:left], rest[left:]
                _write(out.fileno(), part)
                left -= len(part)


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data):]


def _mode(file: FileEntry) -> int:
    return 0o755 if file.runs else 0o644
