"""Machines over SSH, seen from the laptop: what their provider is told, whose key opens them, what is left on them."""

from __future__ import annotations

import getpass
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet import providers
from spotfleet.api import pins
from spotfleet.api.house import Folder, Keys
from spotfleet.codec import from_json, to_json
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import FleetSpec, SshMachine, SshSpec
from spotfleet.providers import ExistingMachines, Provider
from spotfleet.ssh.keys import make as make_pair

Progress = Callable[[str], None]
SCRIPT_BYTES = 256 << 10


class Leavings(SpotfleetError):
    """Machines may still hold something of a fleet that is to be closed."""


def config(spec: FleetSpec) -> dict[str, str]:
    """What provider ssh must know on the laptop; without a secret. {} for a spec that names no machines.

    Raises NeedsPerson for a machine whose host key nobody has pinned.
    """
    if spec.ssh is None:
        return {}
    return {
        "ssh": json.dumps(to_json(spec.ssh)),
        "environment": json.dumps(to_json(spec.environment)),
        "known_hosts": pins.pinned(spec.ssh, pins.read(spec.ssh)),
        "script": _script(spec.ssh),
        "side": "laptop",
    }


def _script(spec: SshSpec) -> str:
    """The discovery script itself: the dispatcher runs it too."""
    if not spec.discovery_script:
        return ""
    path = Path(spec.discovery_script)
    try:
        if not path.stat().st_mode & stat.S_IXUSR:
            raise UsageError(f"ssh.discovery_script: {path} is not executable", hint=f"chmod +x {path}")
        if path.stat().st_size > SCRIPT_BYTES:
            raise UsageError(f"ssh.discovery_script: {path} is larger than {SCRIPT_BYTES >> 10} KiB",
                             hint="name a small script that calls the program")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"ssh.discovery_script: {path} cannot be read as text: {error}",
                         hint="it must be a script: the dispatcher runs a copy of it") from None


def with_keys(told: dict[str, str], keys: Keys) -> dict[str, str]:
    """`told` with the fleet's own key, for a provider in this process."""
    return {**told, "private_key": keys.ssh_private, "public_key": keys.ssh_public}


def for_dispatcher(told: dict[str, str], keys: Keys, spec: SshSpec) -> dict[str, str]:
    """The same for the dispatcher, to whom files of the laptop mean nothing. Holds the fleet's key: boot.json only."""
    own = replace(spec, identity_file="", known_hosts="", user=spec.user or getpass.getuser())
    return {**with_keys(told, keys), "ssh": json.dumps(to_json(own)), "side": "dispatcher"}


def with_new_pair(keys: Keys, cloud_name: str) -> Keys:
    """`keys` with a key pair of the fleet's own."""
    pair = make_pair(cloud_name)
    return replace(keys, ssh_private=pair.private, ssh_public=pair.public)


def admit(provider: Provider, folder: Folder, progress: Progress, *, first: bool) -> None:
    """Let the fleet's key open the machines. One that fails is told about, and the rest goes on.

    Raises NeedsPerson when it is the dispatcher's machine; NoCapacity when fewer than `nodes.min` are left.
    """
    record = folder.record
    spec = record.spec
    if spec.ssh is None or not isinstance(provider, ExistingMachines):
        return
    head = spec.ssh.dispatcher
    name = head and (head.host if head.port in (0, spec.ssh.port) else f"[{head.host}]:{head.port}")
    failed = {line.partition(": ")[0]: line for line in provider.admit(record.cloud_name, folder.keys.ssh_public)}
    there = set(provider.machines()) if spec.ssh.discovery_script else set()
    met = tuple(sorted({*record.met, *(there - {h.host for h in spec.ssh.hosts} - failed.keys() - {name})}))
    folder.update(shut=tuple(m for m in failed if first or m in record.shut), met=met)
    if name in failed:
        raise NeedsPerson(f"the dispatcher's machine cannot be used: {failed[name]}",
                          hint="nothing was started; `spotfleet up` again once that is mended")
    for line in failed.values():
        progress(f"warning: {line}; the fleet goes on without it until `spotfleet up` is asked again")
    good = len(spec.ssh.hosts) - len(failed)
    if not spec.ssh.discovery_script and good < spec.nodes.min:
        raise NoCapacity(f"{good} of {len(spec.ssh.hosts)} machines can be used, and nodes.min is {spec.nodes.min}",
                         hint="nothing was started; mend the machines above, or ask for fewer")


def unlisted(provider: Provider, cloud_name: str) -> str:
    """Why what is on the machines cannot be told; "" if it can, or where a cloud tells it."""
    if not isinstance(provider, ExistingMachines):
        return ""
    try:
        provider.hosts(cloud_name)
    except SpotfleetError as error:
        return str(error)
    return ""


def part(provider: Provider, folder: Folder, progress: Progress) -> list[str]:
    """Leave nothing of the fleet on its machines; what is left, a line per machine.

    A machine that has never let the fleet's key in holds nothing of it: that it does not now is only told.
    """
    record = folder.record
    if not isinstance(provider, ExistingMachines):
        return []
    progress("removing the fleet's key and all else of it from the machines")
    left = _with_all_met(provider, folder).part(record.cloud_name)
    never = [line for line in left if line.partition(": ")[0] in record.shut]
    for line in never:
        progress(f"note: {line}; it has never let the fleet in")
    return [line for line in left if line not in never]


def _with_all_met(provider: ExistingMachines, folder: Folder) -> ExistingMachines:
    """A provider that also knows the machines that the discovery script names no more."""
    record = folder.record
    forgotten = sorted(set(record.met) - set(provider.machines()))
    if not forgotten or record.spec.ssh is None:
        return provider
    spec = from_json(SshSpec, json.loads(record.provider_config["ssh"]))
    spec = replace(spec, hosts=(*spec.hosts, *(SshMachine(host) for host in forgotten)))
    told = {**record.provider_config, "ssh": json.dumps(to_json(spec))}
    found = providers.load(record.spec.provider, with_keys(told, folder.keys))
    assert isinstance(found, ExistingMachines)
    return found


def refuse_leavings(left: list[str], name: str) -> None:
    """Raise Leavings, naming the machines that may still hold something."""
    if left:
        raise Leavings("something of the fleet is still on " + "; ".join(left),
                       hint=f"`spotfleet down {name}` again once they answer, or close the fleet without them by "
                            f"`spotfleet down {name} --discard`")
