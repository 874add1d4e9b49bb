"""Home directory SPOTFLEET_HOME: this machine's files about each fleet.

    fleets/NAME/fleet.json      spec and progress of the fleet; never a secret
    fleets/NAME/keys.json       mode 0600: tokens, fleet secret, TLS key, SSH key, the user's secrets, the webhook
    fleets/NAME/ca.pem          the certificate authority that the CLI trusts
    fleets/NAME/names.json      hosts and jobs as of the last `status` or `train`, for completion in the shell
    fleets/NAME/ledger.db       every event of the dispatcher's machine
    fleets/NAME/.archive.part/  results that a `down` is fetching (`storage/mirror.py`); the next one goes on with it
    fleets/NAME/fetched/        results that `down` has fetched; becomes archive/ once the machines are gone
    fleets/NAME/archive/        results: fetched by `down`, or stored by a fleet that ended itself
    fleets/NAME/ssh/            files for OpenSSH, with the fleet's key: config, known hosts
    fleets/NAME/prometheus/     a token that opens the metrics alone, once `spotfleet metrics --prometheus` was typed
    fleets/NAME.lock            locked by the one command that is changing the fleet, with its pid
    fleets/NAME.down            locked by a running `down`, with its pid: a running `up` stops
    old/NAME-TIME-RANDOM/       an ended fleet whose name is used again
    catalog/, cache/, local/    prices, digests of sent files (`api/lifecycle/upload.py`), the emulated cloud
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spotfleet.codec import from_json, to_json
from spotfleet.errors import NoSuchFleet, SpotfleetError, UsageError
from spotfleet.model import FleetSpec
from spotfleet.storage import atomic, locks, private

LOCK_WAIT_S = 5.0  # another command may be about to end
YIELD_S = 120.0  # for an `up` to notice that a `down` was started: it checks between two calls of the provider
REPORT_AFTER_S = 0.5  # a longer wait is reported, with the command that is waited for
SHOWN_ENDED = 5  # ended fleets that are named where none lives
FIRST_DOWN_S = 1200.0  # longest wait of a second `down` for the first, whose own waits are shorter


class Busy(SpotfleetError):
    """Error: another command has locked the fleet, or a `down` is running."""


@dataclass(frozen=True)
class FleetRecord:
    """Content of fleet.json."""

    spec: FleetSpec
    cloud_name: str  # its name at the provider: NAME, or NAME-XXXX with four hex digits, as always in a cloud (`up`)
    made_at: float
    provider_config: dict[str, Any] = field(default_factory=dict)  # only the provider's plugin reads it
    url: str = ""  # the dispatcher's, as last known; empty while it has none
    reached: bool = False  # its dispatcher has answered once: there may be results to fetch
    shut: tuple[str, ...] = ()  # machines over SSH, by name, that never accepted the fleet's key
    met: tuple[str, ...] = ()  # machines that only a discovery script has named, at any `up`, and that accepted the key
    down_at: float = 0.0  # when the provider listed nothing any more; 0 while it does


@dataclass(frozen=True)
class Keys:
    """Content of keys.json."""

    admin_token: str = field(repr=False)
    fleet_secret: str = field(repr=False)
    cert: str
    key: str = field(repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    ssh_private: str = field(default="", repr=False)  # OpenSSH's format, ed25519: the fleet's own
    webhook: str = field(default="", repr=False)  # URL of `notify`
    ssh_public: str = ""  # "ssh-ed25519 AAAA... spotfleet:FLEET"


class FleetDirDamaged(SpotfleetError):
    """Error: a fleet's folder is damaged; `attach` can make it again from the cloud."""


class FleetDir:
    """Folder of one fleet. `record` is read from disk each time: other commands change it too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @property
    def exists(self) -> bool:
        return (self.path / "fleet.json").exists()

    @property
    def record(self) -> FleetRecord:
        try:
            return from_json(FleetRecord, json.loads((self.path / "fleet.json").read_text()))
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

    def _unreadable(self, name: str, error: Exception) -> FleetDirDamaged:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        return FleetDirDamaged(f"{self.path / name} {what}",
                               hint=f"if the fleet lives, `spotfleet attach {self.name}` makes its folder anew from "
                                    "what the cloud knows; if another version of spotfleet wrote it, use that one")

    @property
    def readable(self) -> bool:
        """Whether record, keys and ca.pem can be read. Raises NoSuchFleet without fleet.json."""
        try:
            return self.record is not None and self.keys is not None and bool(self.ca)
        except FleetDirDamaged:
            return False

    @property
    def is_down(self) -> bool:
        """Whether fleet.json says that the fleet has ended; False for a damaged folder, whose fleet may still run."""
        try:
            return bool(self.record.down_at)
        except FleetDirDamaged:
            return False

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def archive(self) -> Path:
        return self.path / "archive"

    @property
    def fetched(self) -> Path:
        """Folder of the results that `down` has fetched; becomes `archive` once the fleet's machines are gone."""
        return self.path / "fetched"

    def make(self, record: FleetRecord, keys: Keys, ca: str) -> None:
        """Create the folder of a new fleet atomically. `Home.sweep` removes the draft of a killed `up`."""
        made = FleetDir(self.path.with_name(f".{self.name}.{os.getpid()}"))
        atomic.make_folder(made.path)
        made.save_keys(keys)
        write_whole(made.path / "ca.pem", ca)
        made.save(record)
        atomic.rename(made.path, self.path)

    def save_keys(self, keys: Keys) -> None:
        write_whole(self.path / "keys.json", json.dumps(to_json(keys)))

    def forget_secrets(self) -> None:
        """Delete the user's secrets and the private SSH key: nothing needs them once the fleet is down."""
        self.save_keys(replace(self.keys, secrets={}, ssh_private="", webhook=""))

    def save(self, record: FleetRecord) -> None:
        write_whole(self.path / "fleet.json", json.dumps(to_json(record), indent=1))

    def update(self, **changes: object) -> FleetRecord:
        """Save the record with `changes`. Outside `locked`, the change of another command in between may be lost."""
        record = replace(self.record, **changes)
        self.save(record)
        return record

    def remember_names(self, hosts: Iterable[str], jobs: Iterable[str]) -> None:
        """Save the names that the shell completes, if they have changed. `cli/completion.py` reads them."""
        path, text = self.path / "names.json", json.dumps({"hosts": list(hosts), "jobs": list(jobs)})
        with suppress(OSError):  # a convenience: a full disk must not hide the status
            if not path.exists() or path.read_text() != text:
                atomic.write(path, text, sync=False)

    @contextmanager
    def locked(self, wait_s: float | None = None, waiting: Callable[[str], None] = lambda _line: None,
               ) -> Iterator[None]:
        """Lock the fleet against other changing commands. The lock ends with the process that holds it. Raises Busy."""
        with _held(self._lock(".lock"), LOCK_WAIT_S if wait_s is None else wait_s, waiting) as holder:
            if holder:
                raise Busy(f"another spotfleet command (process {holder}) is changing fleet '{self.name}'",
                           hint="wait for it, or interrupt it")
            self._sweep()
            yield

    @contextmanager
    def locked_for_down(self, waiting: Callable[[str], None]) -> Iterator[None]:
        """Lock the fleet for `down`. A running `up` stops at its next step; a second `down` waits."""
        with _held(self._lock(".down"), FIRST_DOWN_S, waiting) as holder:
            if holder:
                raise Busy(f"another `spotfleet down` (process {holder}) is taking fleet '{self.name}' down",
                           hint="wait for it, or interrupt it")
            with self.locked(YIELD_S, waiting):
                yield

    def raise_if_going_down(self) -> None:
        """Raise Busy while a `down` is running: it has priority over `up`."""
        with private.open_file(self._lock(".down"), "a+") as file:
            if not locks.take(file, shared=True):  # shared, so that two checks do not block each other
                raise Busy(f"stopped: `spotfleet down` was asked by process {locks.signature(file)}, and takes fleet "
                           f"'{self.name}' down", hint="once it has ended, `spotfleet up FILE` makes the fleet anew")

    def _lock(self, ending: str) -> Path:
        atomic.make_folder(self.path.parent)
        return self.path.with_name(self.name + ending)

    def _sweep(self) -> None:
        """Remove the drafts of killed commands: they may hold keys."""
        for part in self.path.glob(".*.*.[0-9]*"):
            if not _lives(int(part.name.rpartition(".")[2])):
                part.unlink(missing_ok=True)


class Home:
    """Directory SPOTFLEET_HOME with the folders of all fleets."""

    def __init__(self, path: Path | str | None = None) -> None:
        chosen = path or os.environ.get("SPOTFLEET_HOME") or "~/.spotfleet"
        self.path = Path(chosen).expanduser().absolute()
        there = next(p for p in (self.path, *self.path.parents) if p.exists())
        if not there.is_dir():  # else it would be taken for a home without fleets
            raise UsageError(f"SPOTFLEET_HOME is {self.path}, and {there} is no folder",
                             hint="set SPOTFLEET_HOME to a folder, or unset it for ~/.spotfleet")
        private.check_home(self.path)

    def folder(self, name: str) -> FleetDir:
        return FleetDir(self.path / "fleets" / name)

    def fleets(self) -> list[FleetDir]:
        """Return all fleets by name, ended ones too."""
        return [FleetDir(p.parent) for p in sorted((self.path / "fleets").glob("[!.]*/fleet.json"))]

    def old_fleets(self) -> list[FleetDir]:
        """Return the ended fleets whose name was used again, by name and time."""
        return [FleetDir(p.parent) for p in sorted((self.path / "old").glob("[!.]*/fleet.json"))]

    def living(self) -> list[FleetDir]:
        """Return the fleets that are not recorded as down."""
        return [f for f in self.fleets() if not f.is_down]

    def find(self, name: str) -> FleetDir:
        """Return the fleet of that name, also of the name that an ended one got when its own was used again; for "" the
        only living one, or if none lives the only ended one.

        Raises NoSuchFleet; UsageError if there are several.
        """
        self.sweep()
        fleets = self.fleets()
        if name:
            ended = (f for f in self.old_fleets() if f.is_down)
            return next((f for f in (*fleets, *ended) if f.name == name), None) or self._unknown(name, fleets)
        if not fleets:
            raise NoSuchFleet("there is no fleet", hint="`spotfleet up FILE` makes one")
        live = self.living()
        if len(live or fleets) > 1:
            raise UsageError("there are several fleets; say which one" if live else
                             "no fleet is up, and several have been; say which one",
                             hint=_how_to_name(live or newest(fleets), len(live or fleets), up=not live))
        return (live or fleets)[0]

    def sweep(self) -> None:
        """Remove the drafts of fleets that killed commands left: they hold keys, and no machine was launched yet."""
        for part in (self.path / "fleets").glob(".*.[0-9]*"):
            if not _lives(int(part.name.rpartition(".")[2])):
                shutil.rmtree(part, ignore_errors=True)

    def move_to_old(self, folder: FleetDir) -> FleetDir:
        """Move an ended fleet to `old/`, so that its name is free; its new name is the returned folder's."""
        made_at = folder.record.made_at if folder.readable else time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(made_at))
        target = self.path / "old" / f"{folder.name}-{stamp}-{secrets.token_hex(2)}"
        atomic.make_folder(target.parent)
        atomic.rename(folder.path, target)
        return FleetDir(target)

    def _unknown(self, name: str, fleets: list[FleetDir]) -> FleetDir:
        there = f"there are: {_named(self.living() or newest(fleets), len(fleets))}"
        raise NoSuchFleet(f"there is no fleet '{name}'", hint=there if fleets else "`spotfleet up FILE` makes one")


def _held(path: Path, wait_s: float, waiting: Callable[[str], None]) -> AbstractContextManager[str]:
    """Hold the lock on `path` while the body runs. Yields "", or the holder's signature if it is still locked after
    `wait_s`. `waiting` receives a line with the holder's pid."""
    reported = ""

    def report_wait(holder: str, waited_s: float) -> None:
        nonlocal reported
        if waited_s >= REPORT_AFTER_S and holder != reported:
            waiting(f"waiting for another spotfleet command (process {holder}) to stop")
            reported = holder

    return locks.signed(path, wait_s, report_wait)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_whole(path: Path, text: str) -> None:
    """Replace `path`, mode 0600, durably; after a crash it holds the old or the new text."""
    atomic.write(path, text, draft=path.with_name(f".{path.name}.{os.getpid()}"))


def newest(fleets: list[FleetDir]) -> list[FleetDir]:
    """Return the SHOWN_ENDED fleets that were changed last, by name: each `horovodrun` leaves one that has ended."""
    by_time = sorted(fleets, key=lambda f: (f.path / "fleet.json").stat().st_mtime)
    return sorted(by_time[-SHOWN_ENDED:], key=lambda f: f.name)


def _named(shown: list[FleetDir], count: int) -> str:
    more = f" and {count - len(shown)} more, see `spotfleet status --all`" if count > len(shown) else ""
    return ", ".join(f.name for f in shown) + more


def _how_to_name(shown: list[FleetDir], count: int, up: bool) -> str:
    """Return how a command names one of `count` fleets. `up`: none of them lives, so that one may be wanted first."""
    first, name = "`spotfleet up FILE` makes one; " if up else "", shown[0].name
    return (f"{first}name it, as in `spotfleet status {name}` or `spotfleet logs -c {name}`; "
            f"one of: {_named(shown, count)}")
