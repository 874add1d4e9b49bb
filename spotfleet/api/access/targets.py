"""Lookup of a machine by the text that a user types: FLEET, FLEET-w0, w0, a host's name or its address."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from spotfleet.api import cloud
from spotfleet.api.access import ssh
from spotfleet.api.access.ssh import SshTarget, SshTargets
from spotfleet.api.home import FleetDir, Home
from spotfleet.api.machine import DispatcherMachine, Progress
from spotfleet.errors import NoSuchFleet, SpotfleetError, UsageError
from spotfleet.model import HostState, Role
from spotfleet.protocol.messages import HostStatus
from spotfleet.providers.plugin import makes_machines
from spotfleet.ssh import openssh
from spotfleet.ssh.fanout import FanoutTarget
from spotfleet.ssh.tunnel import NotConnected

DISPATCHER = "dispatcher"  # another name of FLEET, beside w0, w1 ...
LET_IN_S = 3.0  # for a connection to the dispatcher's sshd; a longer wait suggests that the cloud's firewall blocks us


def find_target(home: Home, text: str, progress: Progress) -> tuple[FleetDir, SshTarget]:
    """Return the machine that `text` names: the dispatcher's for a fleet's name or "". Raises NoSuchFleet, UsageError.
    """
    if not text or home.folder(text).exists:
        folder = home.find(text)
        return folder, fleet_target(folder, "", progress)
    entered = [folder for folder in home.living() if folder.readable and folder.keys.ssh_private]
    for fresh in (False, True):  # a listing asks every machine
        for folder in entered:
            if target := _read_targets(folder, progress, fresh).find(text):
                _ensure_reachable(folder, progress)
                return folder, target
    names = [alias for folder in entered for target in ssh.read_targets(folder).ways for alias in target.aliases[:1]]
    raise NoSuchFleet(f"there is no fleet and no machine '{text}'",
                      hint=f"there are: {', '.join(names)}" if names else "`spotfleet status` shows what there is")


def fleet_target(folder: FleetDir, host: str, progress: Progress) -> SshTarget:
    """Return the machine `host` of the fleet, the dispatcher's for ""."""
    name = folder.name if host in ("", DISPATCHER) else host
    _ensure_reachable(folder, progress)
    targets = _read_targets(folder, progress, fresh=False)
    found = targets.find(name) if name == folder.name else None  # workers come and go
    if found is None:
        targets = _read_targets(folder, progress, fresh=True)
        found = targets.find(name) or targets.find(f"{folder.name}-{host}")
    if found is None:
        what = f"host '{host}'" if host else "machine for its dispatcher now"
        there = ", ".join(w.aliases[0] for w in targets.ways)
        raise SpotfleetError(f"fleet '{folder.name}' has no {what}",
                             hint=f"it has {there}" if there else f"see `spotfleet status {folder.name}`")
    return found


def workers(folder: FleetDir, progress: Progress) -> list[SshTarget]:
    """Return every running worker host; one line tells which have stopped. Raises SpotfleetError when none runs."""
    _ensure_reachable(folder, progress)
    reported = _reported(folder)
    found = _read_targets(folder, progress, fresh=True, reported=reported).workers
    states = {h.host: h.state == HostState.STOPPED.value for h in reported or ()}
    stopped = [w.aliases[0] for w in found if states.get(w.host, w.stopped)]
    running = [w for w in found if w.aliases[0] not in stopped]
    has_stopped = f"{', '.join(stopped)} {'has' if len(stopped) == 1 else 'have'} stopped"
    if not running:
        raise SpotfleetError(f"fleet '{folder.name}' has no worker host now{f': {has_stopped}' if stopped else ''}",
                             hint=f"`spotfleet status {folder.name}` says what it waits for")
    if stopped:
        progress(f"left out: {has_stopped}")
    return running


def fanout_target(folder: FleetDir, target: SshTarget, *, among_many: bool = False) -> FanoutTarget:
    """Return how ssh reaches the machine. `among_many`: share the existing connection to the dispatcher's machine, if
    there is one, instead of opening another for each target."""
    jump = next((w for w in ssh.read_targets(folder).ways if folder.name in w.aliases), None)
    if not target.door.jump or jump is None or jump == target:
        return FanoutTarget(target.aliases[0], target.host, ssh.config(folder))
    shared = ("-S", str(ssh.tunnel(folder, jump).control)) if among_many else ()
    # Not ProxyJump of our config: ssh passes its -F on unquoted, which breaks for a path with a blank.
    through = openssh.command(ssh.config(folder), *shared, "-W", "[%h]:%p", folder.name)
    proxy = ("-o", f"ProxyCommand={openssh.proxy(through)}")
    return FanoutTarget(target.aliases[0], target.host, ssh.config(folder), proxy)


def open_shared_connection(folder: FleetDir) -> None:
    """Open the connection to the dispatcher's machine that targets share; without it, each opens its own."""
    jump = next((w for w in ssh.read_targets(folder).ways if folder.name in w.aliases), None)
    if jump is not None:
        try:
            ssh.tunnel(folder, jump).connect()
        except NotConnected:
            return  # the targets' own connections report why


def _ensure_reachable(folder: FleetDir, progress: Progress) -> None:
    """Open the cloud's firewall again if the dispatcher's sshd does not answer: this laptop's address may have changed.
    """
    dispatcher = next((w for w in ssh.read_targets(folder).ways if folder.name in w.aliases), None)
    if dispatcher is None or not makes_machines(folder.record.spec):
        return
    try:
        socket.create_connection((dispatcher.door.address, dispatcher.door.port), LET_IN_S).close()
    except ConnectionRefusedError:
        return  # the packet arrived, so the firewall is open
    except OSError:
        machine = DispatcherMachine(folder)
        cloud.allow_access(machine.provider, machine.cloud_name, progress)


def _read_targets(folder: FleetDir, progress: Progress, fresh: bool,
                  reported: Sequence[HostStatus] | None = None) -> SshTargets:
    if folder.record.down_at:
        raise SpotfleetError(f"fleet '{folder.name}' is down", hint="`spotfleet up FILE` makes it anew")
    if not folder.keys.ssh_private:
        provider = folder.record.spec.provider
        raise UsageError(f"fleet '{folder.name}' has no machines with an sshd: provider {provider} runs its hosts as "
                         "processes of this machine",
                         hint="run the command here; their files are in "
                              f"{folder.path.parent.parent / 'local' / 'hosts'}, their addresses in `spotfleet hosts`")
    known = ssh.read_targets(folder)
    if known.ways and (not fresh or _is_current(known, reported if reported is not None else _reported(folder))):
        return known
    try:
        return ssh.refresh(folder, DispatcherMachine(folder).left(), progress)
    except SpotfleetError as error:
        if not known.ways:
            raise
        progress(f"note: who is there now cannot be found out ({error}); as last known:")
        return known


def _is_current(known: SshTargets, reported: Sequence[HostStatus] | None) -> bool:
    """Return whether the dispatcher reports the same workers as are known here."""
    return reported is not None and {h.host for h in reported} == {target.host for target in known.workers}


def _reported(folder: FleetDir) -> list[HostStatus] | None:
    """Return the workers that the dispatcher reports; None if it does not answer. One request, where a listing asks
    every machine."""
    url = folder.record.url
    if not url:
        return None
    try:
        hosts = DispatcherMachine(folder).client(url, 0.0).status().hosts
    except SpotfleetError:
        return None
    return [h for h in hosts if h.role == Role.WORKER.value]
