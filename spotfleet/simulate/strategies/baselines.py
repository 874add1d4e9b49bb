"""Strategies for comparison, from the simplest to the best that was published.

    on_demand           never spot
    greedy              spot while slack lasts, else wait; from then on demand to the end
    uniform_progress    of "Can't Be Late" (Wu et al., NSDI 2024), section 5.2.2, for one host or an all-or-nothing gang
    elastic_hybrid      N hosts of both markets: on demand replaces missing spot while progress is behind

The strategies decide for one host (`DecisionInput.hosts` at once for a gang); a changeover is a boot and a stall.
"""

from __future__ import annotations

import math

from spotfleet.fleet.policy.values import DecisionInput, MarketTarget
from spotfleet.simulate.strategies.strategy import Choose

EPSILON_S = 1e-6


def on_demand(moment: DecisionInput) -> MarketTarget:
    return MarketTarget(0, moment.hosts, "on demand alone", "on-demand")


def change_s(moment: DecisionInput) -> float:
    """Seconds from one host to another: a boot and a stall."""
    return moment.boot_s + moment.stall_s


def _slack_s(moment: DecisionInput) -> float:
    """That could be lost now if a host on demand, still to be changed to, did all that is left."""
    return moment.left_s - moment.work_s / moment.hosts - change_s(moment)


def _safety_net(moment: DecisionInput, slack_s: float) -> MarketTarget | None:
    """Return on demand to the end, once the time suffices for no changeover but the one to it. Source: the paper's
    section 3.

    A spot host that works already is kept until it is lost, for which `slack_s` suffices. For one that does not work
    yet, the time was included when it was launched.
    """
    if moment.spot:
        return None
    if slack_s < (change_s(moment) if moment.room else 0.0) + EPSILON_S:
        return MarketTarget(0, moment.hosts, "no slack left", "safety-net")
    return None


def greedy(moment: DecisionInput) -> MarketTarget:
    slack_s = _slack_s(moment)
    if moment.on_demand:  # only a lack of slack can have put it there
        return MarketTarget(0, moment.hosts, "to the end", "safety-net")
    if net := _safety_net(moment, slack_s):
        return net
    return MarketTarget(moment.hosts, 0, "spot while slack lasts", "greedy",
                        again_s=slack_s if not moment.spot else math.inf)


def uniform_progress(work_s: float, deadline_s: float, *, idle: bool = False) -> Choose:
    """Uniform Progress with hysteresis; it has no parameters. `DecisionInput.now` must be seconds since the job's
    start.

    Progress is expected to be e(t) = t C / R of the work C until the deadline R. Spot is used whenever it is available,
    and kept until it is lost. Without spot, the choice is on demand once progress is behind e(t), else to wait. From on
    demand it goes back to spot only when progress is e(t + 2 d), d being the changeover; and the safety net applies.
    With `idle`, an on-demand host that is so far ahead is given back even if there is no spot; without `idle` the
    results match the paper's hours.
    """
    pace = work_s / deadline_s

    def choose(moment: DecisionInput) -> MarketTarget:
        hosts, done_s = moment.hosts, work_s - moment.work_s / moment.hosts
        if moment.spot:
            return MarketTarget(hosts, 0, "spot until it is lost", "exploit")
        if moment.on_demand:
            behind_s = (moment.now + 2 * change_s(moment)) * pace - done_s
            if not moment.room and not idle:
                return MarketTarget(0, hosts, "no spot", "uniform-progress")
            if behind_s > EPSILON_S or _safety_net(moment, _slack_s(moment)):
                return MarketTarget(0, hosts, "behind", "hysteresis", again_s=max(1.0, behind_s) / (1.0 - pace + 1e-9))
            if moment.room:
                return MarketTarget(hosts, 0, "ahead by two changeovers", "uniform-progress")
        slack_s = _slack_s(moment)
        if net := _safety_net(moment, slack_s):
            return net
        if moment.room:
            return MarketTarget(hosts, 0, "spot", "uniform-progress")
        ahead_s = done_s - moment.now * pace
        if ahead_s < -EPSILON_S:
            return MarketTarget(0, hosts, "behind", "uniform-progress")
        return MarketTarget(hosts, 0, "ahead, so wait", "uniform-progress", again_s=min(slack_s, ahead_s / pace + 1.0))

    return choose
