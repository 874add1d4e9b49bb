"""Which host key each machine over SSH must show, from the fleet file or the user's known_hosts. Pure, but for `read`.

Nobody is trusted at first sight: a machine without a key known here is refused before anything is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotfleet.errors import NeedsPerson, UsageError
from spotfleet.model import SshMachine, SshSpec
from spotfleet.ssh.known_hosts import entry, known_keys

DEFAULT = "~/.ssh/known_hosts"


def pinned(spec: SshSpec, known: str) -> str:
    """The keys of every machine that `spec` lists, as known_hosts text. `known`: the user's own known_hosts.

    With a discovery script `known` follows whole: machines that the script will name are looked up in it.
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
        raise _unknown(spec, unknown)
    if spec.discovery_script:
        lines.append(known.rstrip("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def read(spec: SshSpec) -> str:
    """The user's known_hosts; "" where there is none and none was named."""
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


def _unknown(spec: SshSpec, names: Sequence[str]) -> NeedsPerson:
    where = spec.known_hosts or DEFAULT
    ports = {_port(m, spec) for m in [*([spec.dispatcher] if spec.dispatcher else []), *spec.hosts]
             if entry(m.host, _port(m, spec)) in names}
    hosts = " ".join(m.host for m in [*([spec.dispatcher] if spec.dispatcher else []), *spec.hosts]
                     if entry(m.host, _port(m, spec)) in names)
    scan = f"ssh-keyscan {f'-p {ports.pop()} ' if ports != {22} and len(ports) == 1 else ''}-t ed25519 {hosts}"
    return NeedsPerson(
        f"ssh: no host key is known of {', '.join(names)}, and none is trusted at first sight",
        hint=f"`{scan}` prints what answers; compare it with /etc/ssh/ssh_host_ed25519_key.pub on the machine itself "
             f"(its console, its owner), then add the line to {where}, or write `host_key:` in the fleet file")


def _port(machine: SshMachine, spec: SshSpec) -> int:
    return machine.port or spec.port
