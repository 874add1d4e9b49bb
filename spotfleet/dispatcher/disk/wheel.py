"""Wheel of the running code, which hosts fetch by its digest: the whole fleet runs the same code."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from spotfleet.bootstrap import WHEEL
from spotfleet.dispatcher.disk.files import write_atomic
from spotfleet.dispatcher.disk.records import digest_of
from spotfleet.storage import atomic

log = logging.getLogger(__name__)
NAME = "code"  # in the home: the wheel's digest


def keep(home: Path) -> str:
    """Copy the wheel of this process, if any, to the bundles; return its sha256, or "". Raises OSError."""
    given = os.environ.get(WHEEL, "")
    if not given:
        return ""
    with open(given, "rb") as wheel:
        digest = hashlib.file_digest(wheel, "sha256").hexdigest()
    kept = home / "bundles" / digest
    if not kept.exists() or digest_of(kept) != digest:
        atomic.make_folder(kept.parent)
        part = kept.with_name(f".{digest}.{os.getpid()}.part")  # files.sweep removes it after a kill
        shutil.copyfile(given, part)
        atomic.rename(part, kept, sync=False)  # copied again at the next start
    write_atomic(home / NAME, digest)
    log.info("hosts fetch %s as %s", Path(given).name, digest)
    return digest


def digest(home: Path) -> str:
    """Return the digest of the wheel that hosts may fetch; "" if there is none."""
    try:
        return (home / NAME).read_text(errors="replace")
    except FileNotFoundError:
        return ""
