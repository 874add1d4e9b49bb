"""What a checkpoint is called where it is kept, its record beside it, and which of two is the newer."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from spotfleet.codec import from_json
from spotfleet.messages import Checkpoint

Seen = tuple[int, int]  # a file's size and the time of its last change, in ns


def name_of(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.version}-{checkpoint.generation}"


def age(checkpoint: Checkpoint) -> tuple[int, int]:
    """Greater is newer: a later generation counts more than further steps of one that has been given up."""
    return (checkpoint.generation, checkpoint.version)


def digest_of(path: Path) -> str:
    """sha256 in hex; blocking."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named(name: str) -> Checkpoint | None:
    """All that a file's name tells; None for one that is not ours."""
    version, _, generation = name.partition("-")
    return Checkpoint(int(version), "", 0, int(generation)) if version.isdigit() and generation.isdigit() else None


def read_record(path: Path) -> Checkpoint | None:
    try:
        return from_json(Checkpoint, json.loads(path.read_text()))
    except (ValueError, OSError):
        return None


def seen_at(path: Path) -> Seen | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_size, stat.st_mtime_ns)
