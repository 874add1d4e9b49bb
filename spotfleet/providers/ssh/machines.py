"""Existing machines: their list, their offers and their SSH access. Pure.

A machine is a pool of its own, with room for one host. The instance type separates both kinds of need: the
dispatcher's machine runs the dispatcher and no workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from spotfleet.matching import meets
from spotfleet.model import Market, Need, Offer, Role, SshAccess, SshMachine, SshSpec
from spotfleet.ssh.known_hosts import known_keys

DISPATCHER, WORKER = "dispatcher", "machine"  # instance types
PROVIDER = "ssh"


@dataclass(frozen=True)
class ResolvedMachine:
    """An existing machine, with the defaults of the fleet file filled in."""

    name: str  # unique; its host, with the port if that is not the fleet's default
    host: str
    port: int
    user: str
    root: str  # folder of all our files; may begin with ~/
    role: Role
    slots: int = 1
    address: str = ""
    accelerator: str = ""
    price_micros_h: int = 0
    host_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def offer(self) -> Offer:
        kind = DISPATCHER if self.role is Role.DISPATCHER else WORKER
        return Offer(PROVIDER, PROVIDER, self.name, kind, Market.ON_DEMAND, self.slots, self.price_micros_h,
                     self.price_micros_h, self.accelerator, room=1)

    def access(self, *, jump: bool) -> SshAccess:
        return SshAccess(self.host, self.user, self.port, self.host_keys, jump)


def machines(spec: SshSpec, discovered: Iterable[tuple[str, int]], known_hosts: str,
             user: str) -> list[ResolvedMachine]:
    """Return the dispatcher's machine, then those of the list, then the script's (host, slots) that the list lacks.

    `user` is the user who runs the command line.
    """
    found: dict[str, ResolvedMachine] = {}
    listed = [(m, Role.WORKER) for m in [*spec.hosts, *(SshMachine(host, slots) for host, slots in discovered)]]
    for given, role in [*([(spec.dispatcher, Role.DISPATCHER)] if spec.dispatcher else []), *listed]:
        port = given.port or spec.port
        name = given.host if port == spec.port else f"[{given.host}]:{port}"
        keys = (given.host_key,) if given.host_key else tuple(known_keys(known_hosts, given.host, port))
        found.setdefault(name, ResolvedMachine(
            name, given.host, port, given.user or spec.user or user, given.folder or spec.folder, role, given.slots,
            given.address, given.accelerator, given.price_micros_h, keys))
    return list(found.values())


def offers(free: Sequence[ResolvedMachine], need: Need) -> list[Offer]:
    """Return the offers of free machines that satisfy `need`.

    A spot need is met at the same price, as machines are never reclaimed: a fleet file written for a cloud may ask for
    spot hosts. The dispatcher's machine is offered only for its own instance type.
    """
    found = []
    for machine in free:
        offer = replace(machine.offer, market=Market.SPOT) if need.use_spot else machine.offer
        if machine.role is Role.DISPATCHER and (need.use_spot or need.instance_type != DISPATCHER):
            continue
        if meets(need, offer):
            found.append(offer)
    return sorted(found, key=lambda o: (o.price_micros_h, o.pool))
