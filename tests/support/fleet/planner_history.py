"""Random histories of one fleet and its cloud: plan and reconcile through faults of every kind, then calm.

`python -m tests.support.fleet.planner_history SEED [COUNT]` replays them; a failure prints its seed and story.

What must hold, with lagging listings and lost answers:
- at every moment: the ledger knows each machine that lives;
- after every completed tick: hosts that count (launching or up, by the ledger) are no more than wanted, of each
  market. A launch without an answer counts until it is known to have failed, so that a lost answer adds no extra
  host;
- then, too: a machine that lives and does not count is draining or ending, or the listing lags: by the listing it was
  given up or stopped, and it has come back since;
- soon after the faults: just the wanted hosts, all up, none stopped, none leaked, and nothing more to do;
- always: the bill is the cloud's own, to the micro-dollar.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from spotfleet.errors import NeedsPerson
from spotfleet.fleet.cost.meter import report
from spotfleet.fleet.domain.state import fold
from spotfleet.fleet.planner.plan import Wait
from spotfleet.fleet.reconcile import Calls, leftovers
from spotfleet.model import BillingRules, CloudState, HostState, Market
from tests.support.fleet.fleet_world import POOLS, Cloud, Killed, World, market_rules

T = TypeVar("T")
SETTLE_S = 15.0
STEPS_S = (0.5, 1.0, 7.25, 30.0, 301.0)
CALM_S = 3600.0  # the slowest recovery: see `end_well`


class PlannerSim:
    """World with the state that the faults need."""

    cloud_type: type[Cloud] = Cloud
    world_type: type[World] = World

    def __init__(self, rng: random.Random) -> None:
        billing = rng.choice([BillingRules(1), BillingRules(60), BillingRules(60, 300)])
        self.world = self.world_type(
            rng.randint(0, 4), behavior=rng.choice(["terminate", "stop"]),
            rules=market_rules(billing, capacity=rng.randint(1, 3), boot_s=rng.choice([0.0, 2.0, 40.0]), beside=True),
            cloud_type=self.cloud_type)
        self.log: list[str] = []
        self.world.calls = Calls(rng.choice([1, 1, 2, 16]), lambda method, each: _overlap(rng, method, each))

    @property
    def true(self) -> float:
        """Time of the cloud's clock."""
        return self.world.clock()

    def tick(self, after_s: float) -> None:
        """Run one tick of the reconciler, and check what must hold after it."""
        world = self.world
        world.clock.advance(after_s)
        lagged = world.cloud.faults.listing_lag_s > 0
        try:
            actions = world.tick()
        except NeedsPerson as error:
            self.log.append(f"tick: {error}")
            return
        except Killed:
            self.log.append("killed")
            world.settle_until = self.true + SETTLE_S
            return
        finally:
            world.fuse.left = None
            self.check_known()
        self.log.append(f"tick: {'; '.join(str(a) for a in actions)[:300]}")
        if not any(isinstance(a, Wait) and ("asks again" in a.why or "after a restart" in a.why) for a in actions):
            self.check_numbers(lagged)

    def check_known(self) -> None:
        for name in self.world.living():
            assert self.world.state.host(name) is not None, f"the ledger does not know {name}"

    def check_numbers(self, lagged: bool) -> None:
        world = self.world
        for market, wanted in ((Market.SPOT, world.hosts), (Market.ON_DEMAND, world.on_demand)):
            counting = [h.request_id for h in world.state.hosts if h.counts and h.offer.market is market]
            assert len(counting) <= wanted, f"{counting} where {wanted} {market.value} hosts are wanted"
        if lagged:
            return
        for name in world.living():
            host = world.state.host(name)
            if world.market.hosts[name].since >= world.market.now:
                continue  # came after this tick's listing, for which the tick's own terminations made room
            assert host is not None
            assert host.counts or host.state is HostState.DRAINING, f"{name} lives and counts as {host.state}"

    def check_bill(self) -> None:
        invoice, bill = self.world.market.invoice(self.true), report(self.world.ledger.rows, self.true)
        by_host = dict.fromkeys(invoice.hosts, 0)
        for line in bill.lines:
            by_host[line.host] += line.micros
        assert by_host == invoice.hosts, "the bill is not the cloud's"
        unseen = {("disk", name) for name in self.unseen()}
        billed = {(kind, name): micros for kind, part in (("disk", invoice.disks), ("address", invoice.addresses))
                  for name, micros in part.items() if micros and (kind, name) not in unseen}
        ours = {(e.kind, e.name): e.micros for e in bill.extras if (e.kind, e.name) not in unseen}
        assert ours == billed, "what is beside machines is not the cloud's"
        assert unseen or bill.micros == invoice.micros

    def unseen(self) -> set[str]:
        """Return hosts with a machine whose last run and end fell between two listings: its disk's end is unknown."""
        return set()

    def story(self) -> str:
        hosts = [f"{h.request_id} {h.state.value} since {h.since:.0f} cloud={h.cloud} terminate_at={h.terminate_at} "
                 f"silent={h.silent_since} missing={h.missing_since} {h.why}" for h in self.world.state.hosts]
        truth = [f"{n} {h.state.value} {h.offer.pool}" for n, h in self.world.market.hosts.items()
                 if h.state is not CloudState.TERMINATED]
        wanted = f"wanted {self.world.hosts} and {self.world.on_demand} on demand"
        return "\n".join([f"{wanted}, now {self.world.now:.0f}, skew {self.world.skew_s}",
                          *self.log[-30:], "ledger:", *hosts, "cloud:", *truth])


def _overlap(rng: random.Random, method: Callable[[Any], T], each: Iterable[Any]) -> list[T]:
    """Let concurrent calls take effect in any order."""
    arguments = list(enumerate(each))
    rng.shuffle(arguments)
    return [result for _, result in sorted(((n, method(argument)) for n, argument in arguments), key=lambda r: r[0])]


Trouble = Callable[[PlannerSim, random.Random, list[str]], None]


def _take(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    if living:
        notice_s, action = rng.choice([None, 1.5, 30.0, 120.0]), rng.choice(["", "stop"])
        sim.world.market.interrupt(rng.choice(living), notice_s, sim.true, action)


def _take_all(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    notice_s = rng.choice([None, 30.0])
    for name in living:
        sim.world.market.interrupt(name, notice_s, sim.true)


def _withdraw(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    for name in living:
        sim.world.market.withdraw_notice(name, sim.true)


def _hint(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    if living:
        sim.world.market.rebalance(rng.choice(living), sim.true)


def _power_off(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    if living:
        sim.world.market.power_off(rng.choice(living), sim.true)


def _return(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    """Bring a stopped host back, whether or not it has been replaced."""
    stopped = [n for n, h in sim.world.market.hosts.items() if h.state is CloudState.STOPPED]
    if stopped:
        sim.world.market.return_host(rng.choice(stopped), sim.true)


def _deafen(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    if living:
        sim.world.deaf ^= {rng.choice(living)}


def _drain(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    if living:
        sim.world.asked_to_drain[rng.choice(living)] = "asked by its user"


def _capacity(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.market.set_capacity(rng.choice(POOLS), rng.randint(0, 3), sim.true)


def _refuse(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    scope = rng.choice(["pool", "pool", "type", "region", "account", "person"])
    sim.world.market.refuse(rng.choice(POOLS), scope, sim.true, for_s=rng.choice([20.0, 200.0]))


def _price(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.market.set_price(rng.choice(POOLS), rng.randint(100_000, 3_000_000), sim.true)


def _kill(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.fuse.light(rng.randint(1, 5), rng.random() < 0.5)
    sim.tick(rng.choice(STEPS_S))


def _lose(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    method = rng.choice(["launch", "launch", "terminate", "hosts", "prices", "offers"])
    sim.world.cloud.faults.lose(method, rng.choice(["before", "after"]), times=rng.choice([1, 1, 3]))


def _lag(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.cloud.faults.listing_lag_s = rng.choice([0.0, 3.0, 60.0])


def _repeat(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.cloud.faults.duplicates = rng.randint(0, 2)


def _mute(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.cloud.answers = not sim.world.cloud.answers


def _want(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    sim.world.hosts = rng.randint(0, 4)


def _mix(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    """Change the policy's numbers of spot and on-demand hosts."""
    sim.world.hosts, sim.world.on_demand = rng.randint(0, 3), rng.randint(0, 3)


def _clock(sim: PlannerSim, rng: random.Random, living: list[str]) -> None:
    """Set the reconciler's clock."""
    sim.world.skew_s = rng.choice([0.0, -2.0, 2.0, -90.0, 90.0, -3600.0, 3600.0, -86400.0])


TROUBLES: dict[str, Trouble] = {
    "take": _take, "take all": _take_all, "withdraw": _withdraw, "hint": _hint, "power off": _power_off,
    "return": _return, "deafen": _deafen, "drain": _drain, "capacity": _capacity, "refuse": _refuse, "price": _price,
    "kill": _kill, "lose": _lose, "lag": _lag, "repeat": _repeat, "mute": _mute, "want": _want, "mix": _mix,
    "clock": _clock,
}
KINDS = [*TROUBLES, "take", "take", "kill", "kill", "lose", "refuse"]


def history(seed: int, make: Callable[[random.Random], PlannerSim] = PlannerSim,
            troubles: dict[str, Trouble] = TROUBLES, kinds: Sequence[str] = KINDS) -> PlannerSim:
    rng = random.Random(seed)
    sim = make(rng)
    try:
        for _ in range(rng.randint(4, 40)):
            if rng.random() < 0.45:
                sim.tick(rng.choice(STEPS_S))
            else:
                kind = rng.choice(kinds)
                sim.log.append(kind)
                troubles[kind](sim, rng, sorted(sim.world.living()))
            sim.check_known()
        end_well(sim, rng)
    except AssertionError as wrong:
        raise AssertionError(f"seed {seed}: {wrong}\n{sim.story()}") from wrong
    return sim


def calm(sim: PlannerSim) -> None:
    """End all faults; the clocks keep their present time."""
    world = sim.world
    faults = world.cloud.faults
    faults.listing_lag_s, faults.duplicates, world.cloud.answers = 0.0, 0, True
    faults.lost.clear()
    for pool in POOLS:
        world.market.allow(pool, sim.true)
        world.market.set_capacity(pool, 3, sim.true)


def end_well(sim: PlannerSim, rng: random.Random) -> None:
    """Run to the end of the slowest recovery: 2 min notice, 10 min until given up, cooldown of at most 10 min."""
    world = sim.world
    calm(sim)
    begun = sim.true
    while sim.true - begun < CALM_S:
        sim.tick(15.0)
        if sim.log[-1] == "tick: " and is_well(sim):
            break
    assert is_well(sim), "not well in time"
    sim.tick(1.0)
    assert sim.log[-1] == "tick: ", "restless"
    sim.check_bill()
    assert fold(world.ledger.rows) == world.state, "the state is not that of the ledger"
    if rng.random() < 0.3:
        _down(sim, rng)


def is_well(sim: PlannerSim) -> bool:
    world, living = sim.world, sorted(sim.world.living())
    machines = world.market.hosts.values()
    trouble = any(h.state is CloudState.STOPPED or h.notice is not None for h in machines)
    up = all(h.state is HostState.UP and h.silent_since is None for h in world.state.hosts)
    full = sum(world.market.hosts[name].offer.market is Market.ON_DEMAND for name in living)
    right = full == world.on_demand and len(living) == world.hosts + world.on_demand
    return right and sorted(world.up()) == living and up and not trouble


def _down(sim: PlannerSim, rng: random.Random) -> None:
    """Check that `down` leaves nothing, stopped hosts included, and that the bill stays right."""
    for name in sim.world.living():
        if rng.random() < 0.5:
            sim.world.market.interrupt(name, rng.choice([None, 30.0]), sim.true, "stop")
    for pool in POOLS:  # so that no stopped host comes back by itself
        sim.world.market.set_capacity(pool, 0, sim.true)
    sim.world.hosts = sim.world.on_demand = 0
    for _ in range(20):
        sim.tick(15.0)
    assert leftovers(sim.world.cloud, "f") == [], "down left machines"
    sim.check_bill()


if __name__ == "__main__":
    start, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for number in range(start, start + count):
        done = history(number)
        if count == 1:
            print(done.story())
