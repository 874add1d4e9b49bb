"""Emulated cloud with the liberties of EC2, for histories of planner and reconciler.

- It takes any of the pools that a launch names.
- It lists only the newest run of a host.
- It may start a host again that has ended, as another machine with another disk under the same name; then nothing
  stops it but a second end. Or it makes a second machine beside one that lives.
"""

from __future__ import annotations

import random
from dataclasses import replace

from spotfleet.fleet.domain.events import HostListed
from spotfleet.model import SECOND, CloudHost, CloudState, Offer, Run
from spotfleet.providers import LaunchRequest
from spotfleet.providers.local.inprocess import ManualClock
from spotfleet.providers.local.market.book import LocalHost
from spotfleet.providers.local.market.market import LocalMarket
from spotfleet.providers.local.market.pools import MarketRules
from tests.support.fleet.fleet_world import Cloud, World
from tests.support.fleet.planner_history import KINDS, TROUBLES, PlannerSim, Trouble


class Ec2Market(LocalMarket):
    """Market whose hosts may have had other machines, which took their disks with them."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self.earlier: dict[str, list[LocalHost]] = {}  # machines of a host, as they were at their ends

    def lives(self, host: LocalHost) -> tuple[Run, ...]:
        lives, counted = [], 0
        for machine in (*self.earlier.get(host.order.request_id, ()), host):
            lives += super().lives(replace(machine, runs=machine.runs[counted:]))
            counted = len(machine.runs)
        return tuple(lives)


class Ec2Cloud(Cloud):
    """Cloud with these liberties. `seed` decides which pool is taken. `forgets`: earlier runs are not listed."""

    seed = 0
    forgets = True
    market: Ec2Market

    def __init__(self, clock: ManualClock, rules: MarketRules) -> None:
        super().__init__(Ec2Market(rules, clock()), clock)

    def launch(self, request: LaunchRequest) -> None:
        super().launch(replace(request, offer=self._taken(request)))

    def _taken(self, request: LaunchRequest) -> Offer:
        named = {o.pool: o for o in (request.offer, *request.alternatives)}
        known = self.market.hosts.get(request.request_id)
        if known is not None:
            return named.get(known.offer.pool, request.offer)
        roomy = [o for o in named.values() if self.market.free(o.pool) > 0]
        return random.Random(f"{self.seed} {request.request_id}").choice(roomy or [request.offer])

    def hosts(self, fleet: str) -> list[CloudHost]:
        lines = super().hosts(fleet)
        return [replace(h, runs=h.runs[-1:]) for h in lines] if self.forgets else lines

    def revive(self, request_id: str) -> None:
        """Start an ended host again, as another machine."""
        now, host = self.clock(), self.market.hosts[request_id]
        self.market.advance(now)
        assert host.state is CloudState.TERMINATED
        self.market.earlier.setdefault(request_id, []).append(host)
        self.market._keep(replace(host, state=CloudState.PENDING, since=self.market.now, notice=None,
                                  provider_id=f"{host.provider_id}+", why="started again by the cloud"),
                          self.market.now)
        self.market.advance(self.market.now)

    def double(self, request_id: str) -> None:
        """Give a living host a second machine, which is listed under its own name."""
        now, host = self.market.now, self.market.hosts[request_id]
        name = f"{request_id}{SECOND}{host.provider_id}x"
        if name not in self.market.hosts:
            order = replace(host.order, request_id=name)
            self.market._keep(replace(host, order=order, provider_id=f"{host.provider_id}x", runs=(), notice=None,
                                      state=CloudState.PENDING, since=now), now)
            self.market.advance(now)


def ec2_world(*args, **named) -> World:
    return World(*args, cloud_type=Ec2Cloud, **named)


class Ec2Sim(PlannerSim):
    """Simulation in which all runs are listed; `test_ec2_liberties.py` covers forgotten runs, with unseen stops."""

    cloud_type = Ec2Cloud

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        assert isinstance(self.world.cloud, Ec2Cloud)
        self.world.cloud.seed, self.world.cloud.forgets = rng.random(), False

    def check_known(self) -> None:
        """Exempt second machines: the cloud made them, and the next listing shows them."""
        for name in self.world.living():
            assert SECOND in name or self.world.state.host(name) is not None, f"the ledger does not know {name}"


    def unseen(self) -> set[str]:
        return {name for name, machines in self.world.cloud.market.earlier.items()
                if any(m.runs and not self._seen(name, m) for m in machines)}

    def _seen(self, name: str, machine: LocalHost) -> bool:
        """Return whether its end was listed, or its last run, with which it ended."""
        lines = [e for e in self.world.ledger.rows if isinstance(e, HostListed) and not e.missing
                 and (e.request_id, e.provider_id) == (name, machine.provider_id)]
        last = machine.runs[-1]
        went_with_it = last.ended_at == machine.ended_at and any(last.started_at == r.started_at
                                                                 for e in lines for r in e.runs)
        return went_with_it or any(e.state is CloudState.TERMINATED for e in lines)


class PlacedSim(Ec2Sim):
    """Simulation of a fleet that stays together in one pool, and may launch all or nothing."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        world = self.world
        world.hosts = min(world.hosts, 3)  # for which each pool has room once all is calm
        world.placement, world.all_or_nothing = rng.choice(["zone", "cluster"]), rng.random() < 0.5


def _want_few(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.hosts = rng.randint(0, 3)


def _revive(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    ended = [n for n, h in sim.world.market.hosts.items()
             if h.state is CloudState.TERMINATED and sim.true - h.since < 600]
    if ended:
        sim.world.cloud.revive(rng.choice(ended))


def _double(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    living = [n for n in living if SECOND not in n and sim.world.market.hosts[n].runs]
    if living:
        sim.world.cloud.double(rng.choice(living))


EC2_TROUBLES: dict[str, Trouble] = {**TROUBLES, "revive": _revive, "double": _double}
PLACED_TROUBLES = EC2_TROUBLES | {"want": _want_few}
EC2_KINDS = [*KINDS, "revive", "revive", "double", "return", "take"]
