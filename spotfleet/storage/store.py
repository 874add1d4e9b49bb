"""Store: keys with their bytes, in a folder, in an object store or at another machine. Pure.

A key is a relative path, such as `jobs/train-1/checkpoints/20-1.ckpt`. Its content appears whole or not at all, and is
replaced, never changed in place. Methods block. They raise OSError for trouble, FileNotFoundError where there is
nothing under the key, and UnsafeKey for a key that leads out of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

CHUNK_BYTES = 1 << 20  # that `get` yields at once
NAME_BYTES, KEY_BYTES = 255, 4000


class UnsafeKey(ValueError):
    """Refusal of a key that leads out of a store, or that no file system takes."""


@dataclass(frozen=True)
class StoreEntry:
    """A key with what is known of its content."""

    key: str
    bytes: int
    sha256: str = ""  # in hex; "": not known
    mtime: float = 0.0  # Unix; 0: not known


class DurableStore(Protocol):
    """Durable content by key."""

    def put(self, key: str, chunks: Iterable[bytes], *, size: int | None = None, at_most: int | None = None) -> str:
        """Store the content, whole or not at all; return its sha256 in hex. Content of another size than `size` is not
        stored: OSError. `at_most`: its size will not exceed this; where neither is known, an object store takes 80 GB.
        """

    def get(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes in [start, end), to the end without `end`; fewer where the content ends before."""

    def list(self, prefix: str = "") -> Iterator[StoreEntry]:
        """Yield the entries whose keys are `prefix` or lie below it, in the order of their keys."""

    def delete(self, key: str) -> None:
        """Remove the key; nothing happens where it is absent."""


def check_key(key: str) -> str:
    """Return the key. Raises UnsafeKey unless it names a file below any folder."""
    parts = key.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if min(sizes) == 0 or max(sizes) > NAME_BYTES or sum(sizes) + len(sizes) > KEY_BYTES or "\0" in key \
            or "." in parts or ".." in parts:
        raise UnsafeKey(f"{key[:200]!r} is no name of a file below a folder")
    return key
