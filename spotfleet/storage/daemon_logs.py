"""Logs of our daemons: files of bounded size, and few lines about input that strangers can send at will."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import logging.handlers
import os
import shutil
import stat
import threading
import time
from pathlib import Path

LOG_BYTES = 8 << 20  # limit of a file; one older file of this size is kept beside it
CHECK_S = 10.0
# Loggers of input from outside: at most one line a minute for each kind of it.
OUTSIDE = ("aiohttp", "asyncio", "spotfleet.dispatcher.http")
KIND_S = 60.0
MOST_KINDS = 64  # lines a minute of these loggers in all
OUTSIDE_CHARS = 500  # limit of a line about a malformed request, which quotes it


class KindFilter(logging.Filter):
    """Filter that lets one record of each kind pass in KIND_S; the next one has the number of the others in `more`."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[object, ...], list[float]] = {}  # -> [time of the last that passed, suppressed since]

    def filter(self, record: logging.LogRecord) -> bool:
        if not _is_outside(record):
            return True
        now = time.monotonic()
        for kind in [k for k, (at, more) in self._kinds.items() if now - at >= (KIND_S if not more else 2 * KIND_S)]:
            del self._kinds[kind]
        kind = _kind(record)
        at, more = self._kinds.get(kind, (-KIND_S, 0))
        if now - at < KIND_S or (kind not in self._kinds and len(self._kinds) >= MOST_KINDS):
            if kind in self._kinds:
                self._kinds[kind][1] += 1
            return False
        self._kinds[kind] = [now, 0]
        record.more = more
        return True


class LogFormatter(logging.Formatter):
    """Formatter that shortens records about malformed input: no traceback, and no more of the input than a line."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if _is_outside(record) and type(error).__module__.startswith("aiohttp.http"):
            text = f"{record.getMessage()}: {type(error).__name__}: {error}"
            copied = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "args": None,
                                            "msg": ascii(text)[1:-1][:OUTSIDE_CHARS]})
            line = super().format(copied)
        else:
            line = super().format(record)
        more = getattr(record, "more", 0)
        return f"{line} ({more:.0f} more of this kind were left out)" if more else line


def start(form: str, file: Path | None = None) -> None:
    """Log to stderr, and to `file`; keep both, and the file behind stderr, below LOG_BYTES."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        handlers.insert(0, logging.handlers.RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=1))
    for handler in handlers:
        handler.setFormatter(LogFormatter(form))
        handler.addFilter(KindFilter())
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    keep_output_bounded()


def keep_output_bounded() -> None:
    """Check the size of the file behind stderr from time to time, while this process lives."""

    def check() -> None:
        while True:
            time.sleep(CHECK_S)
            rotate_output(2, LOG_BYTES)

    threading.Thread(target=check, name="size of stderr", daemon=True).start()


def rotate_output(descriptor: int, most: int) -> bool:
    """Empty the file behind `descriptor` if it is larger than `most`, and return whether it was; NAME.1 gets its
    content. Other processes that append to the file go on in the empty one. Terminals, pipes and files that are not
    appended to stay as they are."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= most:
        return False
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        return False
    with contextlib.suppress(OSError):  # a full disk, or the file has lost its name: then its content is lost
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if os.path.samestat(found, path.stat()):
            older = path.with_name(f"{path.name}.1")
            with open(path, "rb") as source, open(os.open(older, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                                                  "wb") as target:
                shutil.copyfileobj(source, target)
    os.ftruncate(descriptor, 0)
    return True


def _is_outside(record: logging.LogRecord) -> bool:
    return any(record.name == name or record.name.startswith(f"{name}.") for name in OUTSIDE)


def _kind(record: logging.LogRecord) -> tuple[object, ...]:
    """Return what records of one kind have in common. The first argument of our own records names the host."""
    about = record.args[0] if record.name.startswith("spotfleet.") and isinstance(record.args, tuple) else ""
    error = record.exc_info[0] if record.exc_info else None
    return (record.name, record.levelno, str(record.msg).partition("\n")[0][:200], str(about)[:200], error)
