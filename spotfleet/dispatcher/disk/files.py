"""Atomic files, whole or absent: written to a temporary name, synced, renamed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from spotfleet.dispatcher.disk import space
from spotfleet.errors import SpotfleetError, UsageError
from spotfleet.storage import atomic, json_file

STALL_S = 60.0  # a sender that sends nothing for this time is disconnected
LOOK_BYTES = 4 << 20  # the free disk space is checked once per this many bytes


class TooLarge(SpotfleetError):
    """Refusal of a body that is larger than the route accepts."""


def write_atomic(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace `path` by `text`, durably; after a crash it holds the old or the new text, never a mix."""
    atomic.make_folder(path.parent)
    atomic.write(path, text, mode=mode)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by a JSON value, with its digest."""
    write_atomic(path, json_file.text_of(value))


class WrongDigest(UsageError):
    """Refusal of a body whose sha256 is another than its sender named."""


async def receive(chunks: AsyncIterator[bytes], path: Path, limit_bytes: int, digest: str = "") -> int:
    """Stream a body into `path`; return its size. WrongDigest if its sha256 is not `digest`; TooLarge beyond the limit.

    No data remains of a body that breaks off, stalls for STALL_S, is too large, has another digest, or finds no room
    (DiskFull). Its bytes are on the disk at the return; its name only once the caller has synced the folder.
    """
    atomic.make_folder(path.parent)
    size, sha = 0, hashlib.sha256()
    with atomic.replacing(path, sync=False) as file:
        while chunk := await _next(chunks):
            if size // LOOK_BYTES < (size + len(chunk)) // LOOK_BYTES or not size:
                space.refuse_if_full(path.parent, len(chunk))
            size += len(chunk)
            if size > limit_bytes:
                raise TooLarge(f"the body exceeds {limit_bytes} bytes")
            await asyncio.to_thread(_write, file, chunk, sha)
        await asyncio.to_thread(_sync, file)
        if digest and sha.hexdigest() != digest:
            raise WrongDigest(f"digest: the body has sha256 {sha.hexdigest()}, not {digest}", hint="send it again")
    return size


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """Return the next chunk; empty at the end."""
    try:
        async with asyncio.timeout(STALL_S):
            return await anext(chunks, b"")
    except TimeoutError:
        raise UsageError(f"the body stalled for {STALL_S:g} s", hint="send it again") from None


def sweep(home: Path) -> None:
    """Remove unfinished files of a killed dispatcher: they may hold secrets, or fill the disk."""
    for pattern in (".*.part", ".archive-*", "bundles/.*.part", "jobs/*/.*.part", "jobs/*/*/.*.part",
                    "past/*/.*.part", "past/*/*/.*.part"):
        for left in home.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def sync_names(home: Path) -> None:
    """Make durable every name that an earlier process may not have synced before it was killed."""
    for folder in (home, home / "jobs", home / "bundles"):
        if folder.is_dir():
            atomic.sync_folder(folder)


def _write(file: BinaryIO, chunk: bytes, sha: Any) -> None:
    file.write(chunk)
    sha.update(chunk)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
