"""Random histories of a Ray cluster's demand and the hosts that it makes, in virtual time.

`python -m tests.support.fleet.demand_history SEED [COUNT]` replays them; a failure prints its seed and story.

Tasks and placement groups come, run and go; hosts boot late, are refused, die and are drained; the cluster reports what
waits and what is free at different times. What must hold:
- a purchase is no larger than a plain first-fit of whole pieces makes it, on the newest report;
- a host that ends has been idle for `idle_s` and runs nothing;
- each group keeps within its range, hosts that leave aside;
- once requests and faults end: within a boot all that can run runs, and not one host more is bought after that;
- once the work is done: just the least hosts of each group are left, after `idle_s`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from spotfleet.fleet.planner.demand import DemandGroup, DemandHost, DemandPlan, RecentStates, plan_demand
from spotfleet.protocol.ray_cluster import RayGang, RayNode, RayRequest, RayState

TICK_S = 0.5  # as often the cluster reports
QUIET_TICK_S = 5.0
LAG_S = 0.5  # by which either half of a report may be old
LONG_BOOT_S = 90.0
SLACK_S = 10.0
KINDS = {"cpu": {"CPU": 4.0, "memory": 8.0}, "large": {"CPU": 16.0, "memory": 64.0}, "gpu": {"CPU": 8.0, "GPU": 2.0}}
SHAPES = ({"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 3.0}, {"CPU": 0.5, "memory": 3.0}, {"CPU": 9.0}, {"GPU": 1.0},
          {"GPU": 1.0, "CPU": 4.0}, {"GPU": 0.5}, {"GPU": 4.0}, {"TPU": 1.0})


@dataclass
class Piece:
    """A task, an actor or a bundle."""

    shape: dict[str, float]
    seconds: float
    host: str = ""
    left_s: float = 0.0


@dataclass
class Gang:
    pieces: list[Piece]
    spread: bool
    pack: bool

    @property
    def placed(self) -> bool:
        return all(p.host for p in self.pieces)


@dataclass
class SimHost:
    name: str
    group: str
    node_at: float  # when its node is in the cluster
    gone_at: float = float("inf")
    leaving: bool = False
    draining: bool = False  # its node, in Ray
    idle_since: float = 0.0
    unseen_since: float = 0.0


@dataclass
class DemandSim:
    rng: random.Random
    faulty: bool = True  # boots take long or fail, hosts die and are drained
    now: float = 1000.0
    hosts: dict[str, SimHost] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    gangs: list[Gang] = field(default_factory=list)
    kept: list[RayRequest] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        names = rng.choice([["cpu"], ["cpu", "gpu"], ["cpu", "large", "gpu"], ["gpu"]])
        self.idle_s = rng.choice([5.0, 30.0, 300.0])
        self.groups = [DemandGroup(n, (least := rng.choice([0, 0, 1, 2])), least + rng.randint(1, 6), KINDS[n],
                                   idle_s=self.idle_s) for n in names]
        self.boot_s = rng.choice([1.0, 20.0, LONG_BOOT_S])
        self.bought = 0
        self.bought_at = 0.0
        self.recent = RecentStates()
        self._past: list[tuple[float, tuple[RayNode, ...], RayState]] = []
        self._states: tuple[RayState, ...] = ()

    # ---- the cluster

    def _free(self, host: SimHost) -> dict[str, float]:
        free = dict(KINDS[host.group])
        for piece in self._all():
            if piece.host == host.name:
                for resource, amount in piece.shape.items():
                    free[resource] -= amount
        return free

    def _all(self) -> Iterable[Piece]:
        yield from self.pieces
        for gang in self.gangs:
            yield from gang.pieces

    def runs(self, host: str) -> list[Piece]:
        return [p for p in self._all() if p.host == host]

    def _schedule(self) -> None:
        """Place what waits as Ray may: in any order, on any node with room; a group as a whole."""
        rooms = {h.name: self._free(h) for h in self.hosts.values()
                 if h.node_at <= self.now and not h.draining and not h.leaving}
        for gang in self.rng.sample(self.gangs, len(self.gangs)):
            if not gang.placed:
                self._place_gang(gang, rooms)
        for piece in self.rng.sample(self.pieces, len(self.pieces)):
            if not piece.host and (fitting := [h for h, free in rooms.items() if _fits(free, piece.shape)]):
                self._start(piece, self.rng.choice(fitting), rooms)

    def _place_gang(self, gang: Gang, rooms: dict[str, dict[str, float]]) -> None:
        trial, places = {h: dict(f) for h, f in rooms.items()}, []
        for piece in sorted(gang.pieces, key=lambda p: -sum(p.shape.values())):
            fitting = [h for h, free in trial.items() if _fits(free, piece.shape) and not (gang.spread and h in places)
                       and not (gang.pack and places and h != places[0])]
            if gang.pack and not places:
                whole = _sum(p.shape for p in gang.pieces)
                fitting = [h for h in fitting if _fits(trial[h], whole)]
            if not fitting:
                return
            places.append(fitting[0])
            _take(trial[fitting[0]], piece.shape)
        for piece, host in zip(sorted(gang.pieces, key=lambda p: -sum(p.shape.values())), places, strict=True):
            self._start(piece, host, rooms)

    def _start(self, piece: Piece, host: str, rooms: dict[str, dict[str, float]]) -> None:
        piece.host, piece.left_s = host, piece.seconds
        _take(rooms[host], piece.shape)

    def _work(self, tick_s: float) -> None:
        for piece in self._all():
            piece.left_s -= tick_s if piece.host else 0.0
        ended = [p for p in self.pieces if p.host and p.left_s <= 0]
        self.pieces = [p for p in self.pieces if not (p.host and p.left_s <= 0)]
        done = [g for g in self.gangs if g.placed and all(p.left_s <= 0 for p in g.pieces)]
        self.gangs = [g for g in self.gangs if not any(g is d for d in done)]
        for host in self.hosts.values():
            if self.runs(host.name) or any(p.host == host.name for p in ended) or any(
                    p.host == host.name for g in done for p in g.pieces):
                host.idle_since = self.now

    def _report(self) -> RayState:
        nodes = tuple(RayNode(f"id-{h.name}", h.name, dict(KINDS[h.group]), self._free(h), h.draining,
                              0.0 if self.runs(h.name) else max(TICK_S, self.now - max(h.idle_since, h.node_at)))
                      for h in self.hosts.values() if h.node_at <= self.now)
        waits = tuple(RayRequest(dict(p.shape)) for p in self.pieces if not p.host)
        gangs = tuple(RayGang(tuple(RayRequest(dict(p.shape)) for p in g.pieces), g.spread, g.pack)
                      for g in self.gangs if not g.placed)
        self._past.append((self.now, nodes, RayState(True, (), waits, gangs, tuple(self.kept))))
        self._past = [p for p in self._past if p[0] >= self.now - LAG_S]
        (_, nodes, _), (_, _, rest) = self.rng.choice(self._past), self.rng.choice(self._past)
        return RayState(True, nodes, rest.pending, rest.gangs, rest.constraints)

    # ---- the fleet

    def view(self) -> list[DemandGroup]:
        reported = {n.host for s in self._states[-1:] for n in s.nodes}
        for host in self.hosts.values():
            host.unseen_since = self.now if host.name in reported else host.unseen_since
        return [replace(g, hosts=tuple(DemandHost(h.name, h.leaving, unseen_s=self.now - h.unseen_since)
                                       for h in self.hosts.values() if h.group == g.name)) for g in self.groups]

    def _decide(self) -> None:
        groups = self.view()
        plan = plan_demand(self._states, groups)
        self._check(plan, groups)
        for target in plan.groups:
            for _ in range(target.new):
                self._launch(target.group, target.why)
        for host, why in plan.ends:
            self._release(self.hosts[host], why)

    def _launch(self, group: str, why: str) -> None:
        self.bought += 1
        self.bought_at = self.now
        name = f"h-{self.bought}"
        if self.faulty and self.rng.random() < 0.1:
            self.log.append("refused")
            return
        boot_s = self.boot_s * (self.rng.uniform(0.5, 3.0) if self.faulty else 1.0)
        self.hosts[name] = SimHost(name, group, self.now + boot_s, unseen_since=self.now)
        if boot_s > 2 * self.boot_s:
            self.log.append("late")
        self._say(f"launch {name} in {group}: {why}")

    def _release(self, host: SimHost, why: str) -> None:
        """Drain an idle host as Ray does, unless it runs something by now."""
        if self.runs(host.name):
            self.log.append("no longer idle")
            return
        assert host.node_at > self.now or self.now - max(host.idle_since, host.node_at) >= self.idle_s - 2 * LAG_S, (
            f"{host.name} was not idle for long enough")
        host.leaving = host.draining = True
        host.gone_at = self.now + 2.0
        self.log.append("idle")
        self._say(f"end {host.name}: {why}")

    def _say(self, text: str) -> None:
        self.log.append(f"{self.now - 1000:8.2f} {text}")

    def _check(self, plan: DemandPlan, groups: list[DemandGroup]) -> None:
        if not self._states:
            return
        least = plain_first_fit(self._states[-1], groups) if any(t.new for t in plan.groups) else {}
        for target, group in zip(plan.groups, groups, strict=True):
            assert target.new <= least.get(group.name, 0), (
                f"{target.new} hosts of {group.name} bought, first-fit needs {least[group.name]}")
            assert group.min <= target.hosts <= group.max, f"{target.hosts} hosts of {group.name}"

    # ---- faults and time

    def _trouble(self) -> None:
        rng = self.rng
        if self.hosts and rng.random() < 0.004:
            host = self.hosts.pop(rng.choice(list(self.hosts)))
            self._lose(host)
            self.log.append("died")
        staying = [h for h in self.hosts.values() if not h.leaving]
        if staying and rng.random() < 0.004:
            host = rng.choice(staying)
            host.leaving = host.draining = True
            host.gone_at = self.now + rng.choice([2.0, 30.0, 120.0])
            self.log.append("drained")

    def _lose(self, host: SimHost) -> None:
        for gang in self.gangs:
            if any(p.host == host.name for p in gang.pieces):
                for piece in gang.pieces:
                    piece.host = ""
        for piece in self.pieces:
            if piece.host == host.name:
                piece.host = ""

    def _demand(self, seconds: tuple[float, ...]) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.55:
            shape, many = rng.choice(SHAPES), rng.choice([1, 1, 2, 5, 12])
            lasts_s = rng.choice(seconds)
            self.pieces += [Piece(shape, lasts_s) for _ in range(many)]
        elif kind < 0.75:
            shape, strict = rng.choice(SHAPES[:8]), rng.choice(["", "spread", "pack"])
            lasts_s = rng.choice(seconds)
            self.gangs.append(Gang([Piece(shape, lasts_s) for _ in range(rng.randint(1, 4))], strict == "spread",
                                   strict == "pack"))
        elif kind < 0.85 and self.pieces:
            waiting = [p for p in self.pieces if not p.host]
            gone = rng.choice(waiting or self.pieces)
            self.pieces = [p for p in self.pieces if p is not gone]
            self.log.append("taken back")
        elif kind < 0.95:
            self.kept = [] if self.kept else [RayRequest(rng.choice(SHAPES[:4]), rng.randint(1, 6))]

    def step(self, tick_s: float = TICK_S, *, faults: bool = False) -> None:
        self.now += tick_s
        if faults:
            self._trouble()
        for host in [h for h in self.hosts.values() if h.gone_at <= self.now]:
            del self.hosts[host.name]
            self._lose(host)
        self._work(tick_s)
        self._schedule()
        self._states = self.recent.update(self._report(), self.now)
        self._decide()

    def run(self, seconds: float, *, faults: bool = False) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.step(faults=faults and self.faulty)

    def run_quietly(self, seconds: float) -> None:
        for _ in range(int(seconds / QUIET_TICK_S) + 1):
            self.step(QUIET_TICK_S)


def history(seed: int) -> DemandSim:
    rng = random.Random(seed)
    sim = DemandSim(rng, faulty=rng.random() < 0.7)
    try:
        for _ in range(rng.randint(3, 10)):
            sim._demand((2.0, 15.0, 60.0, 200.0))
            sim.run(rng.choice([0.5, 3.0, 20.0, 60.0]), faults=True)
        _settle(sim)
    except AssertionError as error:
        story = "\n".join(line for line in sim.log[-60:] if line[:1] == " ")
        raise AssertionError(f"seed {seed}: {error}\n{story}\n"
                             f"again: python -m tests.support.fleet.demand_history {seed}") from None
    return sim


def _settle(sim: DemandSim) -> None:
    """No more faults or requests: what fits runs, nothing more is bought, then only the least hosts are left."""
    sim.faulty = False
    for piece in sim._all():  # for long enough that nothing ends before all hosts are up
        piece.seconds = 10_000.0
        piece.left_s = 10_000.0
    sim.run(SLACK_S)
    sim.run_quietly(120.0 + 3 * LONG_BOOT_S)
    settled, bought = sim.now, sim.bought
    sim.run(SLACK_S)
    sim.run_quietly(sim.boot_s)
    assert sim.bought == bought, f"it goes on buying: {sim.bought - bought} hosts more after {settled:.0f}"
    final = plan_demand(sim._states[-1:], sim.view())
    assert all(not g.new for g in final.groups), final
    _nothing_waits_that_fits(sim)
    sim.pieces, sim.gangs, sim.kept = [], [], []
    sim.run_quietly(sim.idle_s + SLACK_S)
    assert sim.bought == bought, "hosts were bought for nothing"
    for group in sim.groups:
        left = sum(h.group == group.name for h in sim.hosts.values())
        assert left == group.min, f"{left} hosts of {group.name} are left, its min is {group.min}"


def _nothing_waits_that_fits(sim: DemandSim) -> None:
    """A piece waits only if no node has room for it and the groups whose hosts fit it are full."""
    for piece in [p for p in sim.pieces if not p.host]:
        assert not any(_fits(sim._free(h), piece.shape) for h in sim.hosts.values()), f"{piece} waits beside free room"
        for group in sim.groups:
            own = [h for h in sim.hosts.values() if h.group == group.name]
            spared = group.resources.get("GPU") and not piece.shape.get("GPU") and any(
                _fits(g.resources, piece.shape) and not g.resources.get("GPU") for g in sim.groups)
            assert spared or len(own) >= group.max or not _fits(group.resources, piece.shape), (
                f"{piece} waits, and {group.name} has {len(own)} of {group.max} hosts")


# ---- the plain first-fit


def plain_first_fit(state: RayState, groups: list[DemandGroup]) -> dict[str, int]:
    """Return the hosts that one piece after another takes, for the needs apart, and at least up to `min`."""
    hosts = {h.name: g for g in groups for h in g.hosts}
    leaving = {h.name for g in groups for h in g.hosts if h.leaving}
    stays = [n for n in state.nodes if not n.draining and n.host not in leaving]
    boots = [dict(hosts[h].resources) for h in hosts if h not in leaving and h not in {n.host for n in state.nodes}]
    waiting = [(r.resources, None) for r in state.pending for _ in range(r.count)]
    gangs = [(g, [b.resources for b in g.bundles for _ in range(b.count)]) for g in state.gangs]
    left = [({r: a - n.free[r] for r, a in n.total.items() if a > n.free[r]}, None) for n in state.nodes
            if n.draining or n.host in leaving]
    kept = [(r.resources, None) for r in state.constraints for _ in range(r.count)]
    found = dict.fromkeys((g.name for g in groups), 0)
    for free, pieces, of in (([dict(n.free) for n in stays], waiting, gangs),
                             ([dict(n.free) for n in stays], left, []),
                             ([dict(n.total) for n in stays], kept, [])):
        bins = _Bins(free + [dict(b) for b in boots], groups)
        for gang, bundles in sorted(of, key=lambda g: sorted(map(_weight, g[1]), reverse=True), reverse=True):
            bins.add_gang(gang, sorted(bundles, key=_weight, reverse=True))
        for shape, _ in sorted(pieces, key=lambda p: _weight(p[0]), reverse=True):
            bins.add(shape)
        found = {g: max(n, bins.new[g]) for g, n in found.items()}
    return found


class _Bins:
    def __init__(self, free: list[dict[str, float]], groups: list[DemandGroup]) -> None:
        self.free, self.groups = free, groups
        self.new = {}
        for g in groups:
            self.new[g.name] = max(0, g.min - len(g.staying))
            self.free += [dict(g.resources) for _ in range(self.new[g.name])]

    def add_gang(self, gang: RayGang, shapes: list[dict[str, float]]) -> None:
        before, bought = [dict(f) for f in self.free], dict(self.new)
        shapes = [_sum(shapes)] if gang.pack else shapes
        used: list[int] = []
        for shape in shapes:
            place = self.add(shape, used if gang.spread else [])
            if place is None:
                self.free, self.new = before, bought
                return
            used.append(place)

    def add(self, shape: dict[str, float], apart: Iterable[int] = ()) -> int | None:
        if not any(shape.values()):
            return 0
        order = range(len(self.free))
        if not shape.get("GPU"):
            order = sorted(order, key=lambda n: bool(self.free[n].get("GPU")))
        for n in order:
            if n not in apart and _fits(self.free[n], shape):
                _take(self.free[n], shape)
                return n
        fitting = [g for g in self.groups if _fits(g.resources, shape)]
        if not shape.get("GPU") and any(not g.resources.get("GPU") for g in fitting):
            fitting = [g for g in fitting if not g.resources.get("GPU")]
        for group in fitting:
            if len(group.staying) + self.new[group.name] < group.max:
                self.new[group.name] += 1
                self.free.append(dict(group.resources))
                _take(self.free[-1], shape)
                return len(self.free) - 1
        return None


def _weight(shape: dict[str, float]) -> tuple:
    return (shape.get("GPU", 0.0), shape.get("CPU", 0.0), shape.get("memory", 0.0))


def _fits(free: dict[str, float], shape: dict[str, float]) -> bool:
    return all(free.get(r, 0.0) >= a - 1e-6 for r, a in shape.items())


def _take(free: dict[str, float], shape: dict[str, float]) -> None:
    for resource, amount in shape.items():
        free[resource] -= amount


def _sum(shapes: Iterable[dict[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for shape in shapes:
        for resource, amount in shape.items():
            found[resource] = found.get(resource, 0.0) + amount
    return found


if __name__ == "__main__":
    first = int(sys.argv[1])
    for seed in range(first, first + int((*sys.argv, "1")[2])):
        done = history(seed)
        print(seed, f"{done.bought} bought", sorted({line for line in done.log if line[:1] != " "}))
