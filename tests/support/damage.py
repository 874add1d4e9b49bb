"""Four ways in which a file is damaged, or lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    """One bit of each of three bytes, so that a text may stay valid UTF-8 and even valid JSON, or not."""
    data, chosen = bytearray(path.read_bytes()), random.Random(str(path.name))
    for at in chosen.sample(range(len(data)), min(3, len(data))):
        data[at] ^= 1 << chosen.randrange(8)
    path.write_bytes(bytes(data))


def missing(path: Path) -> None:
    path.unlink()


Damage = Callable[[Path], None]
WAYS: tuple[Damage, ...] = (truncated, empty, flipped, missing)
EACH_WAY = pytest.mark.parametrize("damage", WAYS, ids=lambda way: way.__name__)
EACH_UNREADABLE_WAY = pytest.mark.parametrize("damage", WAYS[:3], ids=lambda way: way.__name__)
