"""Who decides in a simulated world: our policy, as the dispatcher asks it, and the strategies it is compared with.

Ours knows what a dispatcher knows: refusals, notices, its own hosts. The others are told besides, at once and for
nothing, how much room there is, as their papers assume.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from spotfleet.fleet.copies import replace
from spotfleet.fleet.policy.decide import Scene, Task, decide, is_plain, moment_of
from spotfleet.fleet.policy.mix import on_demand_needs
from spotfleet.fleet.policy.values import Choice, Moment
from spotfleet.model import Offer, PolicySpec
from spotfleet.simulate import baselines
from spotfleet.simulate.strategy import Choose, Job, Strategy
from spotfleet.simulate.windows import Task as WindowTask
from spotfleet.simulate.world import JOB, Decide, World

MARGIN_S = 5.0  # that a change may take beyond a boot: pauses, ticks
GANG_RESTART_S = 180.0  # benchmarks: gang, all N or nothing
GANG_CHECKPOINT_S = 600.0


def ours(world: World) -> Decide:
    """As `dispatcher/steward.py` asks it."""
    setting, cloud = world.setting, world.cloud
    needs = [replace(n, max_micros_h=0) for n in dict.fromkeys((*setting.any_of, *on_demand_needs(setting.any_of)))]

    scenes: dict[tuple[int, ...], Scene] = {}

    def asked(now: float, left_s: float) -> Choice | None:
        left = world.deadline - now
        tasks = () if math.isinf(left) else (Task(JOB, left, left_s),)
        sold = cloud.sold()
        if sold not in scenes:  # prices stay for long, and it is asked often
            offers: dict[str, Offer] = {o.pool: o for n in needs for o in cloud.offers(n)}
            scenes.clear()
            scenes[sold] = Scene(setting.policy, setting.any_of, setting.hosts, offers=tuple(offers.values()))
            _ = scenes[sold].taken  # derived once: copies keep it
        scene = replace(scenes[sold], tasks=tasks) if tasks else scenes[sold]
        return None if is_plain(scene, world.state) else decide(scene, world.state, now)

    return asked


def told(world: World, choose: Choose) -> Decide:
    """`choose`, asked with what is free at this moment; it asks for no more than that.

    These strategies were made for one host. Several they treat as one: all on spot, or none.
    """
    setting, cloud = world.setting, world.cloud
    scene = Scene(PolicySpec(), setting.any_of, setting.hosts)

    def asked(now: float, left_s: float) -> Choice | None:
        room = cloud.room()
        seen = moment_of(scene, world.state, now)
        hosts, could = setting.hosts, seen.spot + room >= setting.hosts
        held = seen.spot >= hosts
        moment = replace(seen, now=now - world.began_at, spot=hosts if held else 0,
                         spot_ready=hosts if seen.spot_ready >= hosts else 0, room=hosts if could and not held else 0,
                         left_s=world.deadline - now, work_s=left_s, boot_s=setting.boot_s + MARGIN_S, stall_s=0.0)
        choice = choose(moment)
        return choice if could else replace(choice, spot=0)

    return asked


def decider(strategy: Strategy, job: Job) -> Callable[[World], Decide]:
    return ours if strategy.ours else lambda world: told(world, strategy.make(job))


# ---- those to compare with


def gang_restart(job: Job) -> Choose:
    """All hosts on spot or none; on demand, all of them, once there is no more time to wait."""
    def choose(m: Moment) -> Choice:
        needed = m.work_s / m.hosts + 2 * (m.boot_s + GANG_RESTART_S) + GANG_CHECKPOINT_S
        if m.on_demand or (m.left_s < math.inf and m.left_s <= needed):
            return Choice(0, m.hosts, "no slack left", "safety-net")
        again_s = max(1.0, m.left_s - needed) if not m.spot else math.inf
        if m.spot + (m.room or 0) >= m.hosts:
            return Choice(m.hosts, 0, "all on spot", "gang", again_s=again_s)
        return Choice(0, 0, "waits until all can be had", "gang", again_s=again_s)

    return choose


def _task(job: Job) -> WindowTask:
    return WindowTask(job.work_s, job.deadline_s)


def strategies() -> tuple[Strategy, ...]:
    """Ours first."""
    return (
        Strategy("spotfleet", lambda job: baselines.on_demand, ours=True, timeless=True),
        Strategy("on-demand only", lambda job: baselines.on_demand, timeless=True),
        Strategy("greedy", lambda job: baselines.greedy, gang=True),
        Strategy("Uniform Progress", lambda job: baselines.uniform_progress(_task(job)), gang=True),
        Strategy("gang restart", gang_restart, gang=True, restart_s=GANG_RESTART_S, timeless=True,
                 checkpoint_s=GANG_CHECKPOINT_S),
    )
