"""Manifest of a fleet's archive, as JSON lines. Pure.

    {"head": {"files", "bytes", "at"}}           first
    {"file": {"key", "bytes", "sha256", "at"}}   one for each key, while the dispatcher goes on reading files
    an empty line                                the dispatcher is reading a large file
    {"end": true}                                without it the manifest is incomplete

Lines of other kinds are for later releases. The manifest is frozen, see `versions.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from spotfleet import codec
from spotfleet.codec import from_json, to_json

LEDGER = "ledger.db"
LARGEST = 1 << 60  # bytes; of larger numbers no sum and no rate can be formatted


class ManifestCut(ValueError):
    """A manifest that ends before its end, or that is none."""


@dataclass(frozen=True)
class ArchiveHead:
    """What the archive holds, estimated: files may still change."""

    files: int
    bytes: int
    at: float  # dispatcher's time, Unix: outputs that arrive later may be missing


@dataclass(frozen=True)
class ArchiveFile:
    """One key of the archive."""

    key: str
    bytes: int
    sha256: str
    at: str = ""  # path or URL of a checkpoint that outlives the dispatcher

    @property
    def is_elsewhere_only(self) -> bool:
        """Whether the dispatcher has no copy: workers wrote it to an object store. The digest is its manifest's."""
        return "://" in self.at


@dataclass(frozen=True)
class RefusedFile:
    """File that the disk of an archive does not take under its name, or that cannot be read."""

    name: str
    at: str  # where it lies instead, in the archive; "" if it is not in it
    why: str


T = TypeVar("T", ArchiveHead, ArchiveFile)


def packs(key: str) -> bool:
    """Return whether the content of a key is text or rows, which shrink; tensors do not."""
    return key == LEDGER or ("/logs/" in key and key.endswith(".log"))


def line(value: ArchiveHead | ArchiveFile | None) -> bytes:
    """Format one line; None: the end."""
    found = {"end": True} if value is None else {
        "head" if isinstance(value, ArchiveHead) else "file": to_json(value)}
    return json.dumps(found).encode() + b"\n"


def parse(lines: Iterable[bytes]) -> Iterator[ArchiveHead | ArchiveFile | None]:
    """Yield the head, then the files; None for an empty line. Raises ManifestCut."""
    for text in lines:
        if not text.strip():
            yield None
            continue
        try:
            found: Any = codec.parse(text)
            if found.get("end"):
                return
            if "head" in found:
                yield _sized(from_json(ArchiveHead, found["head"]))
            elif "file" in found:
                yield _sized(from_json(ArchiveFile, found["file"]))
        except (ValueError, AttributeError) as error:
            raise ManifestCut(f"a line of the archive's manifest cannot be read: {error}") from None
    raise ManifestCut("the archive's manifest breaks off")


def _sized(found: T) -> T:
    if found.bytes > LARGEST:
        raise ValueError(f"no size: {str(found.bytes)[:40]} bytes")
    return found
