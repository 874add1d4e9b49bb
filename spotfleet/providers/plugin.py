"""Contract of a provider's plugin, and the defaults that most of them keep.

One object per cloud, found by entry point (`spotfleet/plugins.py`), with a member for everything that the core wants to
know or to have done before it can call a `Provider`. A plugin subclasses `BasePlugin` and overrides what its cloud has:
a method here is a question that the core asks of every provider, so the default is the answer of a simple one. The
capabilities of the machines themselves stay on `Provider` (`providers/__init__.py`): they need the cloud's answers.

A configuration is what a plugin needs to open its provider: plain JSON values, made on the laptop, kept in fleet.json,
and sent to the dispatcher in boot.json. Only the plugin reads its keys, except that the core adds the fleet's keys:
`public_key` and `secret`, and for the dispatcher `private_key`. It holds no secret of the user.

`api/lifecycle/ssh_machines.py` is the core's and no plugin's: machines that exist are entered, given keys and cleaned
up by means that no cloud has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from spotfleet import plugins
from spotfleet.codec import to_json
from spotfleet.cost_export import CostExport
from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need
from spotfleet.plugins import Base, FileFacts, Machines, Note, RegionRow, Sdk, SectionPlugin, Traits
from spotfleet.providers import LaunchRequest, Provider

if TYPE_CHECKING:
    from pydantic import BaseModel

    from spotfleet.interruptions import NoticeSource

Config = dict[str, Any]
AccountKey = tuple[tuple[str, str], ...]  # (name, value) pairs


@dataclass(frozen=True)
class ImageRecipe:
    """Packer's files for an image of this cloud, besides those that are the same everywhere."""

    files: dict[str, str]  # name -> text: image.pkr.hcl, plugins.pkr.hcl, scripts
    variables: dict[str, Any]  # values of the template's variables
    environ: dict[str, str] = field(default_factory=dict)  # for Packer's process


@dataclass(frozen=True)
class AccountFleet:
    """A fleet of this laptop: one of those that have an account in common."""

    config: Config
    spec: FleetSpec


class Policies(Protocol):
    """Permission documents of a cloud, for `check --policy`. Sends no request."""

    roles: tuple[str, ...]  # roles that have a document, the first by default

    def document(self, role: str, spec: FleetSpec | None, cloud_name: str) -> dict[str, Any]:
        """Return the document of `role` for any fleet; with a spec, exactly for that fleet. `cloud_name` may be a
        pattern (`spotfleet.names.any_life`). Raises UsageError where the document depends on a fleet and there is none.
        """


class CloudPlugin(SectionPlugin, Protocol):
    """A provider as the core sees it before it opens it. `BasePlugin` has the defaults."""

    policies: Policies | None  # None: the cloud has none that we print
    cost_export: CostExport | None  # reader of its billing exports, for `cost --reconcile`; None: it has none
    user_key: str  # the key of the fleet file with the login user of its images; for hints
    sdk: Sdk  # what a machine needs to call the cloud

    def open(self, config: Config) -> Provider:
        """Return the provider of this configuration. Sends no request; raises UsageError for a wrong configuration."""

    def notices(self, metadata_url: str) -> NoticeSource | None:
        """Return the source of interruption notices on a host; None where there is none. Imports no SDK, and nothing
        else that a host may lack: pydantic, YAML."""

    def config(self, spec: FleetSpec, environ: Mapping[str, str], home: str) -> Config:
        """Return the laptop's configuration for a new fleet like `spec`. `home`: SPOTFLEET_HOME."""

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        """Return the laptop's configuration of an existing fleet, updated from its present file: what must stay for
        its life, stays. `config`: the laptop's or, for `attach`, the dispatcher's; without the fleet's keys."""

    def for_dispatcher(self, config: Config) -> Config:
        """Return the configuration for the dispatcher's machine, without what only this laptop uses."""

    def credentials(self, config: Config) -> dict[str, str] | None:
        """Return the credentials by which a machine of another cloud calls this one, as the section names them; {} if
        it names none, None if none are needed. Raises UsageError where they cannot be read."""

    def portable(self, spec: FleetSpec) -> FleetSpec:
        """Return the spec without what only this laptop uses, and with all defaults filled in: two portable specs are
        equal if no machine would differ."""

    def with_access(self, spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
        """Return the portable `spec` with what only this laptop uses from `asked`, the same fleet's file here."""

    def settle(self, provider: Provider, config: Config, spec: FleetSpec, hosts: int,
               region: str) -> tuple[Config, tuple[RegionRow, ...]]:
        """Choose the region of a new fleet of `hosts` hosts; called with the trait `settles_region`.

        Returns the configuration with it, and all candidates with their prices, the chosen one first. `region`: the one
        that the user accepted before. Raises NoCapacity or NeedsPerson where no candidate is possible.
        """

    def region(self, config: Config) -> str:
        """Return the one region of a configuration; "" where it has several, or the provider has none."""

    def everywhere(self, provider: Provider, config: Config) -> Config:
        """Return the configuration that lists the machines of all regions, if the configuration names none."""

    def narrowed(self, config: Config, need: Need) -> Config:
        """Return the configuration limited to the place that `need` names, so that offers of it come soon."""

    def account_key(self, config: Config) -> AccountKey:
        """Return what tells accounts apart: equal for configurations whose listings show the same machines."""

    def account_config(self, key: AccountKey, fleets: Sequence[AccountFleet]) -> Config | None:
        """Return a configuration that lists all these fleets, which have one account; None: the first fleet's own does.
        """

    def parts(self, config: Config) -> list[tuple[str, Config]]:
        """Return the plugins' names and configurations of all clouds of a fleet: several only where it is on several.
        """

    def together(self, plugins: Sequence[CloudPlugin]) -> CloudPlugin:
        """Return one plugin made of several, this one the first."""

    def base_contract(self, provider: Provider, name: str) -> str:
        """Return the contract of the base `name`, found by its tag in the provider's regions, as JSON. Raises
        NeedsPerson for none; UsageError where bases are not found by name."""

    def may_have_credentials(self, environ: Mapping[str, str]) -> bool:
        """Return whether environment or files may hold credentials. Sends no request."""

    def refuse_oversize(self, config: Config, request: LaunchRequest) -> None:
        """Raise UsageError if the request's boot files do not fit into what a launch can carry."""

    def usual_types(self, need: Need) -> tuple[str, ...]:
        """Return the types for a need without an accelerator, of its size if it asks for one; (): any. For plans by the
        catalog."""

    def obstacle(self, spec: FleetSpec, instance_type: str) -> str:
        """Return what keeps a host of this type from working in a fleet like `spec`, such as an image without a driver
        for its GPUs, and what to do; "" if nothing does."""

    def image_recipe(self, config: Config, *, gpus: bool, region: str) -> ImageRecipe | None:
        """Return what Packer needs for an image for hosts with or without GPUs, built in `region`, "" for that of the
        configuration; None: the cloud has no images of ours. Raises UsageError where the region is missing."""

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        """Return one line about costs of `hosts` hosts that no offer includes, such as disks; "" if there are none."""


class BasePlugin:
    """Defaults of `CloudPlugin`: one region, one account per configuration, a section that is kept as it is written."""

    name = ""
    traits = Traits()
    policies: Policies | None = None
    cost_export: CostExport | None = None
    user_key = "user"
    sdk = Sdk()

    def section(self) -> type[BaseModel] | None:
        return None

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        schema = self.section()
        return (given or schema()).model_dump(mode="json") if schema is not None else {}

    def base_keys(self, base: Base) -> Mapping[str, Any]:
        return {}

    def base_contract(self, provider: Provider, name: str) -> str:
        raise UsageError(f"provider {self.name} finds no base by its name", hint="--from-terraform DIR")

    def adjusted(self, spec: FleetSpec, facts: FileFacts, note: Note) -> FleetSpec:
        return spec

    def notices(self, metadata_url: str) -> NoticeSource | None:
        return None

    def config(self, spec: FleetSpec, environ: Mapping[str, str], home: str) -> Config:
        found = {"section": spec.section, "environment": to_json(spec.environment), "placement": spec.placement,
                 "target": spec.checkpoint.target, "side": "laptop"}
        return {key: value for key, value in found.items() if value}

    def moved(self, config: Config, spec: FleetSpec) -> Config:
        return {**config, **self.config(spec, {}, "")}

    def for_dispatcher(self, config: Config) -> Config:
        return {**config, "side": "dispatcher"}

    def credentials(self, config: Config) -> dict[str, str] | None:
        return None

    def portable(self, spec: FleetSpec) -> FleetSpec:
        return spec

    def with_access(self, spec: FleetSpec, asked: FleetSpec) -> FleetSpec:
        return spec

    def settle(self, provider: Provider, config: Config, spec: FleetSpec, hosts: int,
               region: str) -> tuple[Config, tuple[RegionRow, ...]]:
        raise UsageError(f"provider {self.name} has the trait settles_region, and chooses no region",
                         hint="its plugin needs `settle`, which providers/kit/plugin.py: RegionalPlugin has")

    def region(self, config: Config) -> str:
        return ""

    def everywhere(self, provider: Provider, config: Config) -> Config:
        return config

    def narrowed(self, config: Config, need: Need) -> Config:
        return config

    def account_key(self, config: Config) -> AccountKey:
        return tuple(sorted((key, json.dumps(value, sort_keys=True)) for key, value in config.items()))

    def account_config(self, key: AccountKey, fleets: Sequence[AccountFleet]) -> Config | None:
        return None

    def parts(self, config: Config) -> list[tuple[str, Config]]:
        return [(self.name, config)]

    def together(self, plugins: Sequence[CloudPlugin]) -> CloudPlugin:
        from spotfleet.providers.several import SeveralPlugin

        return SeveralPlugin(plugins)

    def may_have_credentials(self, environ: Mapping[str, str]) -> bool:
        return True

    def refuse_oversize(self, config: Config, request: LaunchRequest) -> None:
        return None

    def usual_types(self, need: Need) -> tuple[str, ...]:
        return ()

    def obstacle(self, spec: FleetSpec, instance_type: str) -> str:
        return ""

    def image_recipe(self, config: Config, *, gpus: bool, region: str) -> ImageRecipe | None:
        return None

    def unpriced(self, spec: FleetSpec, hosts: int) -> str:
        return ""


def plugin_of(name: str) -> CloudPlugin:
    """Return the plugin `name`; UsageError for an unknown one, and for one that cannot be loaded."""
    return plugins.load(name)


def usable() -> list[CloudPlugin]:
    """List the installed plugins that can be loaded, sorted by name: a broken one must not hide the others."""
    found = []
    for name in plugins.names():
        with suppress(UsageError):
            found.append(plugin_of(name))
    return found


def traits_of(spec: FleetSpec) -> Traits:
    return plugin_of(spec.provider).traits


def makes_machines(spec: FleetSpec) -> bool:
    """Return whether its provider creates machines, which are then reached over SSH with our keys."""
    return traits_of(spec).machines is Machines.MADE
