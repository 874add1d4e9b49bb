"""Deciders of a simulated world: our policy, as the dispatcher calls it, and the strategies for comparison.

Our policy knows what a dispatcher knows: refusals, notices, its own hosts. The others also learn the available room, at
once and at no cost, as their papers assume.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spotfleet.fleet.domain.copies import replace
from spotfleet.fleet.policy.decide import DeadlineJob, PolicyInput, decide, decision_input, is_plain
from spotfleet.fleet.policy.mix import on_demand_needs
from spotfleet.fleet.policy.values import DecisionInput, MarketTarget
from spotfleet.model import Offer, PolicySpec
from spotfleet.simulate.strategies import baselines
from spotfleet.simulate.strategies.strategy import Choose, Strategy, WindowJob
from spotfleet.simulate.world.world import JOB, Decide, SimulatedWorld

MARGIN_S = 5.0  # a change may take this much longer than a boot: pauses, ticks
GANG_RESTART_S = 180.0  # benchmarks: gang, all N or nothing
GANG_CHECKPOINT_S = 600.0


def ours(world: SimulatedWorld) -> Decide:
    """Return our policy, called as in `dispatcher/policy.py`."""
    setting, cloud = world.setting, world.cloud
    needs = [replace(n, max_micros_h=0) for n in dict.fromkeys((*setting.any_of, *on_demand_needs(setting.any_of)))]

    cached: dict[tuple[int, ...], PolicyInput] = {}

    def asked(now: float, left_s: float) -> MarketTarget | None:
        left = world.deadline - now
        tasks = () if math.isinf(left) else (DeadlineJob(JOB, left, left_s),)
        sold = cloud.sold()
        if sold not in cached:  # prices change seldom, and this is called often
            offers: dict[str, Offer] = {o.pool: o for n in needs for o in cloud.offers(n)}
            cached.clear()
            cached[sold] = PolicyInput(setting.policy, setting.any_of, setting.hosts, offers=tuple(offers.values()))
            _ = cached[sold].taken  # derived once: copies keep it
        inputs = replace(cached[sold], tasks=tasks) if tasks else cached[sold]
        return None if is_plain(inputs, world.state) else decide(inputs, world.state, now)

    return asked


def _with_room(world: SimulatedWorld, choose: Choose) -> Decide:
    """Return `choose`, called with the room that is free at this moment; without room for all hosts it gets no spot.

    These strategies were made for one host. They treat several as one: all on spot, or none.
    """
    setting, cloud = world.setting, world.cloud
    inputs = PolicyInput(PolicySpec(), setting.any_of, setting.hosts)

    def asked(now: float, left_s: float) -> MarketTarget | None:
        room = cloud.room()
        present = decision_input(inputs, world.state, now)
        hosts, could = setting.hosts, present.spot + room >= setting.hosts
        held = present.spot >= hosts
        moment = replace(present, now=now - world.began_at, spot=hosts if held else 0,
                         spot_ready=hosts if present.spot_ready >= hosts else 0,
                         room=hosts if could and not held else 0,
                         left_s=world.deadline - now, work_s=left_s, boot_s=setting.boot_s + MARGIN_S, stall_s=0.0)
        choice = choose(moment)
        return choice if could else replace(choice, spot=0)

    return asked


def decider(strategy: Strategy, job: WindowJob) -> Callable[[SimulatedWorld], Decide]:
    return ours if strategy.ours else lambda world: _with_room(world, strategy.make(job))


# ---- those to compare with


def gang_restart(job: WindowJob) -> Choose:
    """Use all hosts on spot or none; use all of them on demand once there is no more time to wait."""
    def choose(m: DecisionInput) -> MarketTarget:
        needed = m.work_s / m.hosts + 2 * (m.boot_s + GANG_RESTART_S) + GANG_CHECKPOINT_S
        if m.on_demand or (m.left_s < math.inf and m.left_s <= needed):
            return MarketTarget(0, m.hosts, "no slack left", "safety-net")
        again_s = max(1.0, m.left_s - needed) if not m.spot else math.inf
        if m.spot + (m.room or 0) >= m.hosts:
            return MarketTarget(m.hosts, 0, "all on spot", "gang", again_s=again_s)
        return MarketTarget(0, 0, "waits until all can be had", "gang", again_s=again_s)

    return choose


def strategies() -> tuple[Strategy, ...]:
    """Return all strategies, ours first."""
    return (
        Strategy("spotfleet", lambda job: baselines.on_demand, ours=True, timeless=True),
        Strategy("on-demand only", lambda job: baselines.on_demand, timeless=True),
        Strategy("greedy", lambda job: baselines.greedy, gang=True),
        Strategy("Uniform Progress", lambda job: baselines.uniform_progress(job.work_s, job.deadline_s),
                 gang=True),
        Strategy("gang restart", gang_restart, gang=True, restart_s=GANG_RESTART_S, timeless=True,
                 checkpoint_s=GANG_CHECKPOINT_S),
    )
