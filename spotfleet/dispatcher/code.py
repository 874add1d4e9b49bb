"""The wheel of the code that runs here, for hosts that fetch it by its digest: one code in the whole fleet."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from spotfleet.bootstrap import WHEEL
from spotfleet.dispatcher.files import write_atomic

log = logging.getLogger(__name__)
NAME = "code"  # in the home: the wheel's digest


def keep(home: Path) -> str:
    """Put the wheel that we were started from, if any, among the bundles; its sha256, or "". Raises OSError."""
    given = os.environ.get(WHEEL, "")
    if not given:
        return ""
    with open(given, "rb") as wheel:
        digest = hashlib.file_digest(wheel, "sha256").hexdigest()
    kept = home / "bundles" / digest
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = kept.with_name(f".{digest}.{os.getpid()}.part")  # of a process that was killed: files.sweep
        shutil.copyfile(given, part)
        part.replace(kept)
    write_atomic(home / NAME, digest)
    log.info("hosts fetch %s as %s", Path(given).name, digest)
    return digest


def digest(home: Path) -> str:
    """Of the wheel that hosts may fetch; "" if there is none."""
    try:
        return (home / NAME).read_text()
    except FileNotFoundError:
        return ""
