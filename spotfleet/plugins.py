"""Discovery of provider plugins, their traits, and the part of a plugin that the parser of fleet files calls.

A plugin is one object that stands for a cloud, or for a set of machines. It is found by entry point, group
`spotfleet.clouds`, and its module imports no SDK when it is loaded. The core branches on its traits and calls its
methods; it never compares its name. `providers/plugin.py` has the whole contract,
`docs/clouds/new-cloud.md` the steps for a new one.

The part here has a module of its own, below all others: the parser (`config/`) calls a plugin's section, and the
plugins are built on the parser's helpers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Protocol

from spotfleet.errors import UsageError
from spotfleet.model import FleetSpec, Need

if TYPE_CHECKING:
    from pathlib import Path

    from pydantic import BaseModel

GROUP = "spotfleet.clouds"  # group of the plugins' entry points
BASE_VERSION = 1  # number of the contract that this release reads
BASE_TAG = "spotfleet-base"  # on every resource that is made on a base, and on the base's own: its name
JOINED = "+"  # between the names of a fleet's clouds, where it has several
Note = Callable[[tuple[str | int, ...], str], None]  # notes a problem of the fleet file: its place, and the text


class Machines(Enum):
    """Kinds of machines: they decide how laptop and dispatcher find, enter and leave them."""

    HERE = "here"  # processes of this machine, reached directly; they use the Python that runs spotfleet
    EXISTING = "existing"  # machines that exist before the fleet and outlive it, entered over SSH (`ExistingMachines`)
    MADE = "made"  # machines that a launch makes elsewhere, entered over SSH with a key that the launch installs


@dataclass(frozen=True)
class Traits:
    """Properties of a provider that the core branches on."""

    machines: Machines = Machines.MADE
    settles_region: bool = False  # a new fleet gets one of its candidate regions, and stays there
    open_ended_types: bool = False  # too many machine types to list all: a need names its kind where kinds must match
    placement: bool = False  # it follows `placement` and `all_or_nothing` of the fleet file
    poll_s: float = 2.0  # period of listings by a command: a cloud limits the rate of requests
    boot_limit_s: float = 0.0  # from the launch of a host until it joins; 0: the planner's own limit
    keeps_results_s: float = 0.0  # the dispatcher of a fleet that ended by itself waits so long for `down`
    notice_poll_s: float = 2.0  # period of a host's requests for notices
    takes: frozenset[str] = frozenset()  # which of `disk_size` and `image_id` under `resources` its machines follow


@dataclass(frozen=True)
class NamedPlace:
    """A region or zone that the fleet file names."""

    at: tuple[str | int, ...]  # the place in the file: ("resources",), ("dispatcher",) ...
    region: str
    zone: str
    provider: str = ""  # the one cloud of several that it is meant for


@dataclass(frozen=True)
class RegionRow:
    """Candidate region of a new fleet; a price of 0 means that it is not on sale there."""

    region: str
    host_micros_h: int
    dispatcher_micros_h: int
    total_micros_h: int  # price of all hosts wanted and the dispatcher
    why: str  # why it is chosen or not


@dataclass(frozen=True)
class Sdk:
    """SDK of a cloud: the extras of our wheel that install it, and modules that show whether it is there."""

    extras: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileFacts:
    """Keys of the fleet file besides its section that a plugin may check."""

    needs: tuple[Need, ...] = ()
    places: tuple[NamedPlace, ...] = ()
    interruption_behavior: str = "terminate"
    placement: str = "spread"
    all_or_nothing: bool = False
    max_lifetime_s: float = 0.0  # 0: no limit
    tags: dict[str, str] = field(default_factory=dict)
    nodes_at: tuple[str | int, ...] = ()  # place of the number of hosts; () if the file has none
    dispatcher_keys: tuple[str, ...] = ()  # keys under `dispatcher`
    spot_at: tuple[tuple[str | int, ...], ...] = ()  # places of `use_spot: true`
    disk_gib: int = 0  # `resources.disk_size`; 0: not in the file
    image: str = ""  # `resources.image_id`
    local: Callable[[str], Path] | None = None  # resolves a path of the file
    check_files: bool = False  # files that the section names must exist

    def of(self, provider: str) -> FileFacts:
        """Return the facts that concern one cloud of several."""
        return replace(self, needs=tuple(n for n in self.needs if n.provider in ("", provider)),
                       places=tuple(p for p in self.places if p.provider in ("", provider)))


def kind_missing(traits: Traits, needs: Sequence[Need]) -> bool:
    """Return whether hosts of both markets might be of different kinds: too many types are for sale, and a need names
    none."""
    return traits.open_ended_types and any(n.use_spot and not (n.instance_type or n.accelerator) for n in needs)


@dataclass(frozen=True)
class Base:
    """A base: the long-lived surroundings of fleets that Terraform makes. The fields are the contract of its output
    `spotfleet`, and mean for each cloud what `docs/clouds/terraform.md` has in its table."""

    provider: str
    name: str
    region: str
    account: str = ""
    module: str = ""  # release of the module that made it
    network: str = ""
    subnets: tuple[str, ...] = ()
    public_addresses: bool = False
    hosts_firewall: tuple[str, ...] = ()  # groups or network tags of every machine
    dispatcher_firewall: tuple[str, ...] = ()  # more of them for the dispatcher's machine
    hosts_identity: str = ""
    dispatcher_identity: str = ""
    checkpoints: str = ""  # URL
    queue: str = ""
    image: str = ""
    dispatcher_image: str = ""
    disk_gib: int = 0
    dispatcher_disk_gib: int = 0
    disk_key: str = ""
    tags: dict[str, str] = field(default_factory=dict)  # everything that is made on it has them


class SectionPlugin(Protocol):
    """The part of a plugin that the parser of fleet files calls."""

    name: str  # also the key of its section
    traits: Traits

    def section(self) -> type[BaseModel] | None:
        """Return the schema of its section; None if it has none. A method: commands that read no file load no pydantic.
        """

    def read_section(self, given: BaseModel | None, facts: FileFacts, note: Note) -> Mapping[str, Any]:
        """Return the section as plain JSON values, which the core stores and hands back unread: `FleetSpec.section`.

        `given`: an object of the schema; None for a file without the section. Calls `note` for each problem.
        """

    def base_keys(self, base: Base) -> Mapping[str, Any]:
        """Return the keys of its section that a base sets, as the fleet file would have them; {} if it uses no base."""

    def adjusted(self, spec: FleetSpec, facts: FileFacts, note: Note) -> FleetSpec:
        """Return the file's spec, which has the section, with what that decides about the rest of the file."""


@cache
def installed() -> Mapping[str, EntryPoint]:
    """Return the entry points of the installed plugins by name. A search of all distributions takes 70 ms, so that a
    process makes one."""
    return {e.name: e for e in entry_points(group=GROUP)}


def names() -> list[str]:
    """List the installed plugins, sorted."""
    return sorted(installed())


@cache
def load(name: str) -> Any:
    """Return the plugin `name`; UsageError for an unknown one, and for one that cannot be loaded.

    Several names, joined, are one plugin that the first makes of all.
    """
    if JOINED in name:
        parts = [load(part) for part in name.split(JOINED)]
        return parts[0].together(parts)
    found = installed()
    if name not in found:
        raise UsageError(f"unknown provider '{name}'", hint=f"use one of: {', '.join(sorted(found))}")
    try:
        return found[name].load()
    except (ImportError, AttributeError) as error:
        owner = found[name].dist
        raise UsageError(f"provider {name} cannot be loaded: {error}",
                         hint=f"install {owner.name if owner else found[name].value} again, with all that it needs"
                         ) from error
