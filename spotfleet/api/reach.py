"""From what a person types to a machine of a fleet: FLEET, FLEET-w0, w0, a host's name or its address."""

from __future__ import annotations

import socket

from spotfleet.api import cloud, ssh
from spotfleet.api.house import Folder, House
from spotfleet.api.machine import Machine, Progress
from spotfleet.api.ssh import Way, Ways
from spotfleet.errors import NoSuchFleet, SpotfleetError, UsageError
from spotfleet.model import Role
from spotfleet.ssh import openssh
from spotfleet.ssh.fanout import Place
from spotfleet.ssh.tunnel import NotConnected

DISPATCHER = "dispatcher"  # another name of FLEET, beside w0, w1 ...
LET_IN_S = 3.0  # for a connection to the dispatcher's sshd; else a cloud may not let this laptop in


def one(house: House, text: str, progress: Progress) -> tuple[Folder, Way]:
    """The machine that `text` means, the dispatcher's for a fleet's name or "". Raises NoSuchFleet, UsageError."""
    if not text or house.folder(text).exists:
        folder = house.find(text)
        return folder, chosen(folder, "", progress)
    entered = [folder for folder in house.living() if folder.readable and folder.keys.ssh_private]
    for fresh in (False, True):  # a listing asks every machine
        for folder in entered:
            if way := _ways(folder, progress, fresh).find(text):
                _knock(folder, progress)
                return folder, way
    names = [alias for folder in entered for way in ssh.known(folder).ways for alias in way.aliases[:1]]
    raise NoSuchFleet(f"there is no fleet and no machine '{text}'",
                      hint=f"there are: {', '.join(names)}" if names else "`spotfleet status` shows what there is")


def chosen(folder: Folder, host: str, progress: Progress) -> Way:
    """The machine `host` of the fleet, the dispatcher's for ""."""
    name = folder.name if host in ("", DISPATCHER) else host
    _knock(folder, progress)
    ways = _ways(folder, progress, fresh=False)
    found = ways.find(name) if name == folder.name else None  # workers come and go
    if found is None:
        ways = _ways(folder, progress, fresh=True)
        found = ways.find(name) or ways.find(f"{folder.name}-{host}")
    if found is None:
        what = f"host '{host}'" if host else "machine for its dispatcher now"
        there = ", ".join(w.aliases[0] for w in ways.ways)
        raise SpotfleetError(f"fleet '{folder.name}' has no {what}",
                             hint=f"it has {there}" if there else f"see `spotfleet status {folder.name}`")
    return found


def workers(folder: Folder, progress: Progress) -> list[Way]:
    """Every living worker host. Raises SpotfleetError when there is none."""
    _knock(folder, progress)
    found = _ways(folder, progress, fresh=True).workers
    if not found:
        raise SpotfleetError(f"fleet '{folder.name}' has no worker host now",
                             hint=f"`spotfleet status {folder.name}` says what it waits for")
    return found


def place(folder: Folder, way: Way, *, among_many: bool = False) -> Place:
    """How ssh enters the machine. `among_many`: through the connection that leads to the dispatcher's already, if there
    is one, and not through one more for each."""
    jump = next((w for w in ssh.known(folder).ways if folder.name in w.aliases), None)
    if not way.door.jump or jump is None or jump == way:
        return Place(way.aliases[0], way.host, ssh.config(folder))
    shared = ("-S", str(ssh.tunnel(folder, jump).control)) if among_many else ()
    # ProxyJump of our config would do, but for the blank that a path may have: ssh hands its -F on unquoted.
    through = openssh.command(ssh.config(folder), *shared, "-W", "[%h]:%p", folder.name)
    return Place(way.aliases[0], way.host, ssh.config(folder), ("-o", f"ProxyCommand={openssh.proxy(through)}"))


def warm(folder: Folder) -> None:
    """Let the connection to the dispatcher's machine stand, for `place`; without it, each enters for itself."""
    jump = next((w for w in ssh.known(folder).ways if folder.name in w.aliases), None)
    if jump is not None:
        try:
            ssh.tunnel(folder, jump).connect()
        except NotConnected:
            return  # whoever goes there says why


def _knock(folder: Folder, progress: Progress) -> None:
    """This laptop may have moved since a cloud was told to let it in: where nobody answers, that is said anew."""
    head = next((w for w in ssh.known(folder).ways if folder.name in w.aliases), None)
    if head is None or not cloud.makes_machines(folder.record.spec):
        return
    try:
        socket.create_connection((head.door.address, head.door.port), LET_IN_S).close()
    except ConnectionRefusedError:
        return  # it is let through
    except OSError:
        machine = Machine(folder)
        cloud.open_door(machine.provider, machine.cloud_name, progress)


def _ways(folder: Folder, progress: Progress, fresh: bool) -> Ways:
    if folder.record.down_at:
        raise SpotfleetError(f"fleet '{folder.name}' is down", hint="`spotfleet up FILE` makes it anew")
    if not folder.keys.ssh_private:
        provider = folder.record.spec.provider
        raise UsageError(f"fleet '{folder.name}' has no machines with an sshd: provider {provider} runs its hosts as "
                         "processes of this machine",
                         hint="run the command here; their files are in "
                              f"{folder.path.parent.parent / 'local' / 'hosts'}, their addresses in `spotfleet hosts`")
    known = ssh.known(folder)
    if known.ways and (not fresh or _as_known(folder, known)):
        return known
    try:
        return ssh.refresh(folder, Machine(folder).left(), progress)
    except SpotfleetError as error:
        if not known.ways:
            raise
        progress(f"note: who is there now cannot be found out ({error}); as last known:")
        return known


def _as_known(folder: Folder, known: Ways) -> bool:
    """Does the dispatcher say that its workers are those that are known? It knows at once what a listing asks every
    machine for."""
    url = folder.record.url
    if not url:
        return False
    try:
        hosts = Machine(folder).client(url, 0.0).status().hosts
    except SpotfleetError:
        return False
    return {h.host for h in hosts if h.role == Role.WORKER.value} == {way.host for way in known.workers}
