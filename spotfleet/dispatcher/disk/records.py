"""Names, records and order of stored checkpoints."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from spotfleet.codec import from_json
from spotfleet.protocol.messages import Checkpoint
from spotfleet.storage import json_file, verified

NAME = re.compile("([0-9]{1,15})-([0-9]{1,15})")
Seen = verified.State
AT_TARGET = "file://"  # begins the url of a checkpoint whose files are in a folder of the mounted target, and not here


def name_of(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.version}-{checkpoint.generation}"


def age(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the sort key; greater is newer. A later generation counts more than further steps of a replaced one."""
    return (checkpoint.generation, checkpoint.version)


def lies_at_target(kept: Checkpoint) -> bool:
    """Return whether the files of a kept checkpoint are at the mounted target alone. One in an object store has a url,
    too, but no name."""
    return bool(kept.url and kept.name)


def digest_of(path: Path) -> str:
    """Return the sha256 of a file in hex; blocking."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named(name: str) -> Checkpoint | None:
    """Parse a file's name into version and generation; None for a foreign one."""
    found = NAME.fullmatch(name)
    return Checkpoint(int(found[1]), "", 0, int(found[2])) if found else None


def read_record(path: Path) -> Checkpoint | None:
    try:
        return from_json(Checkpoint, json_file.read(path))
    except (ValueError, OSError):
        return None


def seen_at(path: Path) -> Seen | None:
    try:
        return verified.state_of(path)
    except OSError:
        return None
