"""Files that are whole or absent: written beside their place, synced, renamed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from spotfleet.dispatcher import disk
from spotfleet.errors import SpotfleetError, UsageError

STALL_S = 60.0  # a sender that says nothing for so long is given up


LOOK_BYTES = 4 << 20  # so often the room on the disk is looked at


class TooLarge(SpotfleetError):
    """The body is larger than this route takes."""


def write_atomic(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace `path` by `text`; after a crash it holds the old or the new text, never a mix."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = _part(path)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)  # of a disk that is full


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=1))


async def receive(chunks: AsyncIterator[bytes], path: Path, limit_bytes: int, digest: str = "") -> int:
    """Stream a body into `path`; its size. UsageError when its sha256 is not `digest`; TooLarge beyond the limit.

    Nothing is left of a body that breaks off, stalls for STALL_S, is too large, has another digest, or finds no room:
    DiskFull.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part, size, sha = _part(path), 0, hashlib.sha256()
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            while chunk := await _next(chunks):
                if size // LOOK_BYTES < (size + len(chunk)) // LOOK_BYTES or not size:
                    disk.refuse_if_full(path.parent, len(chunk))
                size += len(chunk)
                if size > limit_bytes:
                    raise TooLarge(f"the body exceeds {limit_bytes} bytes")
                await asyncio.to_thread(_write, file, chunk, sha)
            await asyncio.to_thread(_sync, file)
        if digest and sha.hexdigest() != digest:
            raise UsageError(f"digest: the body has sha256 {sha.hexdigest()}, not {digest}", hint="send it again")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return size


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    """Empty at the end."""
    try:
        async with asyncio.timeout(STALL_S):
            return await anext(chunks, b"")
    except TimeoutError:
        raise UsageError(f"the body stalled for {STALL_S:g} s", hint="send it again") from None


def sweep(home: Path) -> None:
    """Remove what a killed dispatcher was just writing: it may hold secrets, or fill the disk."""
    for pattern in (".*.part", ".archive-*", "bundles/.*.part", "jobs/*/.*.part", "jobs/*/*/.*.part"):
        for left in home.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def _write(file: BinaryIO, chunk: bytes, sha: Any) -> None:
    file.write(chunk)
    sha.update(chunk)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
