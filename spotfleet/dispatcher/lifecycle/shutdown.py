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
from spotfleet.dispatcher.lifecycle.unsent import Patience, patience_of
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
    limited: bool = False  # max_cost or max_lifetime is reached: hosts get little time to send results
    discard: bool = False  # `down --discard`: results that do not arrive are given up


class FleetShutdown:
    """State of the fleet's shutdown."""

    def __init__(self, home: Path, keep_s: float = 0.0, wake: Callable[[], None] = lambda: None,
                 unix: Callable[[], float] = time.time) -> None:
        """`wake` is called at each request to end the fleet; `unix` returns the time."""
        self._path, self._keep_s, self._wake, self._unix = home / "down.json", keep_s, wake, unix
        self.decision: ShutdownDecision | None = None
        self.unsaved = False  # the disk was full; `save` tries again
        self._readers, self._read_at = 0, 0.0
        self._sent_at = 0.0  # Unix: when a host last stayed to send results, or the last host had ended
        if self._path.exists():
            self.decision = from_json(ShutdownDecision, json.loads(self._path.read_text()))

    @property
    def why(self) -> str:
        """Why the fleet goes down, and how long its results wait; empty while it stays up."""
        if self.decision is None:
            return ""
        waits = f"; its results wait on its dispatcher for {self._keep_s / 3600:g} h: `spotfleet down` copies them here"
        return self.decision.why + (waits if self.decision.by_ourselves and self._keep_s else "")

    def begin(self, why: str, *, by_ourselves: bool, at: float, limited: bool = False, discard: bool = False) -> bool:
        """Begin the shutdown; return whether it is new. `spotfleet down` may follow a fleet's end by itself, and
        `--discard` another `down`."""
        self._wake()
        before = self.decision
        decided = before or ShutdownDecision(why, at, by_ourselves)
        decided = replace(decided, limited=decided.limited or (before is None and limited),
                          discard=decided.discard or discard)
        if decided != before:
            self._write(decided)
            log.info("going down: %s", why)
        return before is None

    def limit(self) -> None:
        """Record that max_cost or max_lifetime is reached while the fleet goes down."""
        if self.decision is not None and not self.decision.limited:
            self._write(replace(self.decision, limited=True))

    @property
    def patience(self) -> Patience:
        """Time limits of hosts that hold results."""
        found = self.decision
        if found is None:
            return patience_of(going_down=False)
        return patience_of(going_down=True, by_ourselves=found.by_ourselves, limited=found.limited,
                           discard=found.discard)

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

    def note_sending(self, unix: float) -> None:
        """Record that a host still sends results, or that the last one has ended: the waits below begin then."""
        self._sent_at = max(self._sent_at, unix)

    @property
    def last_at(self) -> float:
        """When the fleet's end was decided, or a host still sent results. Unix."""
        assert self.decision is not None
        return max(self.decision.at, self._sent_at)

    def must_end(self, unix: float, *, incomplete: bool = False) -> bool:
        """Return whether the dispatcher must end its own machine. `incomplete`: results ended with a host, so a
        `down` has stopped, and a person has to come back."""
        if self.decision is None or self._readers:
            return False
        wait_s = self._keep_s if self.decision.by_ourselves else FETCH_S
        if incomplete:
            wait_s = max(wait_s, self._keep_s)
        return not wait_s or unix - max(self.last_at, self._read_at) >= wait_s

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
