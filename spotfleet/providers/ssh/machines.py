"""Existing machines: their list, their offers and their SSH access. Pure.

A machine is a pool of its own, with room for one host, and always on demand. Its instance type is its use:
DISPATCHER_TYPE for the dispatcher's machine, which runs no workers, and WORKER_TYPE for all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spotfleet.codec import from_json
from spotfleet.matching import meets
from spotfleet.model import EnvironmentSpec, Market, Need, Offer, Role, SshAccess
from spotfleet.providers.ssh.section.spec import DISPATCHER_TYPE, WORKER_TYPE, SshMachine, SshSpec
from spotfleet.ssh.known_hosts import known_keys

PROVIDER = "ssh"


@dataclass(frozen=True)
class ResolvedMachine:
    """An existing machine, with the defaults of the fleet file filled in."""

    name: str  # see SshSpec.machine_name
    host: str
    port: int
    user: str
    root: str  # SshMachine.folder: all our files; may begin with ~/
    role: Role
    slots: int = 1
    address: str = ""
    accelerator: str = ""
    price_micros_h: int = 0
    host_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def offer(self) -> Offer:
        kind = DISPATCHER_TYPE if self.role is Role.DISPATCHER else WORKER_TYPE
        return Offer(PROVIDER, PROVIDER, self.name, kind, Market.ON_DEMAND, self.slots, self.price_micros_h,
                     self.price_micros_h, self.accelerator, room=1)

    def access(self, *, jump: bool) -> SshAccess:
        return SshAccess(self.host, self.user, self.port, self.host_keys, jump)


def spec_in(config: Mapping[str, Any]) -> SshSpec:
    """Return the spec in a configuration. ValueError for another form."""
    return from_json(SshSpec, _value(config["ssh"]))


def environment_in(config: Mapping[str, Any]) -> EnvironmentSpec:
    return from_json(EnvironmentSpec, _value(config.get("environment") or {}))


def _value(given: Any) -> Any:
    """Return a part of a configuration. Earlier releases had it as JSON text: so it is in fleet.json and boot.json of
    fleets that those have made."""
    return json.loads(given) if isinstance(given, str) else given


def machines(spec: SshSpec, discovered: Iterable[tuple[str, int]], known_hosts: str,
             user: str) -> list[ResolvedMachine]:
    """Return the dispatcher's machine, the listed ones, then those that only the discovery script names: (host, slots).

    `user` is the user who runs the command line.
    """
    found: dict[str, ResolvedMachine] = {}
    listed = [(m, Role.WORKER) for m in [*spec.hosts, *(SshMachine(host, slots) for host, slots in discovered)]]
    for given, role in [*([(spec.dispatcher, Role.DISPATCHER)] if spec.dispatcher else []), *listed]:
        port = given.port or spec.port
        name = spec.machine_name(given)
        keys = (given.host_key,) if given.host_key else tuple(known_keys(known_hosts, given.host, port))
        found.setdefault(name, ResolvedMachine(
            name, given.host, port, given.user or spec.user or user, given.folder or spec.folder, role, given.slots,
            given.address, given.accelerator, given.price_micros_h, keys))
    return list(found.values())


def offers(free: Sequence[ResolvedMachine], need: Need) -> list[Offer]:
    """Return the offers of free machines that satisfy `need`; [] for a spot need.

    The dispatcher's machine is offered only for its own instance type.
    """
    found = [m.offer for m in free if m.role is Role.WORKER or need.instance_type == DISPATCHER_TYPE]
    return sorted((o for o in found if meets(need, o)), key=lambda o: (o.price_micros_h, o.pool))
