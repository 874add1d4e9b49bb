"""Shutdown of a fleet: cancel jobs, drain and terminate hosts, write the archive, then end the dispatcher itself.

    (staying) --`down`, autostop, max_lifetime--> going down --no host is left--> down
    down --by itself, or nobody fetched the archive in FETCH_S--> archived --terminates its own host
        '-- on a cloud's machine, whose end deletes the archive, only after `keep_s`
    going down, or archived --the cloud does not act for LAST_RESORT_S--> powers its own host off (exit status 0)

`down.json` holds the decision, so that a restarted dispatcher goes on with it; the ledger's `DownDecided` is its copy.
A decision that one of the two holds is kept. A damaged `down.json` without a trace in the ledger ends no fleet: it is
reported, and a person decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.disk.damage import DamagedFiles
from spotfleet.dispatcher.disk.files import write_json
from spotfleet.dispatcher.disk.space import is_full
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import DownDecided, Event, HostDraining, TakenOver
from spotfleet.fleet.planner.plan import GOES_DOWN
from spotfleet.storage import json_file

log = logging.getLogger(__name__)
CONTINUES = "the ledger has the decision, and the fleet goes down as decided"
STAYS = ("the ledger has no decision, so the fleet stays up: if it was to end, `spotfleet down` ends it, and "
         "autostop and max_lifetime still hold")
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


def decided(events: Iterable[Event]) -> ShutdownDecision | None:
    """Return the ledger's decision; that of a fleet which another dispatcher has taken over since does not count."""
    found: ShutdownDecision | None = None
    for event in events:
        if isinstance(event, DownDecided):
            found = found or ShutdownDecision(event.why, event.at, event.by_ourselves)
        elif isinstance(event, TakenOver):
            found = None
    return found


def begun(events: Iterable[Event], keeps: bool) -> ShutdownDecision | None:
    """Return a decision that only its consequences show, in a ledger of an earlier release: hosts were drained for it.

    The results wait as after the fleet's own decision where they are kept (`keeps`).
    """
    found: ShutdownDecision | None = None
    for event in events:
        if isinstance(event, HostDraining) and event.why == GOES_DOWN:
            found = found or ShutdownDecision("decided before a restart", event.at, by_ourselves=keeps)
        elif isinstance(event, TakenOver):
            found = None
    return found


class FleetShutdown:
    """State of the fleet's shutdown."""

    def __init__(self, home: Path, keep_s: float = 0.0, wake: Callable[[], None] = lambda: None,
                 note: Callable[[Event], None] = lambda _: None) -> None:
        """`wake` is called at each request to end the fleet, `note` with an event for the ledger."""
        self._path, self._keep_s, self._wake, self._note = home / "down.json", keep_s, wake, note
        self.decision: ShutdownDecision | None = None
        self.unsaved = False  # the disk was full; `save` tries again
        self._readers, self._read_at = 0, 0.0

    def load(self, events: Iterable[Event], damage: DamagedFiles) -> None:
        """Read the decision of an earlier process, from `down.json` or else from the ledger's events."""
        events = list(events)
        known = decided(events)
        try:
            self.decision = from_json(ShutdownDecision, json_file.read(self._path))
            return
        except FileNotFoundError:
            if known is not None:
                damage.missing(self._path, CONTINUES)
        except ValueError as error:
            known = known or begun(events, self._keep_s > 0)
            damage.set_aside(self._path, str(error), CONTINUES if known else STAYS)
        if known is not None:
            self._write(known)

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
        self._note(DownDecided(at, why, by_ourselves))
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
            self._readers, self._read_at = self._readers - 1, time.time()

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
