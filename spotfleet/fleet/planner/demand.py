"""Hosts that the demand of a Ray cluster needs, by group of hosts. Pure.

Three needs are packed apart, each largest first, each piece onto the first room that fits it:

    what waits          placement groups, tasks and actors   onto free room
    work that leaves    what runs on hosts that leave        onto free room; what waits may be this very work
    room to keep        `request_cluster_resources`          onto whole hosts, whatever runs there

Room is that of nodes that stay, then that of hosts that boot, as if they were free: else each tick would buy again.
What is left opens new hosts of the first group that fits. A group gets as many new hosts as the largest of the three
needs takes, and no more than each observation of the last moments asks for: the cluster reports what waits and what is
free at slightly different times, so that a task may for a moment both wait and run.

A host ends once it has been idle for its group's `idle_s`, the longest idle first, within the group's range. It stays
while one of the needs is packed onto it, and while anything that waits would fit it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spotfleet.protocol.ray_cluster import RayGang, RayNode, RayRequest, RayState
from spotfleet.words import about, counted

CONFIRM_S = 0.6  # Ray's nodes report five times in this time
SPARE = 1e-4  # Ray counts in ten-thousandths
ACCELERATOR = "GPU"
OF_A_GROUP = "_group_"  # in a resource that only a placement group has, once it is placed

Shape = Mapping[str, float]


class RecentStates:
    """The observations that held at some time of the last CONFIRM_S."""

    def __init__(self) -> None:
        self._held: list[tuple[float, RayState]] = []  # since when, oldest first

    def update(self, newest: RayState, now: float) -> tuple[RayState, ...]:
        """Return them, the newest last. `now` is monotonic."""
        if not self._held or self._held[-1][1] is not newest:
            self._held.append((now, newest))
        while len(self._held) > 1 and self._held[1][0] <= now - CONFIRM_S:
            del self._held[0]
        return tuple(state for _, state in self._held)


@dataclass(frozen=True)
class DemandHost:
    """A host that exists or boots."""

    name: str
    leaving: bool = False  # it drains, or the cloud takes it
    held: bool = False  # it has workers of the fleet's own jobs
    in_ray: bool = False  # the Ray cluster has it, or gets it next
    unseen_s: float = 0.0  # how long the cluster has had no node of it, as while it boots


@dataclass(frozen=True)
class DemandGroup:
    """Hosts of one kind, with their range. The groups' order is that of preference, the cheapest first."""

    name: str
    min: int
    max: int
    resources: Shape  # those of one host
    hosts: tuple[DemandHost, ...] = ()
    idle_s: float = 300.0
    jobs: int = 0  # hosts that the fleet's own jobs need, counting the ones they have

    @property
    def staying(self) -> list[DemandHost]:
        return [h for h in self.hosts if not h.leaving]


@dataclass(frozen=True)
class GroupTarget:
    """Number of hosts of a group that should exist."""

    group: str
    hosts: int
    new: int  # those of them that do not exist yet
    why: str


@dataclass(frozen=True)
class UnmetDemand:
    """What waits for a host that there will not be."""

    shape: str
    why: str  # for people


@dataclass(frozen=True)
class DemandPlan:
    groups: tuple[GroupTarget, ...]
    ends: tuple[tuple[str, str], ...] = ()  # (host, why), in the order in which they should end
    unmet: tuple[UnmetDemand, ...] = ()


def plan_demand(states: Sequence[RayState], groups: Sequence[DemandGroup], most: int | None = None) -> DemandPlan:
    """Return which hosts should exist, and which should end.

    `states`: all observations of the last moments, the newest last. While the cluster does not answer nothing is known
    of its work: no host is bought for it, and none ends. `most`: hosts of all groups that the cluster may have; None:
    as many as there may be.
    """
    known = bool(states) and all(s.up for s in states)
    views = [_View(s, groups, most) for s in states] if known else []
    newest = views[-1] if views else None
    targets = []
    for group in groups:
        stay, own = len(group.staying), _own(group, newest)
        new = max(own.new, min((v.new(group.name) for v in views), default=0))
        hosts = max(min(stay + new, max(group.max, group.min)), group.min)
        why = newest.why(group.name) if newest is not None and new > own.new else ""
        targets.append(GroupTarget(group.name, hosts, max(0, hosts - stay), why or _standing(group, own, newest)))
    ends = [end for group in groups for end in _ends(group, views)]
    lasting = set.intersection(*({one.shape for one in v.unmet} for v in views)) if views else set()
    unmet = tuple(one for v in views[-1:] for one in v.unmet if one.shape in lasting)
    return DemandPlan(tuple(targets), tuple(ends), unmet)


@dataclass(frozen=True)
class _Own:
    """Hosts that a group needs whatever Ray asks for."""

    new: int  # that do not exist yet
    for_jobs: int  # those of them that a job takes
    reserved: frozenset[str]  # existing hosts that a job takes soon


def _own(group: DemandGroup, view: _View | None) -> _Own:
    free = [h for h in group.staying if not (h.held or h.in_ray or (view is not None and h.name in view.nodes))]
    open_jobs = max(0, min(group.jobs, group.max) - sum(h.held for h in group.staying))
    reserved = frozenset(h.name for h in free[:open_jobs])
    room = max(0, group.max - len(group.staying))
    for_jobs = min(room, open_jobs - len(reserved))
    return _Own(max(for_jobs, group.min - len(group.staying)), for_jobs, reserved)


def _standing(group: DemandGroup, own: _Own, view: _View | None) -> str:
    """Return why the group has the hosts that it has, for people."""
    stay = group.staying
    busy = sum(view.is_busy(h.name) for h in stay) if view is not None else 0
    held, unseen = sum(h.held for h in stay), sum(view is None or h.name not in view.nodes for h in stay)
    idle = sum(view is not None and h.name in view.nodes and not view.is_busy(h.name) and not h.held for h in stay)
    jobs = f"jobs need {counted(group.jobs, 'host')}" if group.jobs else ""
    parts = [jobs, f"at least {group.min}" if own.new > own.for_jobs else "",
             f"{counted(busy, 'host')} with Ray's work" if busy else "",
             f"{idle} idle" if idle else "", f"{unseen} not in the cluster yet" if unseen and not held else ""]
    return ", ".join(filter(None, parts)) or "nothing waits for a host"


def _ends(group: DemandGroup, views: Sequence[_View]) -> list[tuple[str, str]]:
    """Return the hosts of a group that are idle for too long, within its range."""
    if not views:
        return []
    newest, reserved = views[-1], _own(group, views[-1]).reserved
    idle = []
    for host in group.staying:
        node = newest.nodes.get(host.name)
        idle_for_s = node.idle_s if node is not None else host.unseen_s
        if host.held or host.name in reserved or idle_for_s < group.idle_s:
            continue
        if any(v.keeps(host.name) or v.is_busy(host.name) for v in views):
            continue
        what = "idle" if node is not None else "without a node in the Ray cluster"
        idle.append((-idle_for_s, host.name, f"{what} for {about(idle_for_s)}, and no task needs it"))
    return [(name, why) for _, name, why in sorted(idle)[:max(0, len(group.staying) - group.min)]]


# ---- one observation


class _View:
    """The needs of one observation, packed."""

    def __init__(self, state: RayState, groups: Sequence[DemandGroup], most: int | None) -> None:
        self.state, self.groups, self.most = state, groups, most
        self.nodes: dict[str, RayNode] = {n.host: n for n in state.nodes if n.host}
        self._owns = {g.name: _own(g, self) for g in groups}
        waits = self._packing()
        self._of_gangs(waits)
        for request in _decreasing(r for r in state.pending if not _is_inside(r.resources)):
            waits.put(request, f"{counted(request.count, 'task or actor', 'tasks or actors')} "
                               f"{'waits' if request.count == 1 else 'wait'} for {shape_text(request.resources)}")
        self._packings = [waits]
        if leaving := self._leaving():
            self._packings.append(leaves := self._packing())
            for request, why in leaving:
                leaves.put(request, why)
        if state.constraints:
            self._packings.append(keeps := self._packing(total=True))
            for request in _decreasing(state.constraints):
                keeps.put(request, f"a program keeps room for {request.count} x {shape_text(request.resources)}")
        self.unmet = tuple(dict.fromkeys(found for p in self._packings for found in p.unmet))

    def is_busy(self, host: str) -> bool:
        node = self.nodes.get(host)
        return node is not None and node.idle_s <= 0

    def new(self, group: str) -> int:
        return max(p.new[group] for p in self._packings)

    def why(self, group: str) -> str:
        return "; ".join(dict.fromkeys(why for p in self._packings for why in p.whys.get(group, ())))

    def keeps(self, host: str) -> bool:
        """Return whether a need is packed onto the host, or anything that waits would fit it."""
        if any(host in p.used for p in self._packings):
            return True
        free = self._room_of(host)
        return any(_times(free, r.resources, 1) for r in self.state.pending if not _is_inside(r.resources))

    def _room_of(self, host: str) -> Shape:
        node = self.nodes.get(host)
        if node is not None:
            return node.free
        return next(g.resources for g in self.groups for h in g.hosts if h.name == host)

    def _packing(self, *, total: bool = False) -> _Packing:
        """Return the room that stays. `total`: of whole hosts; else the free room.

        Nodes with work come first, so that idle ones may end; hosts that boot come last.
        """
        leaving = {h.name for g in self.groups for h in g.hosts if h.leaving}
        reserved = frozenset().union(*(o.reserved for o in self._owns.values()))
        nodes = [n for n in self.state.nodes if not n.draining and n.host not in leaving | reserved]
        nodes.sort(key=lambda n: (n.idle_s, n.host, n.node_id))
        rooms = [_Room(n.host, dict(n.total if total else n.free)) for n in nodes]
        draining = {n.host for n in self.state.nodes if n.draining}
        for group in self.groups:
            boots = [h.name for h in group.staying if h.name not in self.nodes and not h.held]
            rooms += [_Room(name, dict(group.resources)) for name in boots if name not in reserved | draining]
        packing = _Packing(rooms, self.groups, self.most)
        packing.hosts = sum(not h.held and h.name not in reserved for g in self.groups for h in g.staying)
        for group in self.groups:
            packing.add_own(group, self._owns[group.name])
        return packing

    def _of_gangs(self, packing: _Packing) -> None:
        gangs = sorted(self.state.gangs, key=lambda g: sorted((_size(b.resources) for b in g.bundles), reverse=True),
                       reverse=True)
        for gang in gangs:
            packing.put_gang(gang)

    def _leaving(self) -> list[tuple[RayRequest, str]]:
        """Return the work of each node that leaves, in one piece, largest first."""
        leaving = {h.name for g in self.groups for h in g.hosts if h.leaving}
        known = {r for g in self.groups for r in g.resources}
        found = []
        for node in self.state.nodes:
            used = {r: amount for r, total in node.total.items()
                    if r in known and (amount := total - node.free.get(r, 0.0)) > SPARE}
            if used and (node.draining or node.host in leaving):
                found.append((RayRequest(used), f"{node.host or 'a node'} leaves and runs {shape_text(used)}"))
        return sorted(found, key=lambda f: _size(f[0].resources), reverse=True)


# ---- packing


@dataclass
class _Room:
    host: str  # "" for a node that is no host of the fleet, and for a new host
    free: dict[str, float]
    new: bool = False

    def take(self, shape: Shape, times: int) -> None:
        for resource, amount in shape.items():
            self.free[resource] = self.free.get(resource, 0.0) - amount * times


@dataclass
class _Packing:
    """Rooms with the pieces that are packed onto them, and the new hosts that these take."""

    rooms: list[_Room]
    groups: Sequence[DemandGroup]
    most: int | None
    hosts: int = 0  # that the cluster has or gets
    new: Counter[str] = field(default_factory=Counter)  # group -> hosts
    whys: dict[str, list[str]] = field(default_factory=dict)  # group -> why it has new ones
    used: set[str] = field(default_factory=set)  # hosts that something is packed onto
    unmet: list[UnmetDemand] = field(default_factory=list)

    def add_own(self, group: DemandGroup, own: _Own) -> None:
        """Add the hosts that a group gets anyway; a job takes some of them."""
        self.new[group.name] += own.new
        self.hosts += own.new - own.for_jobs
        self.rooms += [_Room("", dict(group.resources), new=True) for _ in range(own.new - own.for_jobs)]

    def put(self, request: RayRequest, why: str) -> None:
        """Pack as many of the request as there are, or may be, hosts for."""
        left = self._put(request.resources, request.count, why)
        if left:
            self._refuse(request.resources, why)

    def put_gang(self, gang: RayGang) -> None:
        """Pack all bundles, or none."""
        bundles = _decreasing(gang.bundles)
        kind = " on one host" if gang.pack else " on as many hosts" if gang.spread else ""
        shapes = ", ".join(f"{b.count} x {shape_text(b.resources)}" for b in bundles)
        why = f"a placement group waits for {shapes}{kind}"
        if gang.pack:
            whole: Counter[str] = Counter()
            for bundle in bundles:
                whole.update({r: amount * bundle.count for r, amount in bundle.resources.items()})
            bundles = [RayRequest(dict(whole))]
        trial = _Packing([_Room(r.host, dict(r.free), r.new) for r in self.rooms], self.groups, self.most, self.hosts,
                         Counter(self.new), {g: list(w) for g, w in self.whys.items()}, set(self.used))
        apart: list[_Room] | None = [] if gang.spread else None
        for bundle in bundles:
            if trial._put(bundle.resources, bundle.count, why, apart):
                self._refuse(bundle.resources, why)
                return
        self.rooms, self.hosts, self.new, self.whys, self.used = (trial.rooms, trial.hosts, trial.new, trial.whys,
                                                                  trial.used)

    def _put(self, shape: Shape, count: int, why: str, apart: list[_Room] | None = None) -> int:
        """Pack `count` pieces; return the number of those left over. `apart`: rooms that may take no piece more."""
        plain = not shape.get(ACCELERATOR)
        left = count
        for room in sorted(self.rooms, key=lambda r: plain and bool(r.free.get(ACCELERATOR))):
            left -= self._put_into(room, shape, left, apart)
        for group in self._kinds(shape):
            while left and len(group.staying) + self.new[group.name] < group.max and not self._is_full:
                room = _Room("", dict(group.resources), new=True)
                self.rooms.append(room)
                self.new[group.name] += 1
                self.hosts += 1
                if why not in self.whys.setdefault(group.name, []):
                    self.whys[group.name].append(why)
                left -= self._put_into(room, shape, left, apart)
        return left

    @property
    def _is_full(self) -> bool:
        return self.most is not None and self.hosts >= self.most

    def _put_into(self, room: _Room, shape: Shape, count: int, apart: list[_Room] | None) -> int:
        if apart is not None and any(r is room for r in apart):
            return 0
        times = min(_times(room.free, shape, count), count if apart is None else 1)
        if times:
            room.take(shape, times)
            if room.host:
                self.used.add(room.host)
            if apart is not None:
                apart.append(room)
        return times

    def _kinds(self, shape: Shape) -> list[DemandGroup]:
        """Return the groups whose hosts have room for one piece. Hosts with a GPU are bought for pieces without one
        only where no other kind fits, also while there may be no more of the others."""
        fitting = [g for g in self.groups if _times(g.resources, shape, 1)]
        if not shape.get(ACCELERATOR):
            return [g for g in fitting if not g.resources.get(ACCELERATOR)] or fitting
        return fitting

    def _refuse(self, shape: Shape, why: str) -> None:
        kinds = self._kinds(shape)
        if kinds:
            full = ", ".join(f"{g.max}{f' of group {g.name}' if g.name else ''}" for g in kinds)
            full = f"{self.most} for Ray" if self._is_full else full
            self.unmet.append(UnmetDemand(shape_text(shape), f"{why}: there may be no more hosts than {full}"))
            return
        largest = max(self.groups, key=lambda g: (sum(_times(g.resources, {r: a}, 1) for r, a in shape.items()),
                                                  _size(g.resources)), default=None)
        has = shape_text(largest.resources) if largest is not None else "none"
        of = f" of group {largest.name}" if largest is not None and largest.name else ""
        self.unmet.append(UnmetDemand(shape_text(shape), f"{why}, which fits no host: the largest{of} has {has}"))


def _times(free: Shape, shape: Shape, most: int) -> int:
    """Return how many times `shape` fits, at most `most`."""
    times = most
    for resource, amount in shape.items():
        if amount > 0:
            times = min(times, int((free.get(resource, 0.0) + SPARE) / amount))
    return max(0, times)


def _size(shape: Shape) -> tuple:
    return (shape.get(ACCELERATOR, 0.0), shape.get("CPU", 0.0), shape.get("memory", 0.0),
            sum(a for r, a in shape.items() if r != "memory"), sorted(shape.items()))


def _decreasing(requests: Iterable[RayRequest]) -> list[RayRequest]:
    return sorted((r for r in requests if r.count > 0), key=lambda r: _size(r.resources), reverse=True)


def _is_inside(shape: Shape) -> bool:
    """Return whether the piece runs inside a placement group, which waits itself while it has no room."""
    return any(OF_A_GROUP in resource for resource in shape)


def shape_text(shape: Shape) -> str:
    """Return a shape as Ray's users write it: {'CPU': 1}."""
    parts = (f"'{r}': {amount / 2**30:.1f} GiB" if r == "memory" else f"'{r}': {amount:g}"
             for r, amount in sorted(shape.items()) if amount)
    return "{" + ", ".join(parts) + "}"
