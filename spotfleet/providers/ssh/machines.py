"""Which machines there are, what they offer and how they are entered. Pure.

A machine is a pool of its own, with room for one host. Both kinds of need are told apart by the instance type: the
dispatcher's machine bears the dispatcher and no workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from spotfleet.fleet.plan import matches
from spotfleet.model import Market, Need, Offer, Role, SshDoor, SshMachine, SshSpec
from spotfleet.ssh.known_hosts import known_keys

DISPATCHER, WORKER = "dispatcher", "machine"  # instance types
PROVIDER = "ssh"


@dataclass(frozen=True)
class Machine:
    """One that exists, with all that the fleet file leaves open filled in."""

    name: str  # unique; its host, with the port where that is not the fleet's usual one
    host: str
    port: int
    user: str
    root: str  # everything of ours; may begin with ~/
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

    def door(self, *, jump: bool) -> SshDoor:
        return SshDoor(self.host, self.user, self.port, self.host_keys, jump)


def machines(spec: SshSpec, discovered: Iterable[tuple[str, int]], known_hosts: str, user: str) -> list[Machine]:
    """The dispatcher's machine first, then those of the list, then (host, slots) of the script that the list has not.

    `user` is whoever runs the command line.
    """
    found: dict[str, Machine] = {}
    listed = [(m, Role.WORKER) for m in [*spec.hosts, *(SshMachine(host, slots) for host, slots in discovered)]]
    for given, role in [*([(spec.dispatcher, Role.DISPATCHER)] if spec.dispatcher else []), *listed]:
        port = given.port or spec.port
        name = given.host if port == spec.port else f"[{given.host}]:{port}"
        keys = (given.host_key,) if given.host_key else tuple(known_keys(known_hosts, given.host, port))
        found.setdefault(name, Machine(
            name, given.host, port, given.user or spec.user or user, given.folder or spec.folder, role, given.slots,
            given.address, given.accelerator, given.price_micros_h, keys))
    return list(found.values())


def offers(free: Sequence[Machine], need: Need) -> list[Offer]:
    """Of the machines that are free, those that `need` describes. Nobody takes a machine away, so a spot need is met at
    the same price: a fleet file that was written for a cloud may ask for spot hosts. The dispatcher's machine is
    offered to those alone who ask for it by its type."""
    found = []
    for machine in free:
        offer = replace(machine.offer, market=Market.SPOT) if need.use_spot else machine.offer
        if machine.role is Role.DISPATCHER and (need.use_spot or need.instance_type != DISPATCHER):
            continue
        if matches(need, offer) and (not need.max_micros_h or offer.price_micros_h <= need.max_micros_h):
            found.append(offer)
    return sorted(found, key=lambda o: (o.price_micros_h, o.pool))
