"""Deadline policy: finish by the deadline at the least cost, on spot if available, on demand only if needed. Pure.

*Slack* is the work, in host-seconds, that the target number of hosts could do until the deadline beyond the remaining
work. A missing host uses it up one for one. A change of hosts uses some: the replacement boots first, and all hosts
wait while they regroup. Working hosts use none. So work on demand can be postponed without loss while there is slack
for the changes still to come, the *reserve*. Without a reserve, a return to spot hosts would be unaffordable:

    slack beyond the reserve    wait for spot
    slack in the reserve        fill missing spot hosts on demand; back to spot if it lasts longer than the changes cost
    slack for one change left   on demand to the end

`docs/policy.md` explains the choice of the constants and the cost of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from spotfleet.fleet.domain.availability import expected_s, losses_per_s
from spotfleet.fleet.policy.values import DecisionInput, MarketTarget

RESERVE = 3.0  # times the slack of the changes expected until the deadline: losses come in clusters
MOST_RESERVE = 1 / 8  # largest reserve, as a share of the remaining time
NET = 2.0  # changes whose slack is kept in addition to the reserve, as the job ends
CROWDED = 2.0  # stricter when slack is short: a period must last 1 + CROWDED x (want / slack - 1) times as long
RULE = "deadline"


@dataclass(frozen=True)
class DeadlineTuning:
    """Constants above as values, to show the cost of others."""

    reserve: float = RESERVE
    most_reserve: float = MOST_RESERVE
    net: float = NET
    crowded: float = CROWDED


TUNED = DeadlineTuning()


def choose(moment: DecisionInput, tuning: DeadlineTuning = TUNED) -> MarketTarget:
    """Return how many hosts of each market should exist now; `spot` is a limit and may exceed the available hosts.

    Work that on-demand hosts could finish in time at the first call is finished in time whatever happens to spot hosts.
    Conditions: this is called again after `again_s` or `tick_s` at the latest and at each loss, on-demand hosts are
    available, and they boot in `boot_s`.
    """
    m, target = moment, moment.hosts
    if m.work_s <= 0:
        return MarketTarget(0, 0, "the work is done", RULE)
    if m.spot_micros_h >= m.on_demand_micros_h > 0:
        return MarketTarget(0, target, "spot costs no less than on demand", RULE)
    slack = target * m.left_s - m.work_s
    if slack == inf:
        return MarketTarget(target, 0, "no deadline", RULE)
    may_lack = min(target, _may_lack(m, slack))
    if may_lack == 0:
        return _to_the_end(m, slack)
    want = 2 * (m.boot_s / 2 + m.stall_s) * target * losses_per_s(m.availability) * m.left_s  # slack for losses to come
    reserve = min(tuning.reserve * want, tuning.most_reserve * target * m.left_s)
    reserve += tuning.net * _way_back(m, target, target)
    return _filled(m, slack, reserve, may_lack) if _worth_a_change(m, slack, want, tuning) else _stay(m, may_lack)


def _filled(m: DecisionInput, slack: float, reserve: float, may_lack: int) -> MarketTarget:
    """Return as many spot hosts as are available; the rest on demand, if there is no slack to wait for spot."""
    target, sure = m.hosts, m.hosts - may_lack
    coming = may_lack if m.room is None else min(may_lack, m.spot + m.room)
    unfilled = target - coming  # slots without a spot host, now or soon
    has = f"{_span(slack / target)} of slack per host, {_span(reserve / target)} of it in reserve for losses to come"
    if unfilled > m.on_demand and slack <= reserve:
        on_demand, why = unfilled, f"{has}: on demand what spot lacks"
    elif unfilled and m.on_demand:
        on_demand, why = min(unfilled, m.on_demand), f"{has}: on demand until spot returns"
    elif unfilled:
        on_demand, why = 0, f"{has}: wait for spot"
    else:
        on_demand, why = 0, "spot hosts for all"
    if m.boot_s:  # no host leaves before its replacement works
        on_demand = max(on_demand, min(m.on_demand, target - m.spot_ready))
    on_demand = max(on_demand, sure)
    if not unfilled and m.spot < target:
        why = f"spot hosts are asked for{', on demand until they work' if on_demand else ''}"
    idle = target - min(target, m.spot_ready + m.on_demand_ready)
    again = inf
    if idle and coming + on_demand < target:
        again = max(m.tick_s, min(slack - reserve, slack - _way_back(m, target, m.spot)) / idle)
    elif idle and coming > m.spot_ready:  # they boot, which may fail
        again = max(m.tick_s, (slack - _way_back(m, target, coming)) / idle)
    return MarketTarget(_kept(m, may_lack), on_demand, why, RULE, again)


def _stay(m: DecisionInput, may_lack: int) -> MarketTarget:
    """Stay on demand although spot is available: it is not expected to last long enough to pay for two changes."""
    spot = min(m.spot, may_lack)
    expected = _span(expected_s(m.availability))
    why = f"spot is expected for {expected}, too short for going there and back: stay on demand"
    return MarketTarget(spot, max(m.hosts - spot, m.hosts - may_lack), why, RULE, max(m.tick_s, m.boot_s + m.stall_s))


def _worth_a_change(m: DecisionInput, slack: float, want: float, tuning: DeadlineTuning) -> bool:
    """Return whether available spot hosts should replace on-demand hosts.

    Compares the saving while spot is expected to last with the cost of the changes there and back, during which
    on-demand hosts would have worked.
    """
    if not m.on_demand or m.spot + m.on_demand < m.hosts or m.room == 0 or not m.on_demand_micros_h:
        return True
    crowd = 1 + tuning.crowded * max(0.0, want / max(slack, 1.0) - 1)
    saving = expected_s(m.availability) * (m.on_demand_micros_h - m.spot_micros_h)
    return saving > 2 * (m.boot_s + m.stall_s) * m.on_demand_micros_h * crowd


def _way_back(m: DecisionInput, missing: int, of_spot: int) -> float:
    """Return the most slack used until all work on demand: `missing` do not yet, `of_spot` are lost one by one.

    It consists of boots and a stall at each loss, at most the boot of all hosts; and of the stalls for the previous
    loss, for hosts that boot already, and for those launched then. A single host has only its own join ahead.
    """
    boot_s = m.boot_s + m.tick_s if m.boot_s else 0.0  # a finished boot is noticed at a tick
    all_s = m.hosts * m.stall_s
    lost = min(boot_s * m.hosts, boot_s * missing + all_s * of_spot) if m.hosts > 1 else boot_s * missing
    return lost + all_s * (1 if m.hosts == 1 else 3)


def _may_lack(m: DecisionInput, slack: float) -> int:
    """Return how many hosts may be spot or missing until the next decision, if on demand must suffice from then on."""
    idle = m.hosts - min(m.hosts, m.spot_ready + m.on_demand_ready)
    joins = m.stall_s * m.hosts if m.room != 0 and m.spot < m.hosts else 0.0  # stall of the change to more spot hosts
    free = slack - m.tick_s * idle - joins
    missing = m.hosts - min(m.hosts, m.on_demand_ready)
    return next((k for k in range(m.hosts, 0, -1) if _way_back(m, max(k, missing), k) <= free), 0)


def _kept(m: DecisionInput, spot: int) -> int:
    """Return `spot`, or the present number of spot hosts until their replacements have booted."""
    return max(spot, min(m.spot, m.hosts - m.on_demand_ready)) if m.boot_s else spot


def _to_the_end(m: DecisionInput, slack: float) -> MarketTarget:
    """Put all hosts on demand. Spot hosts work until these have booted, unless their losses could use up the slack."""
    kept, missing = _kept(m, 0), m.hosts - min(m.hosts, m.on_demand_ready)
    if _way_back(m, missing, 0) <= slack < _way_back(m, missing, kept):
        kept = 0
    why = f"{_span(slack / m.hosts)} of slack per host is too little for another change: on demand to the end"
    return MarketTarget(kept, m.hosts, why, RULE)


def soonest_s(work_s: float, hosts: int, boot_s: float, stall_s: float = 0.0) -> float:
    """Return in how many seconds `hosts` on demand do `work_s` host-seconds of work, boot included."""
    return work_s / max(1, hosts) + boot_s + stall_s


def impossible(moment: DecisionInput) -> str:
    """Return why the deadline cannot be met even on demand, with the earliest finish; "" if it can be met."""
    soonest = soonest_s(moment.work_s, moment.hosts, moment.boot_s, moment.stall_s)
    if soonest <= moment.left_s:
        return ""
    hosts = f"{moment.hosts} host{'s' * (moment.hosts != 1)}"
    boot = f"the median of {moment.boots}" if moment.boots else "assumed"
    return (f"the work takes {hosts} {_span(soonest)} on demand, with {_span(moment.boot_s)} for a boot ({boot}), and "
            f"{_span(moment.left_s)} are left: it will be late")


def _span(seconds: float) -> str:
    """Format a duration for people: hours and minutes, rounded towards zero."""
    minutes, sign = int(abs(seconds) // 60), "-" if seconds <= -60 else ""
    if minutes:
        return f"{sign}{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{sign}{minutes} min"
    return f"{ceil(seconds)} s"
