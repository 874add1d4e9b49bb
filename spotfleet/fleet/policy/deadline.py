"""Finish work by its deadline at the least cost: spot while it is there, on demand no sooner than need be. Pure.

*Slack* is what the target number of hosts could do until the deadline beyond the work that is left, in host-seconds.
A host that is missing uses it up one for one. A change of hosts uses some up: what replaces a lost host boots first,
and all wait while they regroup. Hosts that work use none. So work on demand can be put off without loss, as long as
there is slack for the changes still to come, the *reserve*; with none one could not afford spot hosts that return:

    slack beyond the reserve    wait for spot
    slack in the reserve        on demand what spot lacks; back to spot if it lasts for more than the changes cost
    slack for one change left   on demand to the end

`docs/policy.md` says how the constants were chosen, and what others would have cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from .memory import goes_on_s, losses_per_s
from .values import Choice, Moment

RESERVE = 3.0  # of the changes expected until the deadline, so many times their slack: losses come in crowds
MOST_RESERVE = 1 / 8  # of the time left
NET = 2.0  # changes whose slack is kept besides the reserve, as the job ends
CROWDED = 2.0  # how much choosier when slack is short: a spell must last 1 + CROWDED x (want / slack - 1) times as long
RULE = "deadline"


@dataclass(frozen=True)
class Tuning:
    """The constants above, to show what others would cost."""

    reserve: float = RESERVE
    most_reserve: float = MOST_RESERVE
    net: float = NET
    crowded: float = CROWDED


TUNED = Tuning()


def choose(moment: Moment, tuning: Tuning = TUNED) -> Choice:
    """How many hosts of either market should exist now; `spot` is what is welcome, it may be more than can be had.

    Work that on-demand hosts could finish in time when this is first asked is finished in time whatever happens to spot
    hosts, as long as it is asked again after `again_s` or `tick_s` at the latest and at each loss, on-demand hosts are
    to be had, and they boot in `boot_s`.
    """
    m, target = moment, moment.hosts
    if m.work_s <= 0:
        return Choice(0, 0, "the work is done", RULE)
    if m.spot_micros_h >= m.on_demand_micros_h > 0:
        return Choice(0, target, "spot costs no less than on demand", RULE)
    slack = target * m.left_s - m.work_s
    if slack == inf:
        return Choice(target, 0, "no deadline", RULE)
    may_lack = min(target, _may_lack(m, slack))
    if may_lack == 0:
        return _to_the_end(m, slack)
    want = 2 * (m.boot_s / 2 + m.stall_s) * target * losses_per_s(m.memory) * m.left_s  # slack for losses to come
    reserve = min(tuning.reserve * want, tuning.most_reserve * target * m.left_s)
    reserve += tuning.net * _way_back(m, target, target)
    return _filled(m, slack, reserve, may_lack) if _worth_a_change(m, slack, want, tuning) else _stay(m, may_lack)


def _filled(m: Moment, slack: float, reserve: float, may_lack: int) -> Choice:
    """Spot hosts as many as can be had; on demand what they lack, if there is no slack to wait for them."""
    target, sure = m.hosts, m.hosts - may_lack
    coming = may_lack if m.room is None else min(may_lack, m.spot + m.room)
    lacking = target - coming  # slots for which there is no spot host, now or in a moment
    has = f"{_span(slack / target)} of slack per host, {_span(reserve / target)} of it in reserve for losses to come"
    if lacking > m.on_demand and slack <= reserve:
        on_demand, why = lacking, f"{has}: on demand what spot lacks"
    elif lacking and m.on_demand:
        on_demand, why = min(lacking, m.on_demand), f"{has}: on demand until spot returns"
    elif lacking:
        on_demand, why = 0, f"{has}: wait for spot"
    else:
        on_demand, why = 0, "spot hosts for all"
    if m.boot_s:  # nobody leaves before who relieves him works
        on_demand = max(on_demand, min(m.on_demand, target - m.spot_ready))
    on_demand = max(on_demand, sure)
    if not lacking and m.spot < target:
        why = f"spot hosts are asked for{', on demand until they work' if on_demand else ''}"
    idle = target - min(target, m.spot_ready + m.on_demand_ready)
    again = inf
    if idle and coming + on_demand < target:
        again = max(m.tick_s, min(slack - reserve, slack - _way_back(m, target, m.spot)) / idle)
    elif idle and coming > m.spot_ready:  # they boot, which may come to nothing
        again = max(m.tick_s, (slack - _way_back(m, target, coming)) / idle)
    return Choice(_kept(m, may_lack), on_demand, why, RULE, again)


def _stay(m: Moment, may_lack: int) -> Choice:
    """On demand, though spot could be had: it is not expected to last for what two changes cost."""
    spot = min(m.spot, may_lack)
    why = f"spot is expected for {_span(goes_on_s(m.memory))}, too short for going there and back: stay on demand"
    return Choice(spot, max(m.hosts - spot, m.hosts - may_lack), why, RULE, max(m.tick_s, m.boot_s + m.stall_s))


def _worth_a_change(m: Moment, slack: float, want: float, tuning: Tuning) -> bool:
    """Whether on-demand hosts should make room for spot hosts that could be had: the saving while these are expected to
    last against the changes there and back, in which on-demand hosts would have worked.
    """
    if not m.on_demand or m.spot + m.on_demand < m.hosts or m.room == 0 or not m.on_demand_micros_h:
        return True
    crowd = 1 + tuning.crowded * max(0.0, want / max(slack, 1.0) - 1)
    saving = goes_on_s(m.memory) * (m.on_demand_micros_h - m.spot_micros_h)
    return saving > 2 * (m.boot_s + m.stall_s) * m.on_demand_micros_h * crowd


def _way_back(m: Moment, missing: int, of_spot: int) -> float:
    """Slack that it takes at most until all work on demand, if `missing` do not yet and `of_spot` are lost one by one.

    Boots, and a stall at each loss, but no more than everybody's boot; and the stalls of the loss before, of hosts that
    boot already, and of those launched then. A single host has its own join alone ahead.
    """
    boot_s = m.boot_s + m.tick_s if m.boot_s else 0.0  # it is seen at a tick that a host has booted
    all_s = m.hosts * m.stall_s
    lost = min(boot_s * m.hosts, boot_s * missing + all_s * of_spot) if m.hosts > 1 else boot_s * missing
    return lost + all_s * (1 if m.hosts == 1 else 3)


def _may_lack(m: Moment, slack: float) -> int:
    """How many hosts may be spot hosts, or missing, until the next decision, so that on demand alone would do then."""
    idle = m.hosts - min(m.hosts, m.spot_ready + m.on_demand_ready)
    joins = m.stall_s * m.hosts if m.room != 0 and m.spot < m.hosts else 0.0  # that of the change to more spot hosts
    free = slack - m.tick_s * idle - joins
    missing = m.hosts - min(m.hosts, m.on_demand_ready)
    return next((k for k in range(m.hosts, 0, -1) if _way_back(m, max(k, missing), k) <= free), 0)


def _kept(m: Moment, spot: int) -> int:
    """`spot` hosts, or as many as there are until those who relieve them have booted."""
    return max(spot, min(m.spot, m.hosts - m.on_demand_ready)) if m.boot_s else spot


def _to_the_end(m: Moment, slack: float) -> Choice:
    """On demand with all; spot hosts work until these have booted, unless the stalls of losing them may be too much."""
    kept, missing = _kept(m, 0), m.hosts - min(m.hosts, m.on_demand_ready)
    if _way_back(m, missing, 0) <= slack < _way_back(m, missing, kept):
        kept = 0
    why = f"{_span(slack / m.hosts)} of slack per host is too little for another change: on demand to the end"
    return Choice(kept, m.hosts, why, RULE)


def soonest_s(work_s: float, hosts: int, boot_s: float, stall_s: float = 0.0) -> float:
    """Seconds in which `hosts` on demand do `work_s` host-seconds of work, boot included."""
    return work_s / max(1, hosts) + boot_s + stall_s


def impossible(moment: Moment) -> str:
    """Why the deadline cannot be met even on demand, with the soonest finish; "" if it can be met."""
    soonest = soonest_s(moment.work_s, moment.hosts, moment.boot_s, moment.stall_s)
    if soonest <= moment.left_s:
        return ""
    hosts = f"{moment.hosts} host{'s' * (moment.hosts != 1)}"
    return f"the work takes {hosts} {_span(soonest)} on demand, and {_span(moment.left_s)} are left: it will be late"


def _span(seconds: float) -> str:
    """For people; hours and minutes, towards zero."""
    minutes, sign = int(abs(seconds) // 60), "-" if seconds <= -60 else ""
    if minutes:
        return f"{sign}{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{sign}{minutes} min"
    return f"{ceil(seconds)} s"
