"""Two lines at the top of the user's ~/.ssh/config, which make `ssh FLEET` work, and their removal without a trace.

    # spotfleet put this and the next line here; `spotfleet down` of the last fleet removes both
    Include "/home/u/.spotfleet/fleets/*/ssh/config"

They stand at the top and outside every Host block, because OpenSSH takes the first value it finds. If spotfleet also
made the file or its folder, the comment records that, so that both can be removed again. The rest of the file belongs
to the user: no byte of it changes, and concurrent edits are kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from spotfleet.storage import atomic
from spotfleet.storage.locks import locked

WAIT_S = 10.0  # wait for other commands, each of which takes milliseconds
TRIES = 20  # attempts while an editor saves in the same moment
COMMENT = b"# spotfleet put this and the next line here; `spotfleet down` of the last fleet removes both"
FILE, FOLDER = b", and this file", b", and this file with its folder"
MADE = (FOLDER, FILE, b"")
GLOB = '"%\\$[]*?{}\''  # characters of a path that quotes or patterns would change; `?` replaces each


class ConcurrentEdit(OSError):
    """Error: another program saved the file in the same moment, again and again."""


@dataclass(frozen=True)
class IncludeLine:
    """Place and content of the two lines."""

    config: Path  # ~/.ssh/config
    line: bytes  # Include ...
    lock: Path  # our own lock file; commands wait for it


def include_line(folder: Path, below: str) -> bytes:
    """Return an Include of all files that match the pattern `below` in `folder`; the folder's own name is no pattern.
    """
    plain = "".join("?" if c in GLOB else c for c in str(folder))
    return f'Include "{plain}/{below}"'.encode()


def add(spot: IncludeLine) -> None:
    """Put the lines at the top. Raises OSError if the file cannot be written; then nothing has changed."""
    with locked(spot.lock, WAIT_S):
        folder = spot.config.parent
        made = b""
        if not folder.exists():
            folder.mkdir(mode=0o700)
            made = FOLDER
        elif not spot.config.exists():
            made = FILE
        _edit(spot.config, lambda data: with_line(data or b"", spot.line, made))


def remove(spot: IncludeLine, still: Path, pattern: str) -> None:
    """Remove the lines, unless a file in `still` matches `pattern`: it belongs to another fleet. Raises OSError."""
    with locked(spot.lock, WAIT_S):
        if spot.config.exists() and not any(still.glob(pattern)):
            made = _made(spot.config.read_bytes(), spot.line)
            _edit(spot.config, lambda data: without_line(data or b"", spot.line))
            if made == FOLDER and not spot.config.exists():
                with suppress(OSError):  # something else lies there by now
                    spot.config.parent.rmdir()


def own_hosts(config: Path, aliases: set[str]) -> list[str]:
    """Return those of `aliases` that the user's own Host lines define, sorted: our names override them."""
    try:
        lines = config.read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return []
    words = [line.replace("=", " ").split() for line in lines]
    hosts = [line[1:] for line in words if line and line[0].lower() == "host"]
    return sorted({name.strip('"') for names in hosts for name in names} & aliases)


def with_line(data: bytes, line: bytes, made: bytes = b"") -> bytes:
    """Return `data` with the two lines at its top; only those of other homes of spotfleet may precede them."""
    lines = _lines(data)
    at = _find(lines, line)
    if at is not None and all(_is_ours(lines, i) for i in range(at)):
        return data
    if at is not None:
        made = _flag(lines[at])
        del lines[at:at + 2]
    end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
    return COMMENT + made + end + line + end + b"".join(lines)


def without_line(data: bytes, line: bytes) -> bytes | None:
    """Return `data` without the two lines; None if the file was made for them and holds nothing else."""
    lines = _lines(data)
    at = _find(lines, line)
    if at is None:
        return data
    made = _flag(lines[at])
    del lines[at:at + 2]
    heir = next((i for i, text in enumerate(lines) if text.startswith(COMMENT)), None)
    if made and heir is not None:  # the last one to go removes the file
        end = lines[heir][len(lines[heir].rstrip(b"\r\n")):]
        lines[heir] = COMMENT + made + end
    return None if made and not lines else b"".join(lines)


def _made(data: bytes, line: bytes) -> bytes:
    lines = _lines(data)
    at = _find(lines, line)
    return b"" if at is None else _flag(lines[at])


def _lines(data: bytes) -> list[bytes]:
    *whole, last = data.split(b"\n")  # not `splitlines`: a form feed or a lone CR ends no line for ssh
    return [part + b"\n" for part in whole] + ([last] if last else [])


def _find(lines: list[bytes], line: bytes) -> int | None:
    """Return the index of the comment that is followed by `line`."""
    return next((i for i, (first, second) in enumerate(pairwise(lines))
                 if _is_comment(first) and second.rstrip(b"\r\n") == line), None)


def _is_comment(text: bytes) -> bool:
    return text.rstrip(b"\r\n") in [COMMENT + made for made in MADE]


def _is_ours(lines: list[bytes], at: int) -> bool:
    return _is_comment(lines[at]) or (at > 0 and _is_comment(lines[at - 1]))


def _flag(text: bytes) -> bytes:
    return text.rstrip(b"\r\n").removeprefix(COMMENT)


# --- the file


def _edit(config: Path, change: Callable[[bytes | None], bytes | None]) -> None:
    """Replace the file by the result of `change` on its bytes (None: no file), unless another program writes it
    meanwhile."""
    target = Path(os.path.realpath(config))  # dotfiles are often links: the link stays
    for _ in range(TRIES):
        before = _stat(target)
        if before is not None and not stat.S_ISREG(before.st_mode):
            raise OSError(f"{config} is no regular file")
        data = target.read_bytes() if before is not None else None
        wanted = change(data)
        if wanted == data or _swap(target, before, wanted):
            return
    raise ConcurrentEdit(f"{config} changes all the time")


def _swap(target: Path, before: os.stat_result | None, wanted: bytes | None) -> bool:
    """Put `wanted` in the file's place; return False if the file is no longer the same."""
    if wanted is None:
        if _same(before, _stat(target)):
            target.unlink(missing_ok=True)
            return True
        return False
    part = target.with_name(f".{target.name}.spotfleet-{os.getpid()}")
    part.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(wanted)
            file.flush()
            if before is not None:
                _dress(file.fileno(), target, before)
            os.fsync(file.fileno())
        if not _same(before, _stat(target)):
            return False
        atomic.rename(part, target)
        return True
    finally:
        part.unlink(missing_ok=True)


def _dress(descriptor: int, target: Path, before: os.stat_result) -> None:
    """Give the new file the owner, mode and labels of the old one."""
    mine = os.fstat(descriptor)
    if (mine.st_uid, mine.st_gid) != (before.st_uid, before.st_gid):
        os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # a file system without them
            for name in os.listxattr(target):
                os.setxattr(descriptor, name, os.getxattr(target, name))


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.st_ino, one.st_size, one.st_mtime_ns) == (other.st_ino, other.st_size, other.st_mtime_ns)
