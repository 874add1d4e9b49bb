"""Manifest of a bundle: its files, and the pieces with their bytes.

    spotfleet bundle 1\\n  zlib of lines of JSON:
        {"bytes": B, "entries": N, "pieces": [[SHA256, BYTES, UNPACKED_BYTES], ...]}
        ["d", NAME]    ["l", NAME, TARGET]    ["f", NAME, BYTES]    ["x", NAME, BYTES], which is executable

The pieces, unpacked and concatenated, are the files' bytes in the order of their lines. So the format needs no
positions and cannot express overlaps. Files have no digest of their own, because pieces have one: 32 random bytes for
each file would dominate the traffic after a change of one line. Names of one kind are sorted, and a folder stands
before its contents. A job refers to its bundle by the sha256 of the whole manifest.

Hosts read manifests that others have made, so `load` refuses everything that our packer never writes. An archive
(.tar.gz), made by hand by a test or a tool, is accepted as a bundle, too: it is a single piece and has no manifest.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path
from typing import Any

from spotfleet.bundle.grouping import LARGEST_PIECE_BYTES
from spotfleet.bundle.tree import PATH_BYTES

MAGIC = b"spotfleet bundle 1\n"
OTHERS = re.compile(rb"spotfleet bundle (\d{1,9})\n")
SHA256 = re.compile(r"[0-9a-f]{64}")
LIMIT_BYTES = 256 << 30  # limit for all files together
LIMIT_ENTRIES = 2_000_000
LIMIT_PIECES = 300_000
LIMIT_BLOB_BYTES = 512 << 20  # limit for one upload: a manifest of as many entries, a piece, or an archive made by hand
LIMIT_MANIFEST_BYTES = 1 << 30  # unpacked
LEVEL = 6
CHUNK = 1 << 20
NAME_BYTES = 255  # limit of Linux
TARGET_BYTES = 4095


@dataclass(frozen=True)
class BundlePiece:
    sha256: str  # digest of the compressed bytes, which travel
    bytes: int
    unpacked_bytes: int


@dataclass(frozen=True)
class FileEntry:
    name: str
    bytes: int
    runs: bool = False


@dataclass(frozen=True)
class Manifest:
    pieces: tuple[BundlePiece, ...] = ()
    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    files: tuple[FileEntry, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(piece.unpacked_bytes for piece in self.pieces)


def dump(manifest: Manifest) -> bytes:
    """Serialize; equal manifests give equal bytes."""
    pack = zlib.compressobj(LEVEL)
    out = [MAGIC]
    lines: list[str] = []
    for line in _lines(manifest):
        lines.append(line)
        if len(lines) >= 4096:
            out.append(pack.compress("".join(lines).encode()))
            lines = []
    out += [pack.compress("".join(lines).encode()), pack.flush()]
    return b"".join(out)


def _lines(manifest: Manifest) -> Iterator[str]:
    entries = len(manifest.folders) + len(manifest.links) + len(manifest.files)
    head = {"bytes": manifest.bytes, "entries": entries,
            "pieces": [[p.sha256, p.bytes, p.unpacked_bytes] for p in manifest.pieces]}
    yield json.dumps(head, separators=(",", ":")) + "\n"
    for name in manifest.folders:
        yield f'["d",{quote(name)}]\n'
    for name, target in manifest.links:
        yield f'["l",{quote(name)},{quote(target)}]\n'
    for file in manifest.files:
        yield f'["{"x" if file.runs else "f"}",{quote(file.name)},{file.bytes}]\n'


def is_manifest(path: Path) -> bool:
    """Return whether `path` is a manifest and not an archive. Raises ValueError for a manifest of another version."""
    with path.open("rb") as file:
        begin = file.read(len(MAGIC) + 9)
    if begin.startswith(MAGIC):
        return True
    if found := OTHERS.match(begin):
        raise ValueError(f"the bundle is of version {found[1].decode()}; this release reads version 1")
    return False


def pieces_of(path: Path) -> tuple[BundlePiece, ...]:
    """Return the pieces that the bundle at `path` needs, none for an archive. Reads only the head of the file."""
    return _head(_text_lines(path))[0] if is_manifest(path) else ()


def load(path: Path) -> Manifest:
    """Read a manifest. Raises ValueError for a damaged or malicious one."""
    if not is_manifest(path):
        raise ValueError("not a manifest")
    lines = _text_lines(path)
    pieces, entries, size = _head(lines)
    folders: dict[str, None] = {}
    links: dict[str, str] = {}
    files: dict[str, FileEntry] = {}
    for count, line in enumerate(lines, 1):
        if count > entries:
            raise ValueError(f"the manifest has more than the {entries} entries that it tells of")
        _take(_json(line), folders, links, files)
    if len(folders) + len(links) + len(files) != entries:
        raise ValueError(f"the manifest has {len(folders) + len(links) + len(files)} of {entries} entries")
    if sum(file.bytes for file in files.values()) != size:
        raise ValueError("the files of the manifest are not as long as its pieces")
    return Manifest(pieces, tuple(folders), tuple(links.items()), tuple(files.values()))


def _take(entry: Any, folders: dict[str, None], links: dict[str, str], files: dict[str, FileEntry]) -> None:
    match entry:
        case ["d", str(name)]:
            _new(name, folders, links, files)
            folders[name] = None
        case ["l", str(name), str(target)]:
            _new(name, folders, links, files)
            links[name] = _safe_target(name, target)
        case ["f" | "x" as kind, str(name), int(size)] if size >= 0 and not isinstance(size, bool):
            _new(name, folders, links, files)
            files[name] = FileEntry(name, size, kind == "x")
        case _:
            raise ValueError(f"the manifest holds what is no entry: {str(entry)[:80]}")


def _new(name: str, folders: dict[str, None], *others: dict[str, Any]) -> None:
    """Raise ValueError unless `name` is new, safe, and lies in a folder that was named before: so never behind a link.
    """
    parent, _, last = name.rpartition("/")
    coded = _coded(name)
    if not last or last in (".", "..") or "\0" in name or name.startswith("/") or len(coded) > PATH_BYTES \
            or len(_coded(last)) > NAME_BYTES:
        raise ValueError(f"the manifest names an unsafe path: {name[:80]!r}")
    if parent and parent not in folders:
        raise ValueError(f"the manifest names {name[:80]!r}, but not before it the folder that it lies in")
    if name in folders or any(name in other for other in others):
        raise ValueError(f"the manifest names {name[:80]!r} twice")


def _coded(text: str) -> bytes:
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        raise ValueError(f"the manifest holds a name that is no file's: {text[:80]!r}") from None


def _safe_target(name: str, target: str) -> str:
    """Return the target of a link by its text, ignoring links on the way; never outside the bundle."""
    at = name.split("/")[:-1]
    found = list(at)
    for part in target.split("/"):
        if part == "..":
            if not found:
                raise ValueError(f"the manifest has a link out of the bundle: {name[:80]!r}")
            found.pop()
        elif part not in ("", "."):
            found.append(part)
    if not target or target.startswith("/") or "\0" in target or len(_coded(target)) > TARGET_BYTES:
        raise ValueError(f"the manifest has an unsafe link: {name[:80]!r}")
    shared = next((i for i, (a, b) in enumerate(zip(at, found, strict=False)) if a != b), min(len(at), len(found)))
    return "/".join([*[".."] * (len(at) - shared), *found[shared:]]) or "."


def _head(lines: Iterator[bytes]) -> tuple[tuple[BundlePiece, ...], int, int]:
    """Return the pieces, the number of entries, and the bytes of all files."""
    match _json(next(lines, b"")):
        case {"bytes": int(size), "entries": int(entries), "pieces": list(rows)}:
            pieces = tuple(map(_piece, _few(rows)))
        case _:
            raise ValueError("the manifest has no head")
    if not 0 <= entries <= LIMIT_ENTRIES:
        raise ValueError(f"the manifest tells of {entries} entries; at most {LIMIT_ENTRIES} are taken")
    if size != sum(piece.unpacked_bytes for piece in pieces) or size > LIMIT_BYTES:
        raise ValueError(f"the manifest tells of {size} bytes, and of pieces that are more, less, or too many")
    return pieces, entries, size


def _few(rows: Sequence[Any]) -> Sequence[Any]:
    if len(rows) > LIMIT_PIECES:
        raise ValueError(f"the manifest has {len(rows)} pieces; at most {LIMIT_PIECES} are taken")
    return rows


def _piece(row: Any) -> BundlePiece:
    match row:
        case [str(sha256), int(size), int(unpacked)] if SHA256.fullmatch(sha256) and 0 < size <= LIMIT_BLOB_BYTES \
                and 0 < unpacked <= LARGEST_PIECE_BYTES:
            return BundlePiece(sha256, size, unpacked)
    raise ValueError(f"the manifest holds what is no piece: {str(row)[:100]}")


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the manifest is damaged: {str(error)[:100]}") from None


def _text_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines after MAGIC. Raises ValueError if they are cut off, or are more than a manifest has."""
    unpack, rest, size = zlib.decompressobj(), b"", 0
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        for text in _unpacked(unpack, iter(lambda: file.read(CHUNK), b"")):
            size += len(text)
            if size > LIMIT_MANIFEST_BYTES:
                raise ValueError(f"the manifest is longer than {LIMIT_MANIFEST_BYTES} bytes")
            *lines, rest = (rest + text).split(b"\n")
            yield from lines
    if not unpack.eof or rest:
        raise ValueError("the manifest is damaged: it breaks off")


def _unpacked(unpack: Any, chunks: Iterable[bytes]) -> Iterator[bytes]:
    try:
        for chunk in chunks:
            while chunk and not unpack.eof:
                yield unpack.decompress(chunk, CHUNK)
                chunk = unpack.unconsumed_tail
    except zlib.error as error:
        raise ValueError(f"the manifest is damaged: {error}") from None
