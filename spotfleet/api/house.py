"""SPOTFLEET_HOME: what this machine remembers about each fleet.

    fleets/NAME/fleet.json      spec and progress of the fleet; never a secret
    fleets/NAME/keys.json       mode 0600: tokens, the dispatcher's key, the user's secrets
    fleets/NAME/ca.pem          what the CLI trusts
    fleets/NAME/ledger.db       everything that happened to the dispatcher's machine
    fleets/NAME/archive/        brought home by `down`, or left there by an autostop
    fleets/NAME.lock            held by the one command that changes the fleet now, with its pid
    fleets/NAME.down            held by the `down` at work, with its pid: the others give way to it
    old/NAME-TIME/              an ended fleet whose name is used again
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from spotfleet.codec import from_json, to_json
from spotfleet.errors import NoSuchFleet, SpotfleetError, UsageError
from spotfleet.model import FleetSpec

LOCK_WAIT_S = 5.0  # another command may be about to end
YIELD_S = 120.0  # for an `up` to see that a `down` was asked: it looks between two calls of the provider
TELL_S = 0.5  # whoever waits for longer is told for whom
FIRST_DOWN_S = 1200.0  # for another `down` to end, whose own waits are shorter


class Busy(SpotfleetError):
    """Another command holds the fleet, or a `down` is asked of it."""


@dataclass(frozen=True)
class Record:
    """fleet.json."""

    spec: FleetSpec
    cloud_name: str  # under which the provider knows it: its name, or with digits of its own (`up`)
    made_at: float
    provider_config: dict[str, str] = field(default_factory=dict)
    url: str = ""  # of the dispatcher, as last known; empty while it has none
    reached: bool = False  # its dispatcher has answered once: there may be something to bring home
    shut: tuple[str, ...] = ()  # machines over SSH, by name, that have never let the fleet's key in
    met: tuple[str, ...] = ()  # hosts that a discovery script has named and that let it in: it may name them no more
    down_at: float = 0.0  # when the provider listed nothing any more; 0 while it does


@dataclass(frozen=True)
class Keys:
    """keys.json."""

    admin_token: str = field(repr=False)
    fleet_secret: str = field(repr=False)
    cert: str
    key: str = field(repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    ssh_private: str = field(default="", repr=False)  # OpenSSH's format, ed25519: the fleet's own
    ssh_public: str = ""  # "ssh-ed25519 AAAA... spotfleet:FLEET"


class Unreadable(SpotfleetError):
    """A fleet's folder is damaged; the cloud knows enough to make another."""


class Folder:
    """One fleet's folder. `record` is read anew each time: other commands change it too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @property
    def exists(self) -> bool:
        return (self.path / "fleet.json").exists()

    @property
    def record(self) -> Record:
        try:
            return from_json(Record, json.loads((self.path / "fleet.json").read_text()))
        except FileNotFoundError:
            raise NoSuchFleet(f"there is no fleet '{self.name}'", hint="`spotfleet up FILE` makes one") from None
        except ValueError as error:
            raise self._unreadable("fleet.json", error) from None

    @property
    def keys(self) -> Keys:
        try:
            return from_json(Keys, json.loads((self.path / "keys.json").read_text()))
        except (FileNotFoundError, ValueError) as error:
            raise self._unreadable("keys.json", error) from None

    @property
    def ca(self) -> str:
        try:
            text = (self.path / "ca.pem").read_text()
            ssl.PEM_cert_to_DER_cert(text)
        except (FileNotFoundError, ValueError) as error:
            raise self._unreadable("ca.pem", error) from None
        return text

    def _unreadable(self, name: str, error: Exception) -> Unreadable:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        return Unreadable(f"{self.path / name} {what}",
                          hint=f"if the fleet lives, `spotfleet attach {self.name}` makes its folder anew from what "
                               "the cloud knows; if another version of spotfleet wrote it, use that one")

    @property
    def readable(self) -> bool:
        """False for a fleet that is here and whose folder is damaged."""
        try:
            return self.record is not None and self.keys is not None and bool(self.ca)
        except Unreadable:
            return False

    @property
    def is_down(self) -> bool:
        """As far as we know; one whose folder is damaged may live."""
        try:
            return bool(self.record.down_at)
        except Unreadable:
            return False

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def archive(self) -> Path:
        return self.path / "archive"

    @property
    def fetched(self) -> Path:
        """What `down` has fetched, until the fleet's machines are gone and it becomes `archive`."""
        return self.path / "fetched"

    def make(self, record: Record, keys: Keys, ca: str) -> None:
        """The folder of a new fleet, whole or not at all: `House.sweep` removes what a killed `up` was making."""
        made = Folder(self.path.with_name(f".{self.name}.{os.getpid()}"))
        made.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        made.save_keys(keys)
        write_whole(made.path / "ca.pem", ca)
        made.save(record)
        made.path.rename(self.path)

    def save_keys(self, keys: Keys) -> None:
        write_whole(self.path / "keys.json", json.dumps(to_json(keys)))

    def forget_secrets(self) -> None:
        """The user's, and the key that opened the machines, which nothing needs once the fleet is down."""
        self.save_keys(replace(self.keys, secrets={}, ssh_private=""))

    def save(self, record: Record) -> None:
        write_whole(self.path / "fleet.json", json.dumps(to_json(record), indent=1))

    def update(self, **changes: object) -> Record:
        record = replace(self.record, **changes)
        self.save(record)
        return record

    @contextmanager
    def locked(self, wait_s: float | None = None, waiting: Callable[[str], None] = lambda _line: None,
               ) -> Iterator[None]:
        """Only one command at a time changes a fleet. The lock ends with the process that holds it. Raises Busy."""
        with _held(self._lock(".lock"), LOCK_WAIT_S if wait_s is None else wait_s, waiting) as holder:
            if holder:
                raise Busy(f"another spotfleet command (process {holder}) is changing fleet '{self.name}'",
                           hint="wait for it, or interrupt it")
            self._sweep()
            yield

    @contextmanager
    def wound_up(self, waiting: Callable[[str], None]) -> Iterator[None]:
        """For `down`, to which other commands give way: they stop at their next step. A second `down` waits."""
        with _held(self._lock(".down"), FIRST_DOWN_S, waiting) as holder:
            if holder:
                raise Busy(f"another `spotfleet down` (process {holder}) is taking fleet '{self.name}' down",
                           hint="wait for it, or interrupt it")
            with self.locked(YIELD_S, waiting):
                yield

    def give_way(self) -> None:
        """Raise Busy while a `down` is at work: it wins over whatever else is going on."""
        with self._lock(".down").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who only ask do not meet each other
            except BlockingIOError:
                raise Busy(f"stopped: `spotfleet down` was asked by process {_holder(file)}, and takes fleet "
                           f"'{self.name}' down", hint="once it has ended, `spotfleet up FILE` makes the fleet anew",
                           ) from None

    def _lock(self, ending: str) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.path.with_name(self.name + ending)

    def _sweep(self) -> None:
        """Remove what a killed command was just writing: it may hold keys."""
        for part in self.path.glob(".*.*.[0-9]*"):
            if not _lives(int(part.name.rpartition(".")[2])):
                part.unlink(missing_ok=True)


class House:
    def __init__(self, path: Path | str | None = None) -> None:
        chosen = path or os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet"
        self.path = Path(chosen).expanduser().absolute()
        there = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not there.is_dir():  # else it would look like a home where no fleet has been
            raise UsageError(f"SPOTFLEET_HOME is {self.path}, and {there} is no folder",
                             hint="set SPOTFLEET_HOME to a folder, or unset it for ~/.spotfleet")

    def folder(self, name: str) -> Folder:
        return Folder(self.path / "fleets" / name)

    def fleets(self) -> list[Folder]:
        """All fleets, by name, those that are down too."""
        return [Folder(p.parent) for p in sorted((self.path / "fleets").glob("[!.]*/fleet.json"))]

    def old(self) -> list[Folder]:
        """Ended fleets whose name was used again, by name and time."""
        return [Folder(p.parent) for p in sorted((self.path / "old").glob("[!.]*/fleet.json"))]

    def living(self) -> list[Folder]:
        """Those that are not down, as far as we know."""
        return [f for f in self.fleets() if not f.is_down]

    def find(self, name: str) -> Folder:
        """The fleet of that name, or the only one there is. Raises NoSuchFleet; UsageError when there are several."""
        self.sweep()
        fleets = self.fleets()
        if name:
            return next((f for f in fleets if f.name == name), None) or self._unknown(name, fleets)
        if not fleets:
            raise NoSuchFleet("there is no fleet", hint="`spotfleet up FILE` makes one")
        live = self.living()
        if len(live or fleets) > 1:
            raise UsageError("there are several fleets; say which one" if live else
                             "no fleet is up, and several have been; say which one",
                             hint=f"one of: {', '.join(f.name for f in live or fleets)}")
        return (live or fleets)[0]

    def sweep(self) -> None:
        """Remove the fleets that killed commands were just making: they hold keys, and no machine was launched yet."""
        for part in (self.path / "fleets").glob(".*.[0-9]*"):
            if not _lives(int(part.name.rpartition(".")[2])):
                shutil.rmtree(part, ignore_errors=True)

    def put_away(self, folder: Folder) -> None:
        """Keep an ended fleet under `old/`, so that its name is free."""
        made_at = folder.record.made_at if folder.readable else time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(made_at))
        target = self.path / "old" / f"{folder.name}-{stamp}-{secrets.token_hex(2)}"
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.path.rename(target)

    def _unknown(self, name: str, fleets: list[Folder]) -> Folder:
        there = f"there are: {', '.join(f.name for f in fleets)}" if fleets else "`spotfleet up FILE` makes one"
        raise NoSuchFleet(f"there is no fleet '{name}'", hint=there)


@contextmanager
def _held(path: Path, wait_s: float, waiting: Callable[[str], None]) -> Iterator[str]:
    """The lock on `path` as long as the body runs: "" then, or who has it after `wait_s`. Says whom it waits for."""
    begun, told = time.monotonic(), ""
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder, waited_s = _holder(file), time.monotonic() - begun
                if waited_s >= wait_s:
                    yield holder
                    return
                if waited_s >= TELL_S and holder != told:
                    waiting(f"waiting for another spotfleet command (process {holder}) to stop")
                    told = holder
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield ""


def _holder(file: TextIO) -> str:
    """The process that has locked this file."""
    file.seek(0)
    return file.read().strip() or "unknown"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, text: str) -> None:
    """Replace `path`, mode 0600; after a crash it holds the old or the new text."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
