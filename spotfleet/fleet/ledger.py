"""The fleet's memory: an append-only sqlite file of events. Nothing in it is ever changed.

A file that is damaged raises Damaged and is left as it is; `open_sound` keeps it aside and begins a new ledger, which
says so: what the cloud lists and what agents hold is then taken up again by whoever uses it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spotfleet.errors import DiskFull, SpotfleetError
from spotfleet.fleet.events import Event, HistoryLost, event_from_json, event_to_json
from spotfleet.fleet.fold import FleetState, apply

SCHEMA = 1  # PRAGMA user_version
APPLICATION = 0x5F0F1EE7  # PRAGMA application_id: tells our files from other people's
BUSY_S = 10.0  # how long a writer waits for another process's transaction

NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # primary codes; room may come back, and a disk too
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

CREATE = """
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL
)
"""


class Damaged(SpotfleetError):
    """The file cannot be read as a ledger of this release: it is set aside, or moved away by a person."""


class OtherSchema(SpotfleetError):
    """Written by another release. A person with that release can read it."""


class Ledger:
    """May be used from several threads, and opened by several processes at once.

    What `append` returned from survives a power failure: write-ahead log, synchronous FULL.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._state = FleetState()
        self._folded = 0  # sequence number up to which `_state` holds
        self.path.parent.mkdir(parents=True, exist_ok=True)
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
        """Write all of `events` or, when killed meanwhile, none. Returns the last sequence number."""
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
        """The events with a sequence number above `after`, in order; at most `limit` if that is given."""
        with self._lock:
            return _read(self._db, self.path, after, limit)

    def state(self) -> FleetState:
        """All events folded; costs only those written since the last call, by whichever process."""
        with self._lock:
            for seq, event in _read(self._db, self.path, self._folded):
                self._state, self._folded = apply(self._state, event), seq
            return self._state

    def check(self) -> None:
        """Read all of it; Damaged if that is not possible."""
        with self._lock, _explained(self.path):
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise _damaged(self.path, found)
        self.events()

    def copy_to(self, path: Path | str) -> None:
        """A consistent copy in one file, without a write-ahead log beside it; replaces `path`."""
        target = Path(path)
        target.unlink(missing_ok=True)
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            with self._lock, _explained(self.path):
                self._db.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
        finally:
            copy.close()

    def copy_of(self) -> bytes:
        """As `copy_to`, in memory: for a disk that is full."""
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


def problem(path: Path) -> Damaged | OtherSchema | None:
    """What is wrong with the ledger at `path`; None if it can be gone on with."""
    ledger: Ledger | None = None
    try:
        ledger = Ledger(path)
        ledger.check()
    except (Damaged, OtherSchema) as error:
        return error
    finally:
        if ledger is not None:
            ledger.close()
    return None


def open_sound(path: Path) -> tuple[Ledger, str]:
    """A ledger to go on with, and what was wrong with the one that was there: "" if nothing was.

    A damaged one is kept beside it as PATH.corrupt-TIME; a new one begins with what happened to it.
    """
    found = problem(path)
    if found is None:
        return Ledger(path), ""
    if isinstance(found, OtherSchema):
        raise found
    aside = set_aside(path)
    fresh = Ledger(path)
    fresh.append(HistoryLost(time.time(), aside.name, str(found)))
    return fresh, f"{found}; it is kept as {aside.name}, and a new one is begun"


def set_aside(path: Path) -> Path:
    """Keep the damaged ledger under another name, with what sqlite keeps beside it."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    aside = path.with_name(f"{path.name}.corrupt-{stamp}")
    for ending in ("-wal", "-shm", ""):  # the ledger last: killed before, we begin again
        part = path.with_name(path.name + ending)
        if part.exists():
            part.rename(aside.with_name(aside.name + ending))
    return aside


def read_events(path: Path | str) -> list[Event]:
    """The events of a ledger that nobody writes to any more, such as one that came home."""
    path = Path(path)
    if not path.is_file():
        raise SpotfleetError(f"{path}: there is no ledger", hint="`spotfleet status` lists the fleets that exist")
    db = _open(path, f"{path.resolve().as_uri()}?mode=ro")
    try:
        with _explained(path):
            if not db.execute("PRAGMA user_version").fetchone()[0]:
                return []
        return [event for _, event in _read(db, path)]
    finally:
        db.close()


def _write_ahead(db: sqlite3.Connection) -> None:
    """Switch to a write-ahead log. Where another process does so too, sqlite does not wait by itself."""
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
    """A connection to a file that is empty or a ledger of this schema; transactions are explicit."""
    with _explained(path):
        db = sqlite3.connect(target, timeout=BUSY_S, isolation_level=None, check_same_thread=False,
                             uri=target.startswith("file:"))
    try:
        with _explained(path):
            db.execute("BEGIN")  # one look: another process may be just making it
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            version = db.execute("PRAGMA user_version").fetchone()[0]
            owner = db.execute("PRAGMA application_id").fetchone()[0]
            db.execute("COMMIT")
        if (tables or version or owner) and owner != APPLICATION:
            raise Damaged(f"{path} is a database of another program, not a ledger",
                          hint="move it away, or give another path")
        if version not in (0, SCHEMA):
            raise OtherSchema(f"{path} was written with ledger schema {version}; this spotfleet reads {SCHEMA}",
                              hint="use the spotfleet release that wrote it, or a newer one; or move it away: a new "
                                   "one is begun from what the cloud lists")
    except BaseException:
        db.close()
        raise
    return db


def _read(db: sqlite3.Connection, path: Path, after: int = 0, limit: int = -1) -> list[tuple[int, Event]]:
    with _explained(path):
        rows = db.execute("SELECT seq, body FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)).fetchall()
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
    """Bytes 18 and 19 of the header tell readers to look for a write-ahead log; 1 is none."""
    return image[:18] + b"\x01\x01" + image[20:]


def _damaged(path: Path, what: str) -> Damaged:
    return Damaged(f"{path} is damaged: {what}",
                   hint="move it away: a new one is begun from what the cloud lists; the bill lacks what was before")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns sqlite's errors about `path` into ours."""
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
