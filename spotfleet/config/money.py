"""Parser of the keys about markets, deadlines and money."""

from __future__ import annotations

from collections.abc import Sequence

from spotfleet import plugins
from spotfleet.config.document import Document
from spotfleet.config.sections import FileSection
from spotfleet.model import Need, Nodes, PolicySpec
from spotfleet.plugins import Machines, kind_missing
from spotfleet.words import dollars


def policy_spec(document: Document, file: FileSection, provider: str, nodes: Nodes,
                needs: Sequence[Need]) -> PolicySpec:
    """Return the policy; note combinations that do not fit as problems of the document."""
    (work_s, work_steps), spot = file.work, any(n.use_spot for n in needs)
    if file.spot_policy in ("spot", "auto") and not spot:
        document.add(("spot_policy",), f"is {file.spot_policy}, but `use_spot: false` allows no spot host; "
                                       "remove one of them")
    if file.on_demand_base > nodes.target:
        document.add(("on_demand_base",), f"expected at most the target of {nodes.target} hosts, "
                                          f"got {file.on_demand_base}")
    if file.deadline and not (work_s or work_steps):
        document.add(("deadline",), 'needs `work`, or nobody knows what is to be done by then: '
                                    'work: 48h (at full target), or work: "100000 steps"')
    if file.deadline and file.spot_policy in ("spot", "on-demand"):
        document.add(("spot_policy",), f"is {file.spot_policy}, but a deadline is kept by mixing both markets; "
                                       "remove it, or write auto")
    if work_s and file.deadline and work_s > file.deadline:
        document.add(("deadline",), f"of {_hours(file.deadline)} is impossible: the work takes {_hours(work_s)} "
                                    "at full target; allow more time, or raise nodes.target and lower `work`")
    mixes = file.on_demand_base or file.deadline or file.spot_policy in ("auto", "on-demand")
    if mixes and kind_missing(plugins.load(provider).traits, needs):
        document.add(("resources",), "name `instance_type` or `accelerators`, so that on-demand hosts are of the same "
                                     "kind as spot ones")
    if file.all_or_nothing and (file.on_demand_base or file.deadline or file.spot_policy == "auto"):
        document.add(("all_or_nothing",), "launches all hosts in one pool, so they are of one market; "
                                          "remove it, or use spot_policy: spot or on-demand alone")
    if file.max_cost and file.max_hourly_cost and file.max_cost < file.max_hourly_cost / 60:
        document.add(("max_cost",), f"{dollars(file.max_cost, 2)} is spent within a minute at max_hourly_cost "
                                    f"{dollars(file.max_hourly_cost, 2)}/h; raise it")
    if file.replace_slow and plugins.load(provider).traits.machines is Machines.EXISTING:
        document.add(("replace_slow",), f"the machines of {provider} are given, and none can be launched in the place "
                                        "of a slow one; remove this")
    return PolicySpec(file.spot_policy or ("auto" if file.deadline else "spot"), file.on_demand_base, file.deadline,
                      work_s, work_steps, file.max_cost, file.max_hourly_cost, file.replace_slow)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:g} h"
