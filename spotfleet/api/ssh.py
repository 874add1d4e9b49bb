"""The ways into a fleet's machines, as its provider lists them, on the laptop's disk.

    fleets/NAME/ssh/ways.json       who is who: aliases, host, door
    fleets/NAME/ssh/config          the same for OpenSSH, included at the top of ~/.ssh/config
    fleets/NAME/ssh/known_hosts     the pinned keys
    fleets/NAME/ssh/id_ed25519      the fleet's own key, mode 0600

FLEET is the dispatcher's machine, FLEET-w0, FLEET-w1 ... the living workers in the order of their launch, and each has
its own name too. `refresh` writes all of it, and closes the tunnels that lead elsewhere; `remove` takes it away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from spotfleet.api.house import Folder, write_whole
from spotfleet.codec import from_json, to_json
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role, SshDoor
from spotfleet.ssh import include, openssh
from spotfleet.ssh.config import Entry, Files, config_text, known_hosts_text
from spotfleet.ssh.tunnel import NotConnected, Tunnel

BELOW = "*/ssh/config"  # under `fleets`: no folder that is being made, whose name begins with a dot
LOCALLY = "127.0.0.1"
FOLLOW_S = 15.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Way:
    """How one machine is entered."""

    aliases: tuple[str, ...]  # the last is the host's own name
    host: str
    role: str
    door: SshDoor
    address: str = ""
    port: int = 0  # where a dispatcher listens


@dataclass(frozen=True)
class Ways:
    ways: tuple[Way, ...] = ()

    @property
    def workers(self) -> list[Way]:
        return [w for w in self.ways if w.role == Role.WORKER.value]

    def find(self, name: str) -> Way | None:
        """By alias, host or address."""
        return next((w for w in self.ways if name in w.aliases), None) or next(
            (w for w in self.ways if name in (w.address, w.door.address)), None)


def ways_of(fleet: str, listed: Sequence[CloudHost], others: Sequence[str] = ()) -> Ways:
    """Those that live and have a door: the dispatcher's first, then workers as launched. `others` are names of other
    fleets, which no alias takes."""
    living = [h for h in listed if h.ssh is not None and h.state is not CloudState.TERMINATED]
    dispatchers = sorted((h for h in living if h.role is Role.DISPATCHER), key=_rank, reverse=True)
    workers = sorted((h for h in living if h.role is Role.WORKER), key=_launched)
    named = [(fleet if i == 0 else "", h) for i, h in enumerate(dispatchers)]
    named += [(f"{fleet}-w{i}", h) for i, h in enumerate(workers)]
    return Ways(tuple(
        Way(aliases, h.request_id, h.role.value, h.ssh, h.address, h.port) for alias, h in named
        if h.ssh and (aliases := tuple(dict.fromkeys(a for a in (alias, h.request_id) if a and a not in others)))))


def _launched(host: CloudHost) -> tuple[float, float, str]:
    """In the order of the intents: hosts that are launched together begin in any order."""
    number = re.search(r"\d+$", host.request_id)
    since = host.runs[0].started_at if host.runs else float("inf")
    return float(number[0]) if number else 0.0, since, host.request_id


def _rank(host: CloudHost) -> tuple[bool, tuple[float, float, str]]:
    """The newest one that runs comes out highest."""
    return host.state is CloudState.RUNNING, _launched(host)


# --- on disk


def refresh(folder: Folder, listed: Sequence[CloudHost], progress: Progress = lambda _line: None) -> Ways:
    """Write the ways into the machines that the provider has `listed`. A user's ssh config that cannot be changed is
    told about, and no error."""
    keys, before = folder.keys, known(folder)
    ways = ways_of(folder.name, listed, _others(folder))
    if not keys.ssh_private or not (ways.ways or before.ways):
        return ways
    place = _place(folder)
    place.mkdir(mode=0o700, exist_ok=True)
    entries = [Entry(w.aliases, w.host, w.door) for w in ways.ways]
    files = Files(str(place / "id_ed25519"), str(place / "known_hosts"))
    _write(place / "id_ed25519", keys.ssh_private)
    _write(place / "known_hosts", known_hosts_text(entries))
    _write(place / "config", config_text(folder.name, entries, files, openssh.version()))
    _write(place / "ways.json", json.dumps(to_json(ways), indent=1))
    for way in before.ways:
        if way.role == Role.DISPATCHER.value and way not in ways.ways:
            _close(folder, way, progress)
    _include(folder, progress)
    return ways


def follow(folder: Folder, workers: Collection[str], listed: Callable[[], Sequence[CloudHost]]) -> None:
    """Write the ways anew if these are other worker hosts than those that are known, so that plain `ssh FLEET-w0` finds
    them too; at most once in FOLLOW_S, since a listing asks every machine."""
    ways = known(folder)
    if not ways.ways or {w.host for w in ways.workers} == set(workers):
        return
    written = _place(folder) / "ways.json"
    with suppress(SpotfleetError, OSError):  # whoever enters a machine asks again, and is told why not
        if time.time() - written.stat().st_mtime >= FOLLOW_S:
            os.utime(written)
            refresh(folder, listed())


def remove(folder: Folder, progress: Progress = lambda _line: None) -> None:
    """End the tunnel, and leave nothing of the fleet in the user's ssh config nor here. Idempotent."""
    for way in known(folder).ways:
        if way.role == Role.DISPATCHER.value:
            _close(folder, way, progress)
    shutil.rmtree(_place(folder), ignore_errors=True)
    try:
        include.remove(_spot(folder), folder.path.parent, BELOW)
    except OSError as error:
        progress(f"note: {_user_config()} still includes {folder.path.parent}/{BELOW}: {error}; remove that line")
    openssh.leave(folder.path.parent.parent)


def known(folder: Folder) -> Ways:
    """As last written; none where nothing was, or by another version."""
    try:
        return from_json(Ways, json.loads((_place(folder) / "ways.json").read_text()))
    except (FileNotFoundError, ValueError):
        return Ways()


def config(folder: Folder) -> Path:
    return _place(folder) / "config"


def included(folder: Folder) -> bool:
    """Does plain `ssh FLEET` know the fleet?"""
    try:
        return _spot(folder).line in _user_config().read_bytes().splitlines()
    except OSError:
        return False


def _close(folder: Folder, way: Way, progress: Progress) -> None:
    try:
        tunnel(folder, way).close()
    except OSError as error:
        progress(f"note: the connection to {way.host} could not be closed ({error}); it ends by itself when idle")


def _include(folder: Folder, progress: Progress) -> None:
    try:
        include.add(_spot(folder))
    except OSError as error:
        progress(f"note: plain `ssh {folder.name}` will not work, since {_user_config()} cannot be changed: {error}; "
                 f"`spotfleet ssh {folder.name}` does, and `ssh -F {config(folder)} {folder.name}`")
        return
    if taken := include.own_hosts(_user_config(), {a for w in known(folder).ways for a in w.aliases}):
        progress(f"note: {', '.join(taken)} in {_user_config()} now means this fleet's, until its end")


def _others(folder: Folder) -> list[str]:
    return [p.name for p in folder.path.parent.glob("[!.]*") if p.name != folder.name and (p / "ssh").is_dir()]


def _place(folder: Folder) -> Path:
    return folder.path / "ssh"


def _user_config() -> Path:
    return Path.home() / ".ssh" / "config"


def _spot(folder: Folder) -> include.Spot:
    fleets = folder.path.parent
    return include.Spot(_user_config(), include.include_line(fleets, BELOW),
                        openssh.private_folder(fleets.parent) / "config.lock")


def _write(path: Path, text: str) -> None:
    try:
        if path.read_text() == text:
            return
    except (FileNotFoundError, ValueError):
        pass
    write_whole(path, text)


# --- the dispatcher's API


def tunnel(folder: Folder, way: Way) -> Tunnel:
    """To the dispatcher's port on the machine `way`."""
    house = folder.path.parent.parent
    purpose = f"{config(folder)}\n{way.host}\n{json.dumps(to_json(way.door))}"  # another door, another connection
    return Tunnel(config(folder), way.aliases[0], way.address or LOCALLY, way.port,
                  openssh.control_path(house, purpose))


def dialer(folder: Folder, address: str, port: int, listed: Callable[[], Sequence[CloudHost]],
           ) -> Callable[[float], socket] | None:
    """What opens streams to the dispatcher that listens there, through SSH; None for a fleet without keys of its own.

    The provider is asked (`listed`) only where that machine is not known yet.
    """
    if not folder.keys.ssh_private:
        return None

    def at(ways: Ways) -> Way | None:
        return next((w for w in ways.ways if w.role == Role.DISPATCHER.value
                     and (w.address, w.port) == (address, port)), None)

    def dial(timeout_s: float) -> socket:
        try:
            way = at(known(folder)) or at(refresh(folder, listed()))
        except DispatcherUnreachable as error:
            raise NotConnected(str(error)) from None
        if way is None:
            raise NotConnected(f"the provider lists no machine whose dispatcher is at {address}:{port}")
        return tunnel(folder, way).dial(timeout_s)

    return dial
