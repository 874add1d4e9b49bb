"""Admission of connections without a valid token, called strangers: how many there may be, and which one is closed.

    accepted --> waiting --first byte, and a place is free--> open --valid token--> member, never closed here
                    |                                           |
                    +--time over, or the oldest of the busiest address when another needs the place--> closed

A waiting connection costs a socket and nothing else. An open one has TLS buffers and an HTTP parser, so there are few
of them, and the others wait. A place is taken from the address that holds most, so one address cannot keep others out.
Addresses that have sent a valid token within KNOWN_S have places of their own, which strangers cannot take. No I/O
here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from spotfleet.addresses import plain

KNOWN_S = 3600.0
MOST_KNOWN = 16_384  # addresses; above the most hosts of a fleet


class Visitor(Protocol):
    """Connection with the network that it comes from (`network_of`) and the time when it got its place."""

    network: str
    since: float


V = TypeVar("V", bound=Visitor)


class Crowd(Generic[V]):
    """Connections by network, the oldest first. Each operation takes constant time."""

    def __init__(self) -> None:
        self._by_network: dict[str, dict[V, None]] = {}
        self._levels: list[dict[str, None]] = []  # [n]: networks with more than n connections, in the order of arrival
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[V]:
        return iter([visitor for held in self._by_network.values() for visitor in held])

    def __contains__(self, visitor: V) -> bool:
        return visitor in self._by_network.get(visitor.network, {})

    def count(self, network: str) -> int:
        return len(self._by_network.get(network, {}))

    def add(self, visitor: V) -> None:
        held = self._by_network.setdefault(visitor.network, {})
        if len(held) == len(self._levels):
            self._levels.append({})
        self._levels[len(held)][visitor.network] = None
        held[visitor] = None
        self._count += 1

    def remove(self, visitor: V) -> bool:
        """Remove it; return whether it was here."""
        held = self._by_network.get(visitor.network, {})
        if visitor not in held:
            return False
        del held[visitor]
        del self._levels[len(held)][visitor.network]
        if not self._levels[-1]:
            self._levels.pop()
        if not held:
            del self._by_network[visitor.network]
        self._count -= 1
        return True

    def oldest_of_busiest(self) -> V | None:
        """Return the oldest connection of the network that holds most; None if there is none."""
        if not self._levels:
            return None
        network = next(iter(self._levels[-1]))
        return next(iter(self._by_network[network]))


@dataclass
class Places(Generic[V]):
    """Places for connections without a valid token."""

    most_waiting: int
    most_open: int
    waiting: Crowd[V] = field(default_factory=Crowd)
    ready: dict[V, None] = field(default_factory=dict)  # those of `waiting` that have sent something, in this order
    open: Crowd[V] = field(default_factory=Crowd)

    def arrive(self, visitor: V) -> V | None:
        """Let a new connection wait; return the one that has to be closed for it, if any."""
        surplus = self.waiting.oldest_of_busiest() if len(self.waiting) >= self.most_waiting else None
        if surplus is not None:
            self.leave(surplus)
        self.waiting.add(visitor)
        return surplus

    def enter(self, visitor: V) -> tuple[bool, V | None]:
        """Open a waiting connection that has sent something; return whether it got a place, and the connection that
        has to be closed for it, if any. Without a place it stays ready."""
        surplus = None
        if len(self.open) >= self.most_open:
            surplus = self.open.oldest_of_busiest()
            if surplus is None or self.open.count(surplus.network) <= self.open.count(visitor.network) + 1:
                self.ready[visitor] = None
                return False, None
            self.leave(surplus)
        self.waiting.remove(visitor)
        self.ready.pop(visitor, None)
        self.open.add(visitor)
        return True, surplus

    def next_ready(self) -> V | None:
        """Return the connection that gets the next place; None if there is no place, or no connection for it."""
        return next(iter(self.ready), None) if len(self.open) < self.most_open else None

    def leave(self, visitor: V) -> bool:
        """Remove a connection that is closed or has become a member's; return whether it had a place."""
        self.ready.pop(visitor, None)
        return self.waiting.remove(visitor) or self.open.remove(visitor)

    def overdue(self, now: float, limit_s: float) -> list[V]:
        """Return the connections that have kept their place for longer than `limit_s`; a ready one waits for us."""
        late = [v for v in self.waiting if v not in self.ready and now - v.since > limit_s]
        return late + [v for v in self.open if now - v.since > limit_s]


class KnownNetworks:
    """Networks that have sent a valid token lately."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # -> time of the last valid token, the oldest first

    def note(self, network: str, now: float) -> None:
        self._seen.pop(network, None)
        self._seen[network] = now
        if len(self._seen) > MOST_KNOWN:
            del self._seen[next(iter(self._seen))]

    def has(self, network: str, now: float) -> bool:
        return now - self._seen.get(network, -KNOWN_S) < KNOWN_S


def network_of(address: str) -> str:
    """Return the address, or the network of 2**64 IPv6 addresses that one machine can use at will."""
    found = plain(address.partition("%")[0])
    return str(ipaddress.ip_network(f"{found}/64", strict=False)) if ":" in found else found
