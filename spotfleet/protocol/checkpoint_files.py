"""Files of a checkpoint: one layout on a host, on the dispatcher's disk, at a mounted target and in an object store.
Pure.

    VERSION-GENERATION/__R_0.distcp    rank R's piece
                       manifest.json   size and sha256 of every other file; its own sha256 is that of the checkpoint
                       .metadata       index of torch.distributed.checkpoint

The manifest follows the pieces, and `.metadata` follows the manifest, so a folder with `.metadata` is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MANIFEST, METADATA, MARK = "manifest.json", ".metadata", "mark"
MANIFEST_BYTES = 4 << 20  # a longer one is none
MOST_PIECES = 4096
_PIECE = re.compile(r"__(\d{1,4})_0\.distcp")
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class CheckpointFile:
    """One file, as the manifest lists it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """List of a checkpoint's files."""

    version: int
    generation: int
    files: Mapping[str, CheckpointFile]  # in the order in which they are to be put in place
    content: Mapping[str, Any] = field(default_factory=dict, compare=False)  # all of it, as a member has marked it

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def grant(self) -> str:
        return str(self.content.get("grant", ""))

    @property
    def mark(self) -> str:
        return str(self.content.get(MARK, ""))


def piece_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def is_file_name(name: str) -> bool:
    """Return whether a checkpoint may have a file of this name."""
    found = _PIECE.fullmatch(name)
    return name in (MANIFEST, METADATA) or (found is not None and int(found[1]) < MOST_PIECES)


def in_order(names: Mapping[str, Any]) -> list[str]:
    """Return the names of a checkpoint's files in the order in which they are put in place."""
    return [*sorted(name for name in names if name not in (MANIFEST, METADATA)), MANIFEST, METADATA]


def share_of(files: Mapping[str, CheckpointFile], hosts: Sequence[str], own: str) -> list[str]:
    """Return the names of the files that `own`, one of `hosts`, fetches: together the hosts fetch each file once, and
    each about as many bytes. The order of `hosts` does not matter."""
    loads, found = dict.fromkeys(sorted(hosts), 0), []
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        host = min(loads, key=lambda host: loads[host])
        loads[host] += files[name].bytes
        if host == own:
            found.append(name)
    return found


def parse_manifest(data: bytes) -> CheckpointManifest:
    """Parse `manifest.json`; ValueError for anything else."""
    try:
        content = json.loads(data)
        files = {name: CheckpointFile(int(entry["bytes"]), str(entry["sha256"]))
                 for name, entry in content["files"].items()}
        found = CheckpointManifest(int(content["version"]), int(content["generation"]), files, content)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no manifest of a checkpoint: {error}") from error
    wrong = [name for name, entry in files.items() if name == MANIFEST or not is_file_name(name) or entry.bytes < 0
             or not _SHA256.fullmatch(entry.sha256)]
    if wrong or METADATA not in files or len(data) > MANIFEST_BYTES:
        raise ValueError(f"it is no manifest of a checkpoint: {str(wrong[0])[:80] if wrong else 'no ' + METADATA}")
    return found
