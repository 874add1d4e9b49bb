"""The end of a fleet: jobs are cancelled, hosts drained and terminated, then the archive, then the dispatcher itself.

    (staying) --`down`, autostop, max_lifetime--> going down --no host is left--> down
    down --by ourselves, or nobody has come for the archive in FETCH_S--> archived --terminates its own host
        '-- on a cloud's machine, which takes the archive with it, only after `keep_s`
    going down, or archived --the cloud does nothing for LAST_RESORT_S--> powers its own host off (exit status 0)

`down.json` holds the decision, so that a restarted dispatcher goes on with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spotfleet.codec import from_json, to_json
from spotfleet.dispatcher.disk import is_full
from spotfleet.dispatcher.files import write_json
from spotfleet.errors import SpotfleetError

FETCH_S = 600.0  # after `spotfleet down` the CLI fetches the archive and ends us; a laptop that vanished does not


class PowerOff(SpotfleetError):
    """Our process ends with the status that switches its machine off: see `agent/__main__.py`."""

    exit_code = 0


@dataclass(frozen=True)
class Decision:
    why: str
    at: float  # Unix
    by_ourselves: bool
    archived: bool = False


class Endgame:
    def __init__(self, home: Path, keep_s: float = 0.0) -> None:
        self._path, self._keep_s = home / "down.json", keep_s
        self.decision: Decision | None = None
        self.unsaved = False  # the disk was full; `save` tries again
        self._readers, self._read_at = 0, 0.0
        if self._path.exists():
            self.decision = from_json(Decision, json.loads(self._path.read_text()))

    @property
    def why(self) -> str:
        """Why the fleet goes down, and how long its results wait; empty while it stays."""
        if self.decision is None:
            return ""
        waits = f"; its results wait on its dispatcher for {self._keep_s / 3600:g} h: `spotfleet down` brings them home"
        return self.decision.why + (waits if self.decision.by_ourselves and self._keep_s else "")

    def begin(self, why: str, *, by_ourselves: bool, at: float) -> bool:
        """Whether this is news. A fleet that ends by itself may still be fetched by `spotfleet down`."""
        if self.decision is not None:
            return False
        self._write(Decision(why, at, by_ourselves))
        return True

    def mark_archived(self) -> None:
        assert self.decision is not None
        self._write(replace(self.decision, archived=True))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While somebody fetches the archive we do not end ourselves under it, however long it takes."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers, self._read_at = self._readers - 1, time.time()

    def alone(self, unix: float) -> bool:
        """Must we end ourselves?"""
        if self.decision is None or self._readers:
            return False
        wait_s = self._keep_s if self.decision.by_ourselves else FETCH_S
        return not wait_s or unix - max(self.decision.at, self._read_at) >= wait_s

    def save(self) -> None:
        """Write down what could not be written: a fleet that ends does not wait for room on its disk."""
        if self.unsaved and self.decision is not None:
            self._write(self.decision)

    def _write(self, decision: Decision) -> None:
        self.decision = decision
        try:
            write_json(self._path, to_json(decision))
            self.unsaved = False
        except OSError as error:
            if not is_full(error):
                raise
            self.unsaved = True
