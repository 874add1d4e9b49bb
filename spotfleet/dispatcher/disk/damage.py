"""Damaged files in the dispatcher's home: kept under another name, and reported.

    unreadable, or another digest than it was written with --> kept as NAME.damaged-TIME --> event FileDamaged, `status`
    the same, and its sender has it, too                   --> removed ---------------------^
    missing                                                --------------------------------^

None of them stops the dispatcher: the caller goes on without the file, and names the effect (`then`) for the event.
`docs/recovery.md` has the table of all files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from spotfleet.fleet.domain.events import FileDamaged
from spotfleet.storage import atomic

log = logging.getLogger(__name__)


class DamagedFiles:
    """Reports of this process about damaged files. Any thread may add one."""

    def __init__(self, home: Path, unix: Callable[[], float] = time.time) -> None:
        """`unix` returns the time."""
        self._home, self._unix = home, unix
        self._lock = threading.Lock()
        self._news: list[FileDamaged] = []

    def set_aside(self, path: Path, why: str, then: str) -> None:
        """Keep the file under another name, so that the next start does not find it again. `then`: what follows."""
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(self._unix()))}")
        atomic.rename(path, aside)
        self._report(path, aside.name, why, then)

    def drop(self, path: Path, why: str, then: str) -> None:
        """Remove a file that its sender has, too."""
        atomic.remove(path)
        self._report(path, "", why, then)

    def missing(self, path: Path, then: str) -> None:
        self._report(path, "", "it is missing", then)

    def reported(self, path: Path) -> bool:
        """Return whether the file's damage is among the news."""
        with self._lock:
            return any(event.file == str(path.relative_to(self._home)) for event in self._news)

    def take_news(self) -> list[FileDamaged]:
        """Return the reports since the last call, to be recorded."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def _report(self, path: Path, kept_as: str, why: str, then: str) -> None:
        event = FileDamaged(self._unix(), str(path.relative_to(self._home)), kept_as, why, then)
        log.error("%s: %s", event.file, event.text)
        with self._lock:
            self._news.append(event)
