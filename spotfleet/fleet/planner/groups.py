"""Number of hosts of each group, and each group's part of the fleet's limit on the price. Pure.

A group whose `nodes.min` is 0 follows demand, and so does one for which something besides jobs states a wish, such as
the fleet's Ray cluster: it has the hosts that jobs and wish need, within its range, and those that have been idle for
less than `nodes.idle_s`. Any other group has the hosts of `size.py`, whether they work or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotfleet.fleet.domain.actions import Wanted
from spotfleet.fleet.domain.state import FleetState
from spotfleet.fleet.policy.pools import host_charge
from spotfleet.model import Nodes, Role
from spotfleet.words import about, counted

NO_WORK = "no job needs a host"


@dataclass(frozen=True)
class Wish:
    """Hosts of a group that something besides jobs needs in all, in addition to those of jobs."""

    hosts: int
    why: str  # for people: "Ray: 3 tasks wait for a GPU"


@dataclass(frozen=True)
class OutsideDemand:
    """Demand besides that of jobs. A group with a wish follows demand, also where `nodes.min` is above 0."""

    wished: Mapping[str, Wish] = field(default_factory=dict)  # by group; "" in a fleet without named groups
    busy: frozenset[str] = frozenset()  # hosts that work for it: they are not idle


@dataclass(frozen=True)
class JobAsk:
    """Workers that a job can use now, and with how many it can begin."""

    job: str
    workers: int
    least: int
    per_host: bool = False  # each worker takes a whole host
    group: str = ""  # "": hosts of any group

    def hosts(self, workers: int, slots: int) -> int:
        """Return the hosts for so many workers. With 0 slots, which is unknown, one host shows them."""
        if self.per_host:
            return workers
        return -(-workers // slots) if slots else min(1, workers)


@dataclass(frozen=True)
class GroupHosts:
    """Number of hosts that a group should have."""

    hosts: int
    why: str = ""  # "" where the range alone decides


def follows_demand(nodes: Nodes, wish: Wish | None = None) -> bool:
    return nodes.min == 0 or wish is not None


def hosts_of_jobs(nodes: Nodes, slots: int, asks: Sequence[JobAsk]) -> int:
    """Return the hosts that jobs need of a group that follows demand."""
    most = sum(ask.hosts(ask.workers, slots) for ask in asks)
    return max(min(nodes.target, most), sum(ask.hosts(ask.least, slots) for ask in asks))


def demanded(nodes: Nodes, slots: int, asks: Sequence[JobAsk], wish: Wish | None = None, kept: int = 0) -> GroupHosts:
    """Return the hosts of a group that follows demand.

    Jobs raise the number to `nodes.target`; what they need to begin, and the wish, up to `nodes.max`. `kept`: its hosts
    that work or have not been idle for long.
    """
    needed = hosts_of_jobs(nodes, slots, asks) + (wish.hosts if wish else 0)
    hosts = max(nodes.min, min(nodes.max, max(needed, kept)))
    reasons = [f"{ask.job} asks for {counted(ask.workers, 'host' if ask.per_host else 'worker')}" for ask in asks]
    reasons += [wish.why] if wish and wish.why else []
    if needed > nodes.max:
        reasons.append(f"nodes.max is {nodes.max}")
    if hosts > max(needed, nodes.min):
        reasons.append(f"{counted(hosts - max(needed, nodes.min), 'host')} not idle for {about(nodes.idle_s)} yet")
    elif not needed:
        reasons = [f"{NO_WORK}, nodes.min is {nodes.min}" if nodes.min else NO_WORK, *reasons]
    return GroupHosts(hosts, ", ".join(reasons))


def by_group(asks: Sequence[JobAsk], ranges: Mapping[str, Nodes], slots: Mapping[str, int]) -> dict[str, list[JobAsk]]:
    """Return the asks of each group. A job of no group takes the room of groups that always have hosts, then that of
    the others, in the order of `ranges`."""
    found: dict[str, list[JobAsk]] = {name: [a for a in asks if a.group == name] for name in ranges}
    if "" in ranges:
        return found
    order = sorted(ranges, key=lambda name: ranges[name].min == 0)
    for ask in (a for a in asks if not a.group):
        left = ask
        for name in order:
            each = 1 if ask.per_host else max(1, slots.get(name, 0))
            used = sum(a.hosts(a.workers, slots.get(name, 0)) for a in found[name])
            room = max(0, ranges[name].max - used) * each
            part = replace(left, workers=min(left.workers, room), least=min(left.least, room), group=name)
            if part.workers:
                found[name].append(part)
            left = replace(left, workers=left.workers - part.workers, least=left.least - part.least)
    return found


def limits_of_groups(wanted: Wanted, state: FleetState) -> dict[str, int]:
    """Return the limit on the price of each group's hosts: what they cost now, and the whole rest.

    Where all hosts cost more than the limit, the last groups of the fleet file lose hosts first.
    """
    costs = {part.group: sum(host_charge(state, h) for h in state.hosts if h.role is Role.WORKER and h.counts
                             and h.group == part.group) for part in wanted.parts}
    rest = wanted.max_micros_h - sum(costs.values())
    if rest >= 0:
        return {name: cost + rest for name, cost in costs.items()}
    for name in reversed(costs):
        cut = min(costs[name], -rest)
        costs[name], rest = costs[name] - cut, rest + cut
    return costs


@dataclass(frozen=True)
class IdleTime:
    """Since when each host has had no work; monotonic seconds."""

    since: Mapping[str, float] = field(default_factory=dict)

    def after(self, hosts: Sequence[str], busy: frozenset[str], now: float) -> IdleTime:
        """Return the times with what is known at `now` of all hosts."""
        return IdleTime({h: self.since.get(h, now) for h in hosts if h not in busy})

    def over(self, idle_s: float, now: float) -> dict[str, float]:
        """Return the hosts that have had no work for `idle_s`, with the seconds for which they had none."""
        return {host: now - since for host, since in self.since.items() if now - since >= idle_s}


def in_use(state: FleetState, group: str, going: Collection[str]) -> int:
    """Return how many hosts of a group stay without demand: they are not leaving, and not among `going`."""
    return sum(h.role is Role.WORKER and h.group == group and h.counts and h.notice_deadline is None
               and h.request_id not in going for h in state.hosts)
