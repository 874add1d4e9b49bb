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
from spotfleet.dispatcher.lifecycle.unsent import Patience, patience_of
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.domain.events import DownDecided, Event, HostDraining, TakenOver
from spotfleet.fleet.planner.plan import GOES_DOWN
from spotfleet.storage import json_file

log = logging.getLogger(__name__)
CONTINUES = "the ledger has the decision, and the fleet goes down as decided"
NEVER_WRITTEN = f"a full disk may have refused it; {CONTINUES}"
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
    limited: bool = False  # max_cost or max_lifetime is reached: hosts get little time to send results
    discard: bool = False  # `down --discard`: results that do not arrive are given up


def decided(events: Iterable[Event]) -> ShutdownDecision | None:
    """Return the ledger's decision; that of a fleet which another dispatcher has taken over since does not count."""
    found: ShutdownDecision | None = None
    for event in events:
        if isinstance(event, DownDecided):
            first = found or ShutdownDecision(event.why, event.at, event.by_ourselves)
            found = replace(first, limited=first.limited or event.limited, discard=first.discard or event.discard)
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
                 unix: Callable[[], float] = time.time, note: Callable[[Event], None] = lambda _: None) -> None:
        """`wake` is called at each request to end the fleet, `note` with an event for the ledger; `unix` returns the
        time."""
        self._path, self._keep_s, self._wake, self._unix, self._note = home / "down.json", keep_s, wake, unix, note
        self.decision: ShutdownDecision | None = None
        self.unsaved = False  # the disk was full; `save` tries again
        self._readers, self._read_at = 0, 0.0
        self._sent_at = 0.0  # Unix: when a host last stayed to send results, or the last host had ended

    def load(self, events: Iterable[Event], damage: DamagedFiles) -> None:
        """Read the decision of an earlier process, from `down.json` or else from the ledger's events."""
        events = [e for e in events if isinstance(e, DownDecided | HostDraining | TakenOver)]
        known = decided(events)
        try:
            self.decision = from_json(ShutdownDecision, json_file.read(self._path))
            return
        except FileNotFoundError:
            if known is not None:
                damage.missing(self._path, NEVER_WRITTEN)
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

    def begin(self, why: str, *, by_ourselves: bool, at: float, limited: bool = False, discard: bool = False) -> bool:
        """Begin the shutdown; return whether it is new. `spotfleet down` may follow a fleet's end by itself, and
        `--discard` another `down`."""
        self._wake()
        before = self.decision
        decided = before or ShutdownDecision(why, at, by_ourselves)
        decided = replace(decided, limited=decided.limited or (before is None and limited),
                          discard=decided.discard or discard)
        if decided != before:
            self._decide(decided, at)
            log.info("going down: %s", why)
        return before is None

    def limit(self) -> None:
        """Record that max_cost or max_lifetime is reached while the fleet goes down."""
        if self.decision is not None and not self.decision.limited:
            self._decide(replace(self.decision, limited=True), self._unix())

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

    def move(self, by_s: float) -> None:
        """Move all instants, which were taken from a time that was wrong by `by_s`."""
        self._sent_at, self._read_at = (at and at + by_s for at in (self._sent_at, self._read_at))
        if self.decision is not None:
            self._write(replace(self.decision, at=self.decision.at + by_s))

    def save(self) -> None:
        """Write a decision that could not be written: the end does not wait for room on the disk."""
        if self.unsaved and self.decision is not None:
            self._write(self.decision)

    def _decide(self, decision: ShutdownDecision, at: float) -> None:
        """Write a new or changed decision to the disk and the ledger."""
        self._write(decision)
        self._note(DownDecided(at, decision.why, decision.by_ourselves, decision.limited, decision.discard))

    def _write(self, decision: ShutdownDecision) -> None:
        self.decision = decision
        try:
            write_json(self._path, to_json(decision))
            self.unsaved = False
        except OSError as error:
            if not is_full(error):
                raise
            self.unsaved = True
