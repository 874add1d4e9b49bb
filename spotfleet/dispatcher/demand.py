"""Hosts for the fleet's Ray cluster: what waits there makes hosts, and idle ones are given back.

    Core.ray_state --fleet/planner/demand.py--> hosts of each group --cloud/group_sizes.py--> planner
                                           '--> idle hosts --`release`: Ray ends the node, if it still is idle--> drain

While there is a Ray cluster every group of the fleet follows demand: its own jobs' and Ray's. Each number of hosts that
differs from the last one is an event, with its reason, and so is each new shape that waits in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from spotfleet import catalog
from spotfleet.catalog.pricing.values import MachineType
from spotfleet.dispatcher.cloud.machines import HostController
from spotfleet.dispatcher.core import Core
from spotfleet.dispatcher.hosts import HostView
from spotfleet.dispatcher.jobs.job import ManagedJob
from spotfleet.fleet.domain.events import DemandDecided, DemandUnmet
from spotfleet.fleet.planner.demand import (
    ACCELERATOR,
    DemandGroup,
    DemandHost,
    DemandPlan,
    RecentStates,
    Shape,
    plan_demand,
)
from spotfleet.fleet.planner.groups import OutsideDemand, Wish
from spotfleet.model import RAY_KIND, HostState, Offer, Role
from spotfleet.plugins import Machines
from spotfleet.protocol.ray_cluster import RayState
from spotfleet.providers.plugin import traits_of

NOT_REPORTED = RayState(False, problem="the head has not reported yet")
MEMORY_SHARE = 0.7  # part of a machine's memory that tasks get: the rest is for Ray's objects and the system
UNKNOWN = 1e6  # CPUs of a machine whose size is not known: one host of it is tried for whatever waits
AGAIN_S = 1.0  # between two looks at the same observation, for hosts that are not in the cluster
ASKED_S = 10.0  # a node that has gone so soon after its release was asked for has been released


class DemandController:
    """Demand of the Ray cluster, for the loop."""

    def __init__(self, core: Core, machines: HostController, release: Callable[[str], bool]) -> None:
        """`release` asks Ray to end the node of a host, if it is idle; it returns whether Ray has accepted that, and is
        called again until then."""
        self._core, self._machines, self._release = core, machines, release
        machines.groups.refresh = self.refresh
        self._recent = RecentStates()
        self._asked: dict[str, tuple[str, float]] = {}  # host -> why and when its release was asked for, monotonic
        self._unseen: dict[str, float] = {}  # host -> since when the cluster has had no node of it, monotonic
        self._shapes: dict[str, Shape] = {}  # group -> one host of it, as its nodes are or were
        self._written: dict[str, int] = {}  # group -> hosts of the last event
        self._unmet: set[str] = set()  # shapes of the last event
        self._plan: DemandPlan | None = None  # None: there is no Ray cluster
        self._planned: tuple[tuple[RayState, ...], list[DemandGroup], float] | None = None  # for what, and when

    def lines(self) -> list[str]:
        """Return what waits in Ray for hosts that there will not be, for users."""
        return [f"Ray: {one.why}" for one in self._plan.unmet] if self._plan is not None and self._unmet else []

    def step(self) -> None:
        """Follow the newest state, and give idle hosts back; called in each step of the loop."""
        self.refresh()
        plan, core = self._plan, self._core
        if plan is None:
            return
        now = time.monotonic()
        ends = {**self._released(now), **dict(plan.ends)}
        for host, why in ends.items():
            if host in core.drains:
                continue
            if self._release(host):
                core.drains[host] = why
                core.tick_soon()
            else:
                self._asked[host] = why, now
        self.refresh()

    def _released(self, now: float) -> dict[str, str]:
        """Return the hosts whose nodes Ray has ended since it was asked to. Their raylets start no other node, and the
        plan, which counts their idle time anew, does not name them."""
        self._asked = {h: (why, at) for h, (why, at) in self._asked.items() if now - at < ASKED_S}
        state = self._core.ray_state
        if state is None or not state.up:
            return {}
        here = {n.host for n in state.nodes if not n.draining}
        return {h: why for h, (why, _) in self._asked.items() if h not in here}

    def refresh(self) -> None:
        """Follow the newest state and the hosts that there are now, and record what changes.

        A tick calls it as well: a host that has begun to leave since the last step is to be replaced only if its work
        needs another.
        """
        job = _ray_job(self._core.jobs.values())
        state = self._core.ray_state or (NOT_REPORTED if job is not None else None)
        if state is None:
            if self._plan is not None:
                self._plan, self._recent, self._unseen, self._written, self._unmet = None, RecentStates(), {}, {}, set()
                self._machines.groups.outside = OutsideDemand()
            return
        now = time.monotonic()
        groups = self._groups(self._core.views(), state, job, now)
        plan = self._planned_for(self._recent.update(state, now), groups, job.spec.max_workers if job else None, now)
        self._write(plan, groups)
        of_jobs = {g.name: g.jobs for g in groups}
        wished = {t.group: Wish(max(0, t.hosts - of_jobs[t.group]), f"Ray: {t.why}") for t in plan.groups}
        working = {n.host for n in state.nodes if n.idle_s <= 0} if state.up else self._hosts_of(job)
        self._machines.groups.outside = OutsideDemand(wished, frozenset(working))
        if job is not None:
            needed = sum(w.hosts for w in wished.values())
            has = sum(h.in_ray and not h.held for g in groups for h in g.staying)  # the schedule takes none of these
            job.sizing.asked, job.sizing.least = max(1, needed, has), min(job.spec.min_workers, needed)

    def _planned_for(self, states: tuple[RayState, ...], groups: list[DemandGroup], most: int | None,
                     now: float) -> DemandPlan:
        last = self._planned
        if self._plan is None or last is None or (
                [id(s) for s in states] != [id(s) for s in last[0]] or (groups != last[1] and (
                    now - last[2] >= AGAIN_S or _names(groups) != _names(last[1])))):
            self._plan, self._planned = plan_demand(states, groups, most), (states, groups, now)
        return self._plan

    def _write(self, plan: DemandPlan, groups: Sequence[DemandGroup]) -> None:
        """Record what has changed since the last event."""
        core, unix = self._core, self._core.unix()
        stay = {g.name: len(g.staying) for g in groups}
        for target in plan.groups:
            if target.hosts != self._written.setdefault(target.group, stay[target.group]):
                self._written[target.group] = target.hosts
                core.journal.note(DemandDecided(unix, target.hosts, target.why, target.group))
        if not all(self._is_known(g.name) for g in groups):
            return  # what fits is not known yet
        shapes = {one.shape: one.why for one in plan.unmet}
        if set(shapes) != self._unmet:
            self._unmet = set(shapes)
            core.journal.note(DemandUnmet(unix, shapes))

    # ---- what the planner needs to know

    def _groups(self, views: Sequence[HostView], state: RayState, job: ManagedJob | None,
                now: float) -> list[DemandGroup]:
        nodes = {n.host: n for n in state.nodes if n.host}
        others = {h for j in self._core.jobs.values() if j is not job for h in j.workers.hosts()}
        raylets = self._hosts_of(job)
        found: dict[str, list[DemandHost]] = {name: [] for name in self._core.ranges}
        for view in views:
            host = view.host
            if host.role is not Role.WORKER or host.state is HostState.STOPPED:
                continue
            name, group = host.request_id, host.group if host.group in found else next(iter(found))
            since = now if name in nodes or not state.up else self._unseen.get(name, now)
            self._unseen[name] = since
            found[group].append(DemandHost(name, view.closed, name in others, name in raylets or name in nodes,
                                           now - since))
            if name in nodes:
                self._shapes[group] = _least([nodes[n.name].total for n in found[group] if n.name in nodes])
        names = {v.host.request_id for v in views}
        self._unseen = {h: since for h, since in self._unseen.items() if h in names}
        of_jobs, ranges = self._machines.groups.of_jobs(), self._core.ranges
        groups = [DemandGroup(name, n.min, self._most(name, found[name]), self._shape(name), tuple(found[name]),
                              n.idle_s, of_jobs.get(name, 0)) for name, n in ranges.items()]
        prices = {g.name: self._price(g.name) for g in groups}
        return sorted(groups, key=lambda g: prices[g.name]) if all(prices.values()) else groups

    def _hosts_of(self, job: ManagedJob | None) -> set[str]:
        return set(job.workers.hosts()) if job is not None else set()

    def _shape(self, group: str) -> Shape:
        """Return the resources of one host: as its nodes have them, else as its machines should; {} if there is no
        offer."""
        return self._shapes.get(group) or _least(self._machines_of(group))

    def _is_known(self, group: str) -> bool:
        """Return whether hosts of the group are as `_shape` returns. If not, one host shows what they have."""
        machines = self._machines_of(group)
        return group in self._shapes or (bool(machines) and all(m["CPU"] < UNKNOWN for m in machines))

    def _most(self, group: str, hosts: Sequence[DemandHost]) -> int:
        nodes = self._core.ranges[group]
        tried = max(1, nodes.min, sum(not h.leaving for h in hosts))
        return nodes.max if self._is_known(group) else min(nodes.max, tried)

    def _machines_of(self, group: str) -> list[Shape]:
        here = traits_of(self._core.boot.spec).machines is Machines.HERE
        kinds = {(o.kind, o.slots, o.accelerator): o for o in self._offers(group)}
        return [_machine(o, here=here) for o in kinds.values()]

    def _price(self, group: str) -> int:
        return min((o.price_micros_h for o in self._offers(group)), default=0)

    def _offers(self, group: str) -> list[Offer]:
        """Return the offers of the group's hosts; without a host, the offers that one would be chosen from."""
        hosts = [h.offer for h in self._core.journal.state.hosts if h.role is Role.WORKER and h.group == group]
        return hosts or list(self._machines.groups.offered.get(group, ()))


def _ray_job(jobs: Iterable[ManagedJob]) -> ManagedJob | None:
    return next((j for j in jobs if j.spec.kind == RAY_KIND and not j.state.ended), None)


def _names(groups: Sequence[DemandGroup]) -> list[DemandGroup]:
    """Return the groups without what only time changes."""
    return [replace(g, hosts=tuple(replace(h, unseen_s=0.0) for h in g.hosts)) for g in groups]


def _least(shapes: Sequence[Shape]) -> Shape:
    """Return what each of several hosts has."""
    if not shapes:
        return {}
    common = set.intersection(*(set(s) for s in shapes))
    return {r: min(s[r] for s in shapes) for r in sorted(common)}


@cache
def _known(provider: str, instance_type: str) -> MachineType | None:
    return next((p.machine for p in catalog.load().prices
                 if p.machine.provider == provider and p.machine.name == instance_type), None)


def _machine(offer: Offer, *, here: bool) -> Shape:
    """Return the resources that Ray would find on a machine of this offer. `here`: hosts share this machine, and each
    offers a CPU for each slot."""
    known = _known(offer.provider, offer.instance_type)
    memory_gib = known.memory_gib if known is not None else 0.0
    shape = {"CPU": float(offer.slots)}
    if not here:
        shape = {"CPU": float(known.vcpus if known is not None and known.vcpus else UNKNOWN),
                 "memory": (memory_gib or UNKNOWN) * 2**30 * MEMORY_SHARE}
    if offer.accelerator:
        shape |= {ACCELERATOR: float(offer.slots), f"accelerator_type:{offer.accelerator}": 1.0}
    return shape
