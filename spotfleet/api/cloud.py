"""Fleets on made machines seen from the laptop: a new fleet's region, keys, resources besides machines.

A fleet with candidate regions gets one of them when it is made, and stays there whatever prices do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spotfleet.api.home import FleetDir, Keys
from spotfleet.errors import SpotfleetError
from spotfleet.fleet.planner.size import first_workers, hosts_wanted
from spotfleet.model import FleetSpec, Market, Offer, Role
from spotfleet.plugins import Machines
from spotfleet.providers import Boot, LaunchRequest, ManagedResources, Provider
from spotfleet.providers.plugin import Config, RegionRow, plugin_of, traits_of

Progress = Callable[[str], None]
KEYS = ("public_key", "private_key", "secret")  # the keys that this module adds to a configuration


def has_sshd(spec: FleetSpec) -> bool:
    """Return whether its machines are reached over SSH, so that the fleet needs a key of its own."""
    return traits_of(spec).machines is not Machines.HERE


def with_keys(config: Config, keys: Keys) -> Config:
    """Return the configuration with the keys to launch machines and to authenticate them, for this process."""
    return {**config, "public_key": keys.ssh_public, "secret": keys.fleet_secret}


def without_keys(config: Config) -> Config:
    """Return the dispatcher's configuration without the fleet's keys, which have a file of their own on a laptop."""
    return {key: value for key, value in config.items() if key not in KEYS}


def for_dispatcher(config: Config, spec: FleetSpec, keys: Keys) -> Config:
    """Return the configuration for the dispatcher, which uses its machine's own credentials.

    `private_key` is for a second laptop, which finds it in boot.json (`attach`); no machine uses it.
    """
    return {**with_keys(plugin_of(spec.provider).for_dispatcher(config), keys), "private_key": keys.ssh_private}


def choose_region(provider: Provider, config: Config, spec: FleetSpec, region: str = "",
                  ) -> tuple[Config, tuple[RegionRow, ...]]:
    """Choose the region of a new fleet; see `CloudPlugin.settle`. With groups, that of the main one."""
    spec = of_main_group(spec)
    return plugin_of(spec.provider).settle(provider, config, spec, hosts_of(spec), region)


def of_main_group(spec: FleetSpec) -> FleetSpec:
    """Return the fleet as if it had only its main group of hosts."""
    return replace(spec, any_of=spec.main_group.any_of, nodes=spec.main_group.nodes)


def hosts_of(spec: FleetSpec) -> int:
    """Return the number of hosts that a new fleet has for its first job, as far as it is known before the machine types
    are."""
    return hosts_wanted(spec.nodes, 1, [first_workers(spec.resize)])


def refuse_oversize(folder: FleetDir, config: Config, boot: Boot) -> None:
    """Raise UsageError if `boot` is too large for a launch of the dispatcher's machine, before anything is made.

    `config`: the provider's, with keys.
    """
    spec, name = folder.record.spec, folder.record.cloud_name
    offer = Offer(spec.provider, "", "", "", Market.ON_DEMAND, 1, 0, 0)
    plugin_of(spec.provider).refuse_oversize(config, LaunchRequest(f"{name}-d-0", name, Role.DISPATCHER, offer, boot))


def prepare(provider: Provider, folder: FleetDir, progress: Progress) -> None:
    """Create the cloud resources that hosts need, and allow SSH from here. Raises NeedsPerson without permission."""
    if isinstance(provider, ManagedResources):
        record = folder.record
        provider.prepare(record.cloud_name, record.spec.tags, progress)


def allow_access(provider: Provider, cloud_name: str, progress: Progress = lambda _line: None) -> None:
    """Allow SSH from this machine's present address. An error is only reported: the next connection shows its effect.
    """
    if isinstance(provider, ManagedResources):
        try:
            provider.allow_ssh_from_here(cloud_name, progress)
        except SpotfleetError as error:
            progress(f"note: {error}")
