"""Safe unpacking of a .tar.gz: outputs of workers, and bundles made by hand."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from spotfleet.storage import names


def extract(archive: Path, into: Path, look: Callable[[int], object] | None = None, *,
            refused: list[tuple[str, str, str]] | None = None) -> None:
    """Unpack `archive`; write nothing outside `into`. Raises ValueError for an archive that tries, or that is no
    archive.

    `look` gets the size of each member before it is written, and may raise. With `refused`, files whose names the file
    system refuses are set aside, and (name, where it is, why) is added to the list for each; else that is an OSError.
    """
    def taken(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        if look is not None:
            look(member.size)
        return _inside(member, path)

    into.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, "r:*") as tar:
            if refused is None:
                tar.extractall(into, filter=taken)
            for member in tar if refused is not None else ():
                _extract(tar, member, into, taken, refused)
    except tarfile.FilterError as error:
        raise ValueError(f"unsafe archive: {error}") from error
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"not an archive: {error}") from error


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path,
             taken: Callable[[tarfile.TarInfo, str], tarfile.TarInfo], refused: list[tuple[str, str, str]]) -> None:
    try:
        tar.extract(member, into, filter=taken)
    except OSError as error:
        if not (member.isfile() and names.refuses_name(error)):
            raise
        found = names.aside(member.name)
        refused.append((member.name, found, error.strerror or str(error)))
        tar.extract(member.replace(name=found, deep=False), into, filter=taken)


def _inside(member: tarfile.TarInfo, into: str) -> tarfile.TarInfo:
    """Apply tarfile's data filter, with two stricter rules.

    An absolute name is refused, not repaired. Nothing is unpacked by way of a link: in Python before 3.11.13 and
    3.12.11 a long chain of links leads out past that filter (CVE-2025-4517).
    """
    if member.name.startswith(("/", "\\")):
        raise tarfile.AbsolutePathError(member)
    kept = tarfile.data_filter(member, into)
    for name in (kept.name, kept.linkname) if kept.islnk() else (kept.name,):
        parts = Path(name).parts
        if ".." in parts or any(Path(into, *parts[:n]).is_symlink() for n in range(1, len(parts) + 1)):
            raise tarfile.OutsideDestinationError(member, name)
    if not kept.issym():
        return kept
    here = os.path.dirname(kept.name)
    target = os.path.normpath(os.path.join(here, kept.linkname))  # links on the way to it are ignored
    if target.split("/")[0] == "..":
        raise tarfile.LinkOutsideDestinationError(member, target)
    return kept.replace(linkname=os.path.relpath(target, here or "."))
