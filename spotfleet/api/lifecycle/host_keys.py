"""Expected host keys of machines over SSH, from the fleet file or the user's known_hosts. Pure, except `read` and
`resolves`.

No host key is trusted on first use: a machine without a known key is refused before anything is changed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec
from spotfleet.ssh.known_hosts import entry, known_keys

DEFAULT = "~/.ssh/known_hosts"


def resolves(host: str) -> bool:
    """Return whether this machine resolves `host` to an address."""
    try:
        return bool(socket.getaddrinfo(host.strip("[]"), None))
    except (OSError, UnicodeError):
        return False


def pinned(spec: SshSpec, known: str, found: Callable[[str], bool] = resolves) -> str:
    """Return the keys of every machine that `spec` lists, as known_hosts text. `known`: the user's own known_hosts.

    With a discovery script the whole of `known` is appended: it has the keys of machines that the script will name.
    Raises NeedsPerson that names the machines without a key, and how to pin one.
    """
    lines: list[str] = []
    unknown: list[str] = []
    for machine in [*([spec.dispatcher] if spec.dispatcher else []), *spec.hosts]:
        name = entry(machine.host, machine.port or spec.port)
        keys = [machine.host_key] if machine.host_key else known_keys(known, machine.host, machine.port or spec.port)
        lines += [f"{name} {key}" for key in keys]
        unknown += [] if keys else [name]
    if unknown:
        raise _unknown(spec, unknown, found)
    if spec.discovery_script:
        lines.append(known.rstrip("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def read(spec: SshSpec) -> str:
    """Read the user's known_hosts; "" if there is none and none was named."""
    path = Path(spec.known_hosts or DEFAULT).expanduser()
    try:
        return path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        if spec.known_hosts:
            raise UsageError(f"ssh.known_hosts: there is no file {path}", hint="correct the fleet file") from None
        return ""
    except OSError as error:
        raise UsageError(f"ssh.known_hosts: {path} cannot be read: {error}",
                         hint="correct the fleet file, or the file's mode") from None


def _unknown(spec: SshSpec, names: Sequence[str], found: Callable[[str], bool]) -> NeedsPerson:
    where = spec.known_hosts or DEFAULT
    machines = [m for m in [*([spec.dispatcher] if spec.dispatcher else []), *spec.hosts]
                if entry(m.host, _port(m, spec)) in names]
    if lost := [m.host for m in machines if not found(m.host)]:
        return NeedsPerson(
            f"ssh: {', '.join(lost)} cannot be resolved to an address here, and no host key of it is known",
            hint="check the names in the fleet file. A name that only the dispatcher's machine knows needs its "
                 "`host_key:` there")
    ports = {_port(m, spec) for m in machines}
    hosts = " ".join(m.host for m in machines)
    scan = f"ssh-keyscan {f'-p {ports.pop()} ' if ports != {22} and len(ports) == 1 else ''}-t ed25519 {hosts}"
    return NeedsPerson(
        f"ssh: no host key is known of {', '.join(names)}, and none is trusted on first use",
        hint=f"`{scan}` prints what answers; compare it with /etc/ssh/ssh_host_ed25519_key.pub on the machine itself "
             f"(its console, its owner), then add the line to {where}, or write `host_key:` in the fleet file")


def _port(machine: SshMachine, spec: SshSpec) -> int:
    return machine.port or spec.port
