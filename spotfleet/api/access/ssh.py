"""SSH files on the laptop for a fleet's machines, as its provider lists them.

    fleets/NAME/ssh/ways.json       each machine's aliases, host and SSH access
    fleets/NAME/ssh/config          the same for OpenSSH, included at the top of ~/.ssh/config
    fleets/NAME/ssh/known_hosts     the pinned keys
    fleets/NAME/ssh/id_ed25519      the fleet's own key, mode 0600

FLEET is the dispatcher's machine, FLEET-w0, FLEET-w1 ... the running workers in the order of their launch, and each
host's own name is an alias too. `refresh` writes all files and closes outdated tunnels; `remove` deletes them.
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

from spotfleet.api.home import FleetDir, write_whole
from spotfleet.codec import from_json, to_json
from spotfleet.errors import DispatcherUnreachable, SpotfleetError
from spotfleet.model import CloudHost, CloudState, Role, SshAccess
from spotfleet.ssh import include, openssh
from spotfleet.ssh.config import Entry, SshFiles, config_text, known_hosts_text
from spotfleet.ssh.tunnel import NotConnected, Tunnel

BELOW = "*/ssh/config"  # under `fleets`; does not match a draft folder, whose name begins with a dot
LOCALLY = "127.0.0.1"
FOLLOW_S = 15.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SshTarget:
    """SSH access to one machine."""

    aliases: tuple[str, ...]  # the last is the host's own name
    host: str
    role: str
    door: SshAccess
    address: str = ""
    port: int = 0  # where a dispatcher listens
    stopped: bool = False  # at the time of the listing


@dataclass(frozen=True)
class SshTargets:
    ways: tuple[SshTarget, ...] = ()

    @property
    def workers(self) -> list[SshTarget]:
        return [w for w in self.ways if w.role == Role.WORKER.value]

    def find(self, name: str) -> SshTarget | None:
        """Find a machine by alias, host or address."""
        return next((w for w in self.ways if name in w.aliases), None) or next(
            (w for w in self.ways if name in (w.address, w.door.address)), None)


def list_targets(fleet: str, listed: Sequence[CloudHost], others: Sequence[str] = ()) -> SshTargets:
    """Return the running machines with SSH access: the dispatcher's first, then workers in the order of their launch.
    Names of other fleets (`others`) are not used as aliases."""
    living = [h for h in listed if h.ssh is not None and h.state is not CloudState.TERMINATED]
    dispatchers = sorted((h for h in living if h.role is Role.DISPATCHER), key=_rank, reverse=True)
    workers = sorted((h for h in living if h.role is Role.WORKER), key=_launched)
    named = [(fleet if i == 0 else "", h) for i, h in enumerate(dispatchers)]
    named += [(f"{fleet}-w{i}", h) for i, h in enumerate(workers)]
    return SshTargets(tuple(
        SshTarget(aliases, h.request_id, h.role.value, h.ssh, h.address, h.port, h.state is CloudState.STOPPED)
        for alias, h in named
        if h.ssh and (aliases := tuple(dict.fromkeys(a for a in (alias, h.request_id) if a and a not in others)))))


def _launched(host: CloudHost) -> tuple[float, float, str]:
    """Sort key: order of the launch intents, because hosts that are launched together start in any order."""
    number = re.search(r"\d+$", host.request_id)
    since = host.runs[0].started_at if host.runs else float("inf")
    return float(number[0]) if number else 0.0, since, host.request_id


def _rank(host: CloudHost) -> tuple[bool, tuple[float, float, str]]:
    """Sort key: the newest running one is the highest."""
    return host.state is CloudState.RUNNING, _launched(host)


# --- on disk


def refresh(folder: FleetDir, listed: Sequence[CloudHost], progress: Progress = lambda _line: None) -> SshTargets:
    """Write the SSH files for the machines that the provider has `listed`. A user's ssh config that cannot be changed
    is reported to `progress` and is no error."""
    keys, before = folder.keys, read_targets(folder)
    targets = list_targets(folder.name, listed, _others(folder))
    if not keys.ssh_private or not (targets.ways or before.ways):
        return targets
    place = _ssh_folder(folder)
    place.mkdir(mode=0o700, exist_ok=True)
    entries = [Entry(w.aliases, w.host, w.door) for w in targets.ways]
    files = SshFiles(str(place / "id_ed25519"), str(place / "known_hosts"))
    _write(place / "id_ed25519", keys.ssh_private)
    _write(place / "known_hosts", known_hosts_text(entries))
    _write(place / "config", config_text(folder.name, entries, files, openssh.version()))
    _write(place / "ways.json", json.dumps(to_json(targets), indent=1))
    for target in before.ways:
        if target.role == Role.DISPATCHER.value and target not in targets.ways:
            _close(folder, target, progress)
    _include(folder, progress)
    return targets


def refresh_if_changed(folder: FleetDir, workers: Collection[str], listed: Callable[[], Sequence[CloudHost]]) -> None:
    """Write the SSH files again if the worker hosts have changed, so that plain `ssh FLEET-w0` finds them; at most once
    in FOLLOW_S, since a listing asks every machine."""
    targets = read_targets(folder)
    if not targets.ways or {w.host for w in targets.workers} == set(workers):
        return
    written = _ssh_folder(folder) / "ways.json"
    with suppress(SpotfleetError, OSError):  # a command that connects lists again and reports the error
        if time.time() - written.stat().st_mtime >= FOLLOW_S:
            os.utime(written)
            refresh(folder, listed())


def remove(folder: FleetDir, progress: Progress = lambda _line: None) -> None:
    """Close the tunnel and remove the fleet's SSH files, also from the user's ssh config. Idempotent."""
    for target in read_targets(folder).ways:
        if target.role == Role.DISPATCHER.value:
            _close(folder, target, progress)
    shutil.rmtree(_ssh_folder(folder), ignore_errors=True)
    try:
        include.remove(_include_line(folder), folder.path.parent, BELOW)
    except OSError as error:
        progress(f"note: {_user_config()} still includes {folder.path.parent}/{BELOW}: {error}; remove that line")
    openssh.leave(folder.path.parent.parent)


def read_targets(folder: FleetDir) -> SshTargets:
    """Return the machines as last written; none if the file is missing or of another version."""
    try:
        return from_json(SshTargets, json.loads((_ssh_folder(folder) / "ways.json").read_text()))
    except (FileNotFoundError, ValueError):
        return SshTargets()


def config(folder: FleetDir) -> Path:
    return _ssh_folder(folder) / "config"


def included(folder: FleetDir) -> bool:
    """Return whether plain `ssh FLEET` works: the user's ssh config includes ours."""
    try:
        return _include_line(folder).line in _user_config().read_bytes().splitlines()
    except OSError:
        return False


def _close(folder: FleetDir, target: SshTarget, progress: Progress) -> None:
    try:
        tunnel(folder, target).close()
    except OSError as error:
        progress(f"note: the connection to {target.host} could not be closed ({error}); it ends by itself when idle")


def _include(folder: FleetDir, progress: Progress) -> None:
    try:
        include.add(_include_line(folder))
    except OSError as error:
        progress(f"note: plain `ssh {folder.name}` will not work, since {_user_config()} cannot be changed: {error}; "
                 f"`spotfleet ssh {folder.name}` does, and `ssh -F {config(folder)} {folder.name}`")
        return
    if replaced := include.own_hosts(_user_config(), {a for w in read_targets(folder).ways for a in w.aliases}):
        progress(f"note: {', '.join(replaced)} in {_user_config()} now means this fleet's, until its end")


def _others(folder: FleetDir) -> list[str]:
    return [p.name for p in folder.path.parent.glob("[!.]*") if p.name != folder.name and (p / "ssh").is_dir()]


def _ssh_folder(folder: FleetDir) -> Path:
    return folder.path / "ssh"


def _user_config() -> Path:
    return Path.home() / ".ssh" / "config"


def _include_line(folder: FleetDir) -> include.IncludeLine:
    fleets = folder.path.parent
    return include.IncludeLine(_user_config(), include.include_line(fleets, BELOW),
                               openssh.private_folder(fleets.parent) / "config.lock")


def _write(path: Path, text: str) -> None:
    try:
        if path.read_text() == text:
            return
    except (FileNotFoundError, ValueError):
        pass
    write_whole(path, text)


# --- the dispatcher's API


def tunnel(folder: FleetDir, target: SshTarget) -> Tunnel:
    """Return the tunnel to the dispatcher's port on the machine `target`."""
    home = folder.path.parent.parent
    purpose = f"{config(folder)}\n{target.host}\n{json.dumps(to_json(target.door))}"  # per access
    return Tunnel(config(folder), target.aliases[0], target.address or LOCALLY, target.port,
                  openssh.control_path(home, purpose))


def dialer(folder: FleetDir, address: str, port: int, listed: Callable[[], Sequence[CloudHost]],
           ) -> Callable[[float], socket] | None:
    """Return a function that opens a stream to the dispatcher through SSH; None for a fleet without keys of its own.

    The provider is asked (`listed`) only if that machine is not known yet.
    """
    if not folder.keys.ssh_private:
        return None

    def at(targets: SshTargets) -> SshTarget | None:
        return next((w for w in targets.ways if w.role == Role.DISPATCHER.value
                     and (w.address, w.port) == (address, port)), None)

    def dial(timeout_s: float) -> socket:
        try:
            target = at(read_targets(folder)) or at(refresh(folder, listed()))
        except DispatcherUnreachable as error:
            raise NotConnected(str(error)) from None
        if target is None:
            raise NotConnected(f"the provider lists no machine whose dispatcher is at {address}:{port}")
        return tunnel(folder, target).dial(timeout_s)

    return dial
