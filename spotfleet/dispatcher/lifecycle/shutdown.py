"""Shutdown of a fleet: cancel jobs, drain and terminate hosts, write the archive, then end the dispatcher itself.

    (staying) --`down`, autostop, max_lifetime--> going down --no host is left--> down
    down --by itself, or nobody fetched the archive in FETCH_S--> archived --terminates its own host
        '-- on a cloud's machine, whose end deletes the archive, only after `keep_s`
    going down, or archived --the cloud does not act for LAST_RESORT_S--> powers its own host off (exit status 0)

`down.json` holds the decision, so that a restarted dispatcher goes on with it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.errors import SpotfleetError

log = logging.getLogger(__name__)
FETCH_S = 600.0  # after `spotfleet down` the CLI fetches the archive and ends us, unless the laptop vanished


class PowerOff(SpotfleetError):
    """End of our process with the exit status that switches its machine off, see `protocol/__init__.py`."""

    exit_code = 0


@dataclass(frozen=True)
class ShutdownDecision:
    """Content of `down.json`."""

    why: str
    at: float  # Unix
    by_ourselves: bool
    archived: bool = False


class FleetShutdown:
    """State of the fleet's shutdown."""

    def __init__(self, home: Path, keep_s: float = 0.0, wake: Callable[[], None] = lambda: None,
                 unix: Callable[[], float] = time.time) -> None:
        """`wake` is called at each request to end the fleet; `unix` returns the time."""
        self._path, self._keep_s, self._wake, self._unix = home / "down.json", keep_s, wake, unix
        self.decision: ShutdownDecision | None = None
        self.unsaved = False  # the disk was full; `save` tries again
        self._readers, self._read_at = 0, 0.0
        if self._path.exists():
            self.decision = from_json(ShutdownDecision, json.loads(self._path.read_text()))

    @property
    def why(self) -> str:
        """Why the fleet goes down, and how long its results wait; empty while it stays up."""
        if self.decision is None:
            return ""
        waits = f"; its results wait on its dispatcher for {self._keep_s / 3600:g} h: `spotfleet down` copies them here"
        return self.decision.why + (waits if self.decision.by_ourselves and self._keep_s else "")

    def begin(self, why: str, *, by_ourselves: bool, at: float) -> bool:
        """Begin the shutdown; return whether it is new. `spotfleet down` may follow a fleet's end by itself."""
        self._wake()
        if self.decision is not None:
            return False
        self._write(ShutdownDecision(why, at, by_ourselves))
        log.info("going down: %s", why)
        return True

    def mark_archived(self) -> None:
        assert self.decision is not None
        self._write(replace(self.decision, archived=True))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Prevent the end of our machine while a client fetches the archive, however long it takes."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers, self._read_at = self._readers - 1, self._unix()

    def must_end(self, unix: float) -> bool:
        """Return whether the dispatcher must end its own machine."""
        if self.decision is None or self._readers:
            return False
        wait_s = self._keep_s if self.decision.by_ourselves else FETCH_S
        return not wait_s or unix - max(self.decision.at, self._read_at) >= wait_s

    def save(self) -> None:
        """Write a decision that could not be written: the end does not wait for room on the disk."""
        if self.unsaved and self.decision is not None:
            self._write(self.decision)

    def _write(self, decision: ShutdownDecision) -> None:
        self.decision = decision
        try:
            write_json(self._path, to_json(decision))
            self.unsaved = False
        except OSError as error:
            if not is_full(error):
                raise
            self.unsaved = True
