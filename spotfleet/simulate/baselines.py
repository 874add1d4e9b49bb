"""Strategies to compare with, from the plainest to the best that was published.

    on_demand           never spot
    greedy              spot while slack lasts, else wait; from then on demand to the end
    uniform_progress    of "Can't Be Late" (Wu et al., NSDI 2024), section 5.2.2, for one host or an all-or-nothing gang
    elastic_hybrid      N hosts of both markets: on demand fills up what spot lacks while progress is behind

The strategies decide for one host (`Moment.hosts` at once for a gang); a changeover is a boot and a stall.
"""

from __future__ import annotations

import math

from ..fleet.policy.values import Choice, Moment
from .windows import Strategy, Task

EPSILON_S = 1e-6


def on_demand(moment: Moment) -> Choice:
    return Choice(0, moment.hosts, "on demand alone", "on-demand")


def _change_s(moment: Moment) -> float:
    return moment.boot_s + moment.stall_s


def _slack_s(moment: Moment) -> float:
    """That could be lost now if a host on demand, still to be changed to, did all that is left."""
    return moment.left_s - moment.work_s / moment.hosts - _change_s(moment)


def _safety_net(moment: Moment, slack_s: float) -> Choice | None:
    """On demand to the end, once there is no time for one more change than to it. Source: the paper's section 3.

    A spot host that works already is kept until it is lost, for which `slack_s` suffices; one that does not work yet
    has been thought of when it was taken.
    """
    if moment.spot:
        return None
    if slack_s < (_change_s(moment) if moment.room else 0.0) + EPSILON_S:
        return Choice(0, moment.hosts, "no slack left", "safety-net")
    return None


def greedy(moment: Moment) -> Choice:
    slack_s = _slack_s(moment)
    if moment.on_demand:  # nothing else put it there than the lack of slack
        return Choice(0, moment.hosts, "to the end", "safety-net")
    if net := _safety_net(moment, slack_s):
        return net
    return Choice(moment.hosts, 0, "spot while slack lasts", "greedy", again_s=slack_s if not moment.spot else math.inf)


def uniform_progress(task: Task, *, idle: bool = False) -> Strategy:
    """Uniform Progress with hysteresis; it has no parameters. `Moment.now` must be seconds since the job's start.

    Progress is expected to be e(t) = t C / R of the work C until the deadline R. Spot whenever it is to be had, kept
    until it is lost; without it, on demand once progress is behind e(t), else wait; from on demand back to spot only
    when progress is e(t + 2 d), d being the changeover; and the safety net. With `idle`, a host on demand that is so
    far ahead goes even if there is no spot; the paper's own hours come out without it.
    """
    pace = task.work_s / task.deadline_s

    def choose(moment: Moment) -> Choice:
        hosts, done_s = moment.hosts, task.work_s - moment.work_s / moment.hosts
        if moment.spot:
            return Choice(hosts, 0, "spot until it is lost", "exploit")
        if moment.on_demand:
            behind_s = (moment.now + 2 * _change_s(moment)) * pace - done_s
            if not moment.room and not idle:
                return Choice(0, hosts, "no spot", "uniform-progress")
            if behind_s > EPSILON_S or _safety_net(moment, _slack_s(moment)):
                return Choice(0, hosts, "behind", "hysteresis", again_s=max(1.0, behind_s) / (1.0 - pace + 1e-9))
            if moment.room:
                return Choice(hosts, 0, "ahead by two changeovers", "uniform-progress")
        slack_s = _slack_s(moment)
        if net := _safety_net(moment, slack_s):
            return net
        if moment.room:
            return Choice(hosts, 0, "spot", "uniform-progress")
        ahead_s = done_s - moment.now * pace
        if ahead_s < -EPSILON_S:
            return Choice(0, hosts, "behind", "uniform-progress")
        return Choice(hosts, 0, "ahead, so wait", "uniform-progress", again_s=min(slack_s, ahead_s / pace + 1.0))

    return choose


def elastic_hybrid(task: Task) -> Strategy:
    """N hosts: all spot that there is, and what it lacks on demand while progress is behind e(t) (`uniform_progress`),
    until it is ahead by two changeovers; on demand alone once slack is down to two changes.
    """
    pace = task.work_s / task.deadline_s

    def choose(moment: Moment) -> Choice:
        hosts, change_s = moment.hosts, _change_s(moment)
        slack_s = moment.left_s - moment.work_s / hosts - 2 * change_s - moment.tick_s
        if slack_s < 0:
            return Choice(0 if moment.on_demand_ready >= hosts else moment.spot, hosts, "no slack left", "safety-net")
        ahead_s = task.work_s - moment.work_s / hosts - moment.now * pace
        if ahead_s < 0 or (moment.on_demand and ahead_s < 2 * change_s * pace):
            again_s = min(slack_s, max(0.0, 2 * change_s * pace - ahead_s) / (1 - pace + 1e-9))
            return Choice(hosts, hosts - moment.spot_ready, "behind", "hybrid", again_s=max(moment.tick_s, again_s))
        again_s = max(moment.tick_s, min(slack_s, ahead_s / pace))
        return Choice(hosts, 0, "ahead, so wait for spot", "hybrid", again_s=again_s)

    return choose
