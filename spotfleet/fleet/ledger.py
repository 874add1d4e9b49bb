"""Ledger of a fleet: an append-only sqlite file of events. No event is ever changed.

A damaged file raises LedgerDamaged and stays as it is. `open_sound` sets it aside and begins a new ledger with a
HistoryLost event; its user then adopts the hosts that the cloud lists and the state that agents hold.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet.domain.events import Event, HistoryLost, event_from_json, event_to_json
from spotfleet.fleet.domain.state import FleetState, apply
from spotfleet.storage import atomic

SCHEMA = 1  # PRAGMA user_version
APPLICATION = 0x5F0F1EE7  # PRAGMA application_id: distinguishes our files from other programs'
PAGE = 5000  # events read at once
BUSY_S = 10.0  # how long a writer waits for another process's transaction

NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # primary codes; room, or the disk, may come back
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

CREATE = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
)
"""


class LedgerDamaged(SpotfleetError):
    """The file is not a readable ledger of this release: it is set aside, or a person moves it away."""


class OtherSchema(SpotfleetError):
    """The ledger was written by another release. A person with that release can read it."""


class Ledger:
    """Ledger in a file, safe for several threads and several processes at once.

    Events survive a power failure once `append` has returned: write-ahead log, synchronous FULL.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._state = FleetState()
        self._folded = 0  # sequence number of the last event in `_state`
        atomic.make_folder(self.path.parent)
        _create_private(self.path)
        self._db = _open(self.path, str(self.path))
        with _explained(self.path):
            _write_ahead(self._db)
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(CREATE)
            self._db.execute(f"PRAGMA user_version={SCHEMA}")
            self._db.execute(f"PRAGMA application_id={APPLICATION}")
            self._db.execute("COMMIT")

    def append(self, *events: Event) -> int:
        """Write all of `events`, or none if killed meanwhile. Returns the last sequence number."""
        rows = [(e.at, type(e).__name__, json.dumps(event_to_json(e))) for e in events]
        with self._lock, _explained(self.path):
            if rows:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    self._db.executemany("INSERT INTO events (at, kind, body) VALUES (?, ?, ?)", rows)
                    self._db.execute("COMMIT")
                finally:
                    if self._db.in_transaction:  # killed or refused; a full disk has rolled back by itself
                        self._db.execute("ROLLBACK")
            return self._db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0]

    def events(self, after: int = 0, limit: int = -1) -> list[tuple[int, Event]]:
        """Return the events with a sequence number above `after`, in order; at most `limit` if given."""
        with self._lock:
            return _read(self._db, self.path, after, limit)

    def each(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield the events above `after`, in order, read PAGE at a time: a ledger of months does not fit in memory, and
        other users of the ledger wait meanwhile."""
        while page := self.events(after, PAGE):
            yield from page
            after = page[-1][0]

    def state(self) -> FleetState:
        """Return all events folded. Reads only those written since the last call, by any process."""
        with self._lock:
            while page := _read(self._db, self.path, self._folded, PAGE):
                for seq, event in page:
                    self._state, self._folded = apply(self._state, event), seq
            return self._state

    def check(self) -> None:
        """Read the whole ledger. Raises LedgerDamaged if that is not possible."""
        with self._lock, _explained(self.path):
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise _damaged(self.path, found)
        for _ in self.each():
            pass

    def copy_to(self, path: Path | str) -> None:
        """Write a consistent copy into one file, without a write-ahead log beside it. Replaces `path`."""
        target = Path(path)
        target.unlink(missing_ok=True)
        _create_private(target)
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            with self._lock, _explained(self.path):
                self._db.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
        finally:
            copy.close()

    def copy_of(self) -> bytes:
        """Return the same copy in memory, for a full disk."""
        copy = sqlite3.connect(":memory:", isolation_level=None)
        try:
            with self._lock, _explained(self.path):
                self._db.backup(copy)
            return _without_wal(copy.serialize())
        finally:
            copy.close()

    def close(self) -> None:
        with self._lock:
            self._db.close()


def problem(path: Path) -> LedgerDamaged | OtherSchema | None:
    """Return what is wrong with the ledger at `path`; None if it is usable."""
    ledger: Ledger | None = None
    try:
        ledger = Ledger(path)
        ledger.check()
    except (LedgerDamaged, OtherSchema) as error:
        return error
    finally:
        if ledger is not None:
            ledger.close()
    return None


def open_sound(path: Path) -> tuple[Ledger, str]:
    """Open a usable ledger; also return what was wrong with the existing one, "" if nothing was.

    A damaged ledger is kept beside it as PATH.corrupt-TIME; the new one begins with a HistoryLost event.
    """
    found = problem(path)
    if found is None:
        return Ledger(path), ""
    if isinstance(found, OtherSchema):
        raise found
    damaged = set_aside(path)
    fresh = Ledger(path)
    fresh.append(HistoryLost(time.time(), damaged.name, str(found)))
    return fresh, f"{found}; it is kept as {damaged.name}, and a new one is begun"


def set_aside(path: Path) -> Path:
    """Rename the damaged ledger, together with sqlite's files beside it."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    damaged = path.with_name(f"{path.name}.corrupt-{stamp}")
    for ending in ("-wal", "-shm", ""):  # the ledger last: after a kill before that, we begin again
        part = path.with_name(path.name + ending)
        if part.exists():
            atomic.rename(part, damaged.with_name(damaged.name + ending))
    return damaged


def read_events(path: Path | str, kinds: Sequence[type] = ()) -> list[Event]:
    """Return the events of a ledger without writers, such as one fetched by `down`; of `kinds` alone, if given."""
    path = Path(path)
    if not path.is_file():
        raise SpotfleetError(f"{path}: there is no ledger", hint="`spotfleet status` lists the fleets that exist")
    db = _open(path, f"{path.resolve().as_uri()}?mode=ro")
    try:
        with _explained(path):
            if not db.execute("PRAGMA user_version").fetchone()[0]:
                return []
        return [event for _, event in _read(db, path, kinds=tuple(kind.__name__ for kind in kinds))]
    finally:
        db.close()


def _create_private(path: Path) -> None:
    """Create the file with mode 0600, which sqlite also gives the files beside it. An existing one is never opened
    here: closing it would end the locks that sqlite holds on it in this process."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pass  # it exists, or sqlite reports the error


def _write_ahead(db: sqlite3.Connection) -> None:
    """Switch to a write-ahead log. Retries while another process switches too, because sqlite does not wait then."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.01)


def _open(path: Path, target: str) -> sqlite3.Connection:
    """Connect to a file that is empty or a ledger of this schema. Transactions are explicit."""
    with _explained(path):
        db = sqlite3.connect(target, timeout=BUSY_S, isolation_level=None, check_same_thread=False,
                             uri=target.startswith("file:"))
    try:
        with _explained(path):
            db.execute("BEGIN")  # one consistent read: another process may just be creating it
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            version = db.execute("PRAGMA user_version").fetchone()[0]
            owner = db.execute("PRAGMA application_id").fetchone()[0]
            db.execute("COMMIT")
        if (tables or version or owner) and owner != APPLICATION:
            raise LedgerDamaged(f"{path} is a database of another program, not a ledger",
                                hint="move it away, or give another path")
        if version not in (0, SCHEMA):
            raise OtherSchema(f"{path} was written with ledger schema {version}; this spotfleet reads {SCHEMA}",
                              hint="use the spotfleet release that wrote it, or a newer one; or move it away: a new "
                                   "one is begun from what the cloud lists")
    except BaseException:
        db.close()
        raise
    return db


def _read(db: sqlite3.Connection, path: Path, after: int = 0, limit: int = -1,
          kinds: tuple[str, ...] = ()) -> list[tuple[int, Event]]:
    alone = f" AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
    with _explained(path):
        rows = db.execute(f"SELECT seq, body FROM events WHERE seq > ?{alone} ORDER BY seq LIMIT ?",
                          (after, *kinds, limit)).fetchall()
    events = []
    for seq, body in rows:
        try:
            data = json.loads(body)
        except (ValueError, TypeError) as error:
            raise _damaged(path, f"event {seq} is no JSON: {error}") from None
        try:
            events.append((seq, event_from_json(data)))
        except ValueError as error:
            raise SpotfleetError(f"{path}: event {seq} cannot be read: {error}",
                                 hint="use the spotfleet release that wrote this ledger, or a newer one") from None
    return events


def _without_wal(image: bytes) -> bytes:
    """Mark the copy as having no write-ahead log: 1 in bytes 18 and 19 of the header."""
    return image[:18] + b"\x01\x01" + image[20:]


def _damaged(path: Path, what: str) -> LedgerDamaged:
    return LedgerDamaged(f"{path} is damaged: {what}",
                         hint="move it away: a new one is begun from what the cloud lists; the bill lacks what was "
                              "before")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Translate sqlite's errors about `path` into ours."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # our bug, such as a closed ledger
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in NO_ROOM:
            raise DiskFull(f"{path} cannot be written: {error}", hint="make room on its disk") from error
        if code in DAMAGED:
            raise _damaged(path, str(error)) from error
        raise SpotfleetError(f"{path}: {error}", hint="check that it is a ledger, that the disk has room "
                             "and that you may write there") from error
