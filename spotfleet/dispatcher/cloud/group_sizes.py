"""Sizes of the fleet's groups of hosts: what jobs and others need now, and which hosts have been idle for long.

The decisions are in `fleet/planner/groups.py` and `size.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.fleet.planner.groups import (
    GroupHosts,
    IdleTime,
    JobAsk,
    OutsideDemand,
    by_group,
    demanded,
    follows_demand,
    hosts_of_jobs,
    in_use,
)
from spotfleet.fleet.planner.size import first_workers, hosts_wanted
from spotfleet.model import RAY_KIND, Nodes, Offer, ResizeSpec, Role
from spotfleet.providers import Provider


class GroupSizes:
    """Number of hosts that each group should have."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.outside = OutsideDemand()
        self.refresh: Callable[[], None] = lambda: None  # called before each look: sets `outside`
        self.offered: dict[str, tuple[Offer, ...]] = {}  # group without a host so far -> its offers
        self.slots: dict[str, int] = {}  # group -> those of its smallest host: of present or last ones, or as offered
        self._idle = IdleTime()

    def note(self, busy: frozenset[str], now: float) -> None:
        """Record which hosts work; `now` is monotonic. While all hosts of a group are needed, none of them is idle."""
        if not any(self._follows_demand(group, nodes) for group, nodes in self._core.ranges.items()):
            return
        needed, hosts = self.sizes(now, needed_only=True), self._hosts()
        working = busy | self.outside.busy
        for group, own in hosts.items():
            if needed[group].hosts >= len(own):
                working |= frozenset(own)
        self._idle = self._idle.after([name for own in hosts.values() for name in own], working, now)

    def _hosts(self) -> dict[str, list[str]]:
        """Return the hosts of each group that do not leave."""
        found: dict[str, list[str]] = {group: [] for group in self._core.ranges}
        for host in self._core.journal.state.hosts:
            if host.role is Role.WORKER and host.counts and host.group in found:
                found[host.group].append(host.request_id)
        return found

    def idle(self, now: float) -> dict[str, float]:
        """Return the hosts that have been idle for as long as their group allows, with the seconds."""
        hosts, found = self._hosts(), {}
        for group, nodes in self._core.ranges.items():
            if self._follows_demand(group, nodes):
                over = self._idle.over(nodes.idle_s, now)
                found.update({h: over[h] for h in hosts[group] if h in over and h not in self.outside.busy})
        return found

    def sizes(self, now: float, *, needed_only: bool = False) -> dict[str, GroupHosts]:
        """Return the number of hosts that each group should have, in the order of the fleet file; with `needed_only`
        without hosts that stay only because they have not been idle for long enough."""
        self.refresh()
        self._read_slots()
        core, state = self._core, self._core.journal.state
        live, asks = self._live, self._asks()
        going = set() if needed_only else self.idle(now).keys() | core.drains.keys()
        found: dict[str, GroupHosts] = {}
        for group, nodes in core.ranges.items():
            slots = self.slots.get(group, 0)
            if self._follows_demand(group, nodes):
                kept = 0 if needed_only else in_use(state, group, going)
                found[group] = demanded(nodes, slots, asks[group], self.outside.wished.get(group), kept)
            else:
                jobs = [j for j in live if j.spec.group in ("", group)]
                found[group] = GroupHosts(target(nodes, slots or 1, jobs, self._next_resize()))
        return found

    def of_jobs(self) -> dict[str, int]:
        """Return the hosts that jobs need of each group, if all groups follow demand."""
        self._read_slots()
        asks = self._asks()
        return {group: hosts_of_jobs(nodes, self.slots.get(group, 0), asks[group])
                for group, nodes in self._core.ranges.items()}

    @property
    def _live(self) -> list[ManagedJob]:
        return [j for j in self._core.jobs.values() if not j.state.ended]

    def _asks(self) -> dict[str, list[JobAsk]]:
        """Return what each group's jobs ask for. The job of the Ray cluster has what waits there in its place."""
        asking = [j for j in self._live if not j.record.cancelled and j.spec.kind != RAY_KIND]
        return by_group([_ask(j) for j in asking], self._core.ranges, self.slots)

    def _follows_demand(self, group: str, nodes: Nodes) -> bool:
        return follows_demand(nodes, self.outside.wished.get(group))

    def _next_resize(self) -> ResizeSpec:
        newest = next(reversed(self._core.jobs.values()), None)
        return newest.spec.resize if newest is not None else self._core.boot.spec.resize

    def _read_slots(self) -> None:
        found: dict[str, int] = {}
        for view in self._core.views():
            found[view.host.group] = min(view.slots, found.get(view.host.group, view.slots))
        self.slots |= found

    @property
    def unknown(self) -> list[str]:
        """Groups that show no number of slots: they have had no host, and offers were not read."""
        self._read_slots()
        return [group for group in self._core.ranges if not self.slots.get(group)]

    def read_offers(self, provider: Provider) -> None:
        """Read the slots per host of unknown groups from offers; called in the provider's thread."""
        unknown = self.unknown
        for part in (p for p in self._core.boot.spec.parts if p.name in unknown):
            needs = (replace(need, max_micros_h=0) for need in part.any_of)
            self.offered[part.name] = found = tuple(o for need in needs for o in provider.offers(need))
            self.slots[part.name] = min((o.slots for o in found), default=0)


def _ask(job: ManagedJob) -> JobAsk:
    return JobAsk(job.id, job.sizing.places, job.spec.min_workers, job.spec.per_host, job.spec.group)


def target(nodes: Nodes, slots: int, jobs: Sequence[ManagedJob], idle: ResizeSpec) -> int:
    """Return the number of hosts for `jobs`, which have not ended, in a group that always has hosts. `idle`: the
    resizing of the next expected job, used while there is none."""
    if not jobs:
        return hosts_wanted(nodes, slots, [first_workers(idle)])
    held = [j.sizing.held(j.membership, nodes.target * slots) for j in jobs]
    return hosts_wanted(nodes, slots, [j.sizing.asked_of_fleet() for j in jobs], held)
