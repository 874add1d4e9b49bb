"""Listings: a cloud's machines -> one line per host. Pure.

A cloud converts each of its machines to `MachineFacts`; the rest is the same everywhere. Two living machines of one
host: the newest is the host, the other is an intruder, "HOST~MACHINE". A machine that the cloud has launched anew is
the same host, whose runs are those of all its machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from spotfleet.model import SECOND, CloudHost, CloudState, Offer, Role, Run, SshAccess
from spotfleet.providers.kit.mapping import names


@dataclass(frozen=True)
class ListingContext:
    """Data for a listing besides the cloud's answers."""

    region: str
    user: str
    host_keys: Callable[[str], tuple[str, ...]]  # for a request_id; () if the fleet's secret is unknown
    priced: Callable[[Offer], Offer]  # adds facts of a pool that tags do not hold: slots, accelerator, prices
    disk_gib: Callable[[Role], int] = lambda _role: 0  # as at the launch: listings hold no sizes


@dataclass(frozen=True)
class MachineFacts:
    """One machine in the cloud's answer."""

    id: str
    tags: Mapping[str, str]
    offer: Offer
    state: CloudState
    runs: tuple[Run, ...] = ()
    address: str = ""  # private
    public: str = ""
    why: str = ""
    ended_at: float | None = None


def machine_line(host: str, machine: MachineFacts, context: ListingContext) -> CloudHost:
    """Return the line of a machine: people enter a dispatcher by its public address, and workers through it."""
    role = names.role_of(machine.tags)
    worker = role is Role.WORKER
    entered = machine.address if worker else machine.public or machine.address
    access = SshAccess(entered, context.user, host_keys=context.host_keys(host), jump=worker) if entered else None
    return CloudHost(host, machine.id, machine.tags[names.FLEET], role, machine.offer, machine.state, machine.runs,
                     machine.address, 0 if worker else names.DISPATCHER_PORT, machine.why, access,
                     context.disk_gib(role), int(bool(machine.public)), machine.ended_at)


def one_host(host: str, machines: Sequence[CloudHost]) -> list[CloudHost]:
    """Return the line of a host from its machines, oldest first; and the lines of its intruders."""
    living = [line for line in machines if line.state is not CloudState.TERMINATED]
    chosen = (living or machines)[-1]
    ended = [line for line in machines if line is not chosen and line.state is CloudState.TERMINATED]
    runs = tuple(sorted((run for line in (*ended, chosen) for run in line.runs), key=lambda r: r.started_at))
    intruders = [replace(line, request_id=f"{host}{SECOND}{line.provider_id}", ssh=None,
                         why=f"a second machine of {host}, which is {chosen.provider_id} now")
                 for line in living if line is not chosen]
    return [replace(chosen, runs=runs), *intruders]


def pools_text(pools: Sequence[Offer], longest: int) -> str:
    """Format the POOL tag: "SLOTS ACCELERATOR ZONE/TYPE=MICROS/ON_DEMAND ...", as many pools as fit."""
    first = pools[0]
    text = f"{first.slots} {first.accelerator.replace(' ', '_') or '-'}"
    for offer in pools:
        more = f" {offer.zone}/{offer.instance_type}={offer.price_micros_h}/{offer.on_demand_micros_h}"
        if len(text) + len(more) > longest:
            break
        text += more
    return text


def offer_of(bare: Offer, tags: Mapping[str, str], priced: Callable[[Offer], Offer]) -> Offer:
    """Return a machine's offer, with slots, accelerator and the price at launch as far as the POOL tag holds them.

    `bare`: the pool as the cloud lists the machine. `priced` adds today's prices where the tag holds none.
    """
    slots, accelerator, *pools = [*tags.get(names.POOL, "").split(" "), "", ""]
    found = replace(bare, slots=int(slots) if slots.isdigit() else 1,
                    accelerator="" if accelerator == "-" else accelerator.replace("_", " "))
    for entry in pools:
        pool, _, price = entry.partition("=")
        now, _, on_demand = price.partition("/")
        if pool == f"{bare.zone}/{bare.instance_type}" and now.isdigit() and on_demand.isdigit():
            return replace(found, price_micros_h=int(now), on_demand_micros_h=int(on_demand))
    return priced(found)
