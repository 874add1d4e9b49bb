"""Machines over SSH, seen from the laptop: provider configuration, the fleet's key, cleanup of the machines."""

from __future__ import annotations

import getpass
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from spotfleet import providers
from spotfleet.api.home import FleetDir, Keys
from spotfleet.api.lifecycle import host_keys
from spotfleet.codec import to_json
from spotfleet.errors import NeedsPerson, NoCapacity, SpotfleetError, UsageError
from spotfleet.model import FleetSpec
from spotfleet.plugins import Machines
from spotfleet.providers import ExistingMachines, Provider
from spotfleet.providers.plugin import Config, traits_of
from spotfleet.providers.ssh.machines import spec_in as ssh_spec_in
from spotfleet.providers.ssh.section.spec import SshMachine, SshSpec, parsed
from spotfleet.ssh.keys import make as make_pair

Progress = Callable[[str], None]
SCRIPT_BYTES = 256 << 10


class LeftoverError(SpotfleetError):
    """Error: machines may still hold files or keys of a fleet that is to be closed."""


def config(spec: FleetSpec) -> Config:
    """Return the configuration of provider ssh on the laptop, without a secret; {} for a spec without section `ssh`.

    Raises NeedsPerson for a machine whose host key is not pinned.
    """
    own = spec_of(spec)
    if own is None:
        return {}
    return {
        "ssh": to_json(own),
        "environment": to_json(spec.environment),
        "known_hosts": host_keys.pinned(own, host_keys.read(own)),
        "script": _script(own),
        "side": "laptop",
    }


def spec_of(spec: FleetSpec) -> SshSpec | None:
    """Return the machines of a fleet whose machines exist; None for another fleet, or without its file."""
    exist = traits_of(spec).machines is Machines.EXISTING
    return parsed(spec.section) if exist and spec.section else None


def _script(spec: SshSpec) -> str:
    """Return the text of the discovery script: the dispatcher runs a copy of it."""
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


def with_keys(provider_config: Config, keys: Keys) -> Config:
    """Return the configuration with the fleet's own key, for a provider in this process."""
    return {**provider_config, "private_key": keys.ssh_private, "public_key": keys.ssh_public}


def for_dispatcher(provider_config: Config, keys: Keys, spec: SshSpec) -> Config:
    """Return the configuration for the dispatcher, without the laptop's file paths. It holds the fleet's key: for
    boot.json only."""
    own = replace(spec, identity_file="", known_hosts="", user=spec.user or getpass.getuser())
    return {**with_keys(provider_config, keys), "ssh": to_json(own), "side": "dispatcher"}


def with_new_pair(keys: Keys, cloud_name: str) -> Keys:
    """Return `keys` with a new SSH key pair for the fleet."""
    pair = make_pair(cloud_name)
    return replace(keys, ssh_private=pair.private, ssh_public=pair.public)


def install_key(provider: Provider, folder: FleetDir, progress: Progress, *, new_fleet: bool) -> None:
    """Install the fleet's key on the machines. A machine that fails is reported, and the others go on.

    `new_fleet`: no machine has the fleet's key yet, so one that fails now holds nothing of it; `down` forgives that
    machine until it accepts the key.
    Raises NeedsPerson when the dispatcher's machine fails. Without a discovery script, raises NoCapacity when fewer
    than `nodes.min` machines are left.
    """
    record = folder.record
    spec, ssh = record.spec, spec_of(record.spec)
    if ssh is None or not isinstance(provider, ExistingMachines):
        return
    own = ssh.machine_name(ssh.dispatcher) if ssh.dispatcher else ""
    in_file = {own, *map(ssh.machine_name, ssh.hosts)}
    failed = provider.install_key(record.cloud_name, folder.keys.ssh_public)
    discovered = set(provider.machines()) - in_file if ssh.discovery_script else set()
    folder.update(shut=tuple(m for m in failed if new_fleet or m in record.shut),
                  met=tuple(sorted({*record.met, *(discovered - failed.keys())})))
    if own in failed:
        raise NeedsPerson(f"the dispatcher's machine cannot be used: {own}: {failed[own]}",
                          hint="nothing was started; `spotfleet up` again once that is fixed")
    for machine, why in failed.items():
        progress(f"warning: {machine}: {why}; the fleet goes on without it until `spotfleet up` is asked again")
    good = len(ssh.hosts) - len(failed)
    if not ssh.discovery_script and good < spec.nodes.min:
        raise NoCapacity(f"{good} of {len(ssh.hosts)} machines can be used, and nodes.min is {spec.nodes.min}",
                         hint="nothing was started; fix the machines above, or ask for fewer")


def listing_error(provider: Provider, cloud_name: str) -> str:
    """Return why the machines over SSH cannot be listed; "" if they can, or for another provider."""
    if not isinstance(provider, ExistingMachines):
        return ""
    try:
        provider.hosts(cloud_name)
    except SpotfleetError as error:
        return str(error)
    return ""


def clean_up(provider: Provider, folder: FleetDir, progress: Progress) -> list[str]:
    """Remove the fleet's files and key from its machines; return a line for each machine that failed.

    A machine that never accepted the fleet's key holds nothing of it: its failure is only reported to `progress`.
    """
    record = folder.record
    if not isinstance(provider, ExistingMachines):
        return []
    progress("removing the fleet's key and all else of it from the machines")
    left = _with_all_discovered(provider, folder).remove_fleet(record.cloud_name)
    for machine in (m for m in left if m in record.shut):
        progress(f"note: {machine}: {left[machine]}; it has never let the fleet in")
    return [f"{machine}: {why}" for machine, why in left.items() if machine not in record.shut]


def _with_all_discovered(provider: ExistingMachines, folder: FleetDir) -> ExistingMachines:
    """Return a provider that also knows machines which the discovery script no longer names."""
    record = folder.record
    forgotten = sorted(set(record.met) - set(provider.machines()))
    if not forgotten or spec_of(record.spec) is None:
        return provider
    spec = ssh_spec_in(record.provider_config)
    spec = replace(spec, hosts=(*spec.hosts, *(SshMachine(host) for host in forgotten)))
    provider_config = {**record.provider_config, "ssh": to_json(spec)}
    found = providers.load(record.spec.provider, with_keys(provider_config, folder.keys))
    assert isinstance(found, ExistingMachines)
    return found


def refuse_leftovers(left: list[str], name: str) -> None:
    """Raise LeftoverError, naming the machines that may still hold files or keys."""
    if left:
        raise LeftoverError("something of the fleet is still on " + "; ".join(left),
                            hint=f"`spotfleet down {name}` again once they answer, or close the fleet without them by "
                                 f"`spotfleet down {name} --discard`")
