"""Preview of `up`: its actions and costs, from the planner itself, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from spotfleet.errors import UsageError
from spotfleet.fleet.domain.history import MarketHistory
from spotfleet.fleet.domain.state import FleetState
from spotfleet.fleet.planner.groups import follows_demand
from spotfleet.fleet.planner.plan import Launch, Observed, Wait, Wanted, plan
from spotfleet.fleet.planner.size import first_workers, hosts_wanted
from spotfleet.fleet.policy.budget import Budget, describe, too_small
from spotfleet.fleet.policy.deadline import impossible
from spotfleet.fleet.policy.decide import DeadlineJob, PolicyInput, decide
from spotfleet.fleet.policy.lifetimes import STALL_S, BootTime, PoolLifetime, boot_time
from spotfleet.fleet.policy.mix import apply_choice, on_demand_needs
from spotfleet.fleet.policy.values import DecisionInput, MarketTarget
from spotfleet.matching import matches, meets
from spotfleet.model import FleetSpec, GroupSpec, Market, Need, Nodes, Offer, PolicySpec, Role
from spotfleet.providers import OfferValidation, Provider
from spotfleet.providers.plugin import RegionRow, plugin_of, traits_of
from spotfleet.words import did_you_mean

KEYS = {"accelerator": "accelerators"}  # as the fleet file calls them
# Changes of these need no other machines: they hold for the next job.
FOR_NEXT_JOB = ("workdir", "envs", "file_mounts", "mounted", "setup", "setup_timeout_s", "run", "resize")


class PlanKind(Enum):
    NEW = "new"
    CONTINUE = "continue"  # an earlier `up` did not come to its end
    SAME = "same"
    NODES = "nodes"
    POLICY = "policy"


@dataclass(frozen=True)
class Estimate:
    """Expected cost of the work that the file names, for all machines, at present prices."""

    work_s: float
    spot_micros: int  # if spot hosts are available all the time; includes time lost to interruptions
    on_demand_micros: int  # with the cheapest machines that fit, all on demand
    mixed: bool  # the policy uses on-demand hosts where it must: the cost will be between the two
    base: int = 0  # number of hosts that are always on demand, also in `spot_micros`
    hosts: int = 0
    boot: BootTime = field(default_factory=BootTime)


@dataclass(frozen=True)
class UpPlan:
    fleet: str
    provider: str
    change: PlanKind
    nodes: Nodes
    was: Nodes | None  # before, when `change` is NODES
    offers: tuple[Offer, ...]  # for the workers, cheapest first
    dispatcher: Launch | None  # None: nothing on sale fits, see `why`
    workers: tuple[Launch, ...]
    why: str = ""  # what the planner waits for
    kept: tuple[str, ...] = ()  # keys of the fleet file that changed and hold from the next job on
    notify_changed: bool = False  # `notify` of a running fleet: applied at once
    orphan_after_s: float = 0.0
    max_lifetime_s: float = 0.0
    keep_s: float = 0.0  # how long its dispatcher stays, with unfetched results, after the fleet has ended by itself
    left_out: str = ""  # what is not stored at the checkpoint target
    region: str = ""  # the one that is chosen, or was chosen, among several
    regions: tuple[RegionRow, ...] = ()  # the candidates of a new fleet, the chosen one first
    beside: str = ""  # other costs, which no price here includes
    unknown: str = ""  # with no offers: the words of `resources` that the provider does not know, and those it knows
    policy: PolicySpec = field(default_factory=PolicySpec)
    policy_changed: bool = False  # beyond what holds for the next job
    policy_why: str = ""  # why the policy starts with these numbers of hosts; "" where there is nothing to decide
    estimate: Estimate | None = None  # None: the file does not name the work, or nothing is on sale
    priced_by: str = ""  # if a catalog and no provider gave the prices: which, and why
    before_up: tuple[str, ...] = ()  # what must be done before `up` can follow this plan
    groups: tuple[GroupSpec, ...] = ()  # the named groups of hosts
    unsold: str = ""  # the first group for which nothing is on sale, and why
    sure_micros_h: int = 0  # price that keeps the deadline even without spot hosts; 0 if within max_hourly_cost

    @property
    def micros_h(self) -> int:
        """Price of all machines at target, at present prices."""
        return sum(launch.offer.price_micros_h for launch in self._launches())

    @property
    def on_demand_micros_h(self) -> int:
        """Price of the same machines, all on demand."""
        return sum(launch.offer.on_demand_micros_h for launch in self._launches())

    def micros_h_of(self, market: Market) -> int:
        """Return the price of the machines of one market."""
        return sum(launch.offer.price_micros_h for launch in self._launches() if launch.offer.market is market)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Pools of machines whose on-demand price is unknown."""
        return tuple(dict.fromkeys(launch.offer.pool for launch in self._launches()
                                   if launch.offer.price_micros_h and not launch.offer.on_demand_micros_h))

    def _launches(self) -> list[Launch]:
        return [*([self.dispatcher] if self.dispatcher else []), *self.workers]


def preview(spec: FleetSpec, cloud_name: str, change: PlanKind, was: FleetSpec | None, provider: Provider,
            now: float, history: MarketHistory = MarketHistory()) -> UpPlan:
    """Return the plan: the provider's offers, and the planner's actions with them. `history`: the measured boots."""
    plain = spec.policy.spot_policy == "spot" and not spec.policy.on_demand_base and not spec.policy.deadline_s
    offers = _offers(provider, spec.any_of if plain else (*spec.any_of, *on_demand_needs(spec.any_of)))
    full = [_full(spec, group, cloud_name, offers) for group in spec.parts]
    hosts = sum(part.hosts for part in full)
    parts = [replace(part, hosts=0) if follows_demand(group.nodes) else part
             for part, group in zip(full, spec.parts, strict=True)]
    choices = {} if plain else {
        part.group: first_choice(replace(spec, any_of=part.any_of, nodes=group.nodes), part.hosts, offers, now, history)
        for part, group in zip(parts, spec.parts, strict=True) if part.hosts}
    parts = [apply_choice(part, choices[part.group]) if part.group in choices else part for part in parts]
    workers = replace(parts[0], any_of=spec.any_of, parts=tuple(parts)) if spec.groups else parts[0]
    dispatcher = Wanted(cloud_name, Role.DISPATCHER, 1, (spec.dispatcher,))
    actions = plan(dispatcher, FleetState(), _offers(provider, dispatcher.any_of), Observed(), now)
    machine = next((a for a in actions if isinstance(a, Launch)), None)
    refuse(spec, [o for o in offers if _may_be(spec, o)], machine.offer.price_micros_h if machine else 0,
           boot_time(history))
    if spec.policy.max_micros_h:
        own = machine.offer.price_micros_h if machine else 0
        workers = replace(workers, max_micros_h=max(1, spec.policy.max_micros_h - own))
    launches = plan(workers, FleetState(history=history), offers, Observed(), now)
    later = [a for part in parts if not part.total
             for a in plan(replace(part, hosts=1), FleetState(history=history), offers, Observed(), now)]
    launches = [*launches, *(a for a in later if isinstance(a, Wait))]
    changed = [f.name for f in fields(spec) if was and getattr(was, f.name) != getattr(spec, f.name)]
    return UpPlan(
        fleet=spec.name, provider=spec.provider, change=change, nodes=spec.nodes, was=was.nodes if was else None,
        offers=tuple(sorted(offers, key=lambda o: (o.price_micros_h, o.pool))),
        dispatcher=machine,
        workers=tuple(a for a in launches if isinstance(a, Launch)),
        why="; ".join(a.why for a in [*actions, *launches] if isinstance(a, Wait)),
        kept=(*(name for name in changed if name in FOR_NEXT_JOB), *_kept_of_policy(was, spec)),
        notify_changed=was is not None and was.notify != spec.notify,
        orphan_after_s=spec.orphan_after_s, max_lifetime_s=spec.max_lifetime_s,
        keep_s=traits_of(spec).keeps_results_s,
        left_out=spec.checkpoint.leaves_out, beside=plugin_of(spec.provider).unpriced(spec, hosts),
        unknown="" if offers else _unknown(provider, spec.any_of), groups=spec.groups,
        unsold=next((f"{group.name}: {_unknown(provider, group.any_of) or 'no offer fits'}" for group in spec.groups
                     if not any(matches(need, o) for need in group.any_of for o in offers)), ""),
        policy=spec.policy, policy_changed=was is not None and policy_changed(was, spec),
        policy_why="; ".join(f"{name}: {choice.why}" if name else choice.why for name, choice in choices.items()),
        estimate=None if spec.groups else _estimate(spec, hosts, provider, machine, history),  # a job has one of them
        sure_micros_h=_price_above_limit(spec, offers, machine.offer.price_micros_h if machine else 0),
    )


def _full(spec: FleetSpec, group: GroupSpec, cloud_name: str, offers: Sequence[Offer]) -> Wanted:
    """Return what a group has for a first job: later hosts come only when a job asks for them."""
    slots = min((o.slots for o in offers if any(matches(need, o) for need in group.any_of)), default=1)
    hosts = hosts_wanted(group.nodes, slots, [first_workers(spec.resize)])
    return Wanted(cloud_name, Role.WORKER, hosts, group.any_of, spec.interruption_behavior, placement=spec.placement,
                  all_or_nothing=spec.all_or_nothing, stays=True, group=group.name)


def changes(was: FleetSpec, spec: FleetSpec) -> list[str]:
    """Return the differing fields that only a new fleet can change."""
    allowed = ("nodes", "policy", "notify", *FOR_NEXT_JOB)
    was, spec = _comparable(was), _comparable(spec)
    was, spec = (replace(s, groups=tuple(replace(g, nodes=Nodes()) for g in s.groups), any_of=() if s.groups else
                         s.any_of) for s in (was, spec))  # ranges may change; the groups have the needs
    return [f.name for f in fields(spec) if getattr(was, f.name) != getattr(spec, f.name) and f.name not in allowed]


def policy_changed(was: FleetSpec, spec: FleetSpec) -> bool:
    """Return whether the policy differs in settings that a running fleet applies at once."""
    return _at_once(was.policy) != _at_once(spec.policy)


def _at_once(policy: PolicySpec) -> PolicySpec:
    return replace(policy, deadline_s=0.0, work_s=0.0, work_steps=0)


def _kept_of_policy(was: FleetSpec | None, spec: FleetSpec) -> list[str]:
    """Return which of `deadline` and `work` differ: they belong to a job and hold from its submission."""
    if was is None:
        return []
    old, new = was.policy, spec.policy
    work = (old.work_s, old.work_steps) != (new.work_s, new.work_steps)
    return [*(["deadline"] if old.deadline_s != new.deadline_s else []), *(["work"] if work else [])]


def first_choice(spec: FleetSpec, hosts: int, offers: Sequence[Offer], now: float,
                 history: MarketHistory = MarketHistory()) -> MarketTarget:
    """Return the policy's first decision, as if the fleet file's job were submitted at once."""
    policy = spec.policy
    work_s = policy.work_s * spec.nodes.target if policy.work_s else math.inf
    tasks = (DeadlineJob("a job", policy.deadline_s, work_s),) if policy.deadline_s else ()
    return decide(PolicyInput(policy, spec.any_of, hosts, tasks, tuple(offers)), FleetState(history=history), now)


def refuse(spec: FleetSpec, offers: Sequence[Offer], dispatcher_micros_h: int, boot: BootTime = BootTime()) -> None:
    """Raise UsageError for limits that no offer can keep, before anything is launched."""
    policy, nodes = spec.policy, spec.nodes
    why = too_small(policy.max_micros_h, nodes, offers, dispatcher_micros_h)
    if why:
        raise UsageError(f"max_hourly_cost: {why}", hint="raise max_hourly_cost, lower nodes.min, or allow cheaper "
                                                         "machines under `resources`")
    if policy.max_micros and offers:
        micros_h = dispatcher_micros_h + nodes.min * min(o.price_micros_h for o in offers)
        budget = Budget(policy.max_micros, 0, micros_h, dispatcher_micros_h, traits_of(spec).keeps_results_s)
        if budget.ending >= budget.limit:
            best = min(offers, key=lambda o: (o.price_micros_h, o.pool))
            raise UsageError(f"max_cost: {describe(budget)}, with {nodes.min} x the cheapest offer, {best.pool}",
                             hint="raise max_cost, lower nodes.min, or allow cheaper machines under `resources`")
    if policy.deadline_s and policy.work_s:
        why = impossible(DecisionInput(0.0, nodes.target, left_s=policy.deadline_s,
                                       work_s=policy.work_s * nodes.target, boot_s=boot.seconds, boots=boot.boots))
        if why:
            raise UsageError(f"deadline: impossible: {why}", hint="allow more time, or raise nodes.target")


def _price_above_limit(spec: FleetSpec, offers: Sequence[Offer], dispatcher_micros_h: int) -> int:
    """Return the price of all hosts on demand if a deadline may need them and max_hourly_cost forbids them; else 0."""
    full = [o.price_micros_h for o in offers if o.market is Market.ON_DEMAND and o.price_micros_h and _may_be(spec, o)]
    if not full or not spec.policy.deadline_s or not spec.policy.max_micros_h:
        return 0
    needed = dispatcher_micros_h + spec.nodes.target * min(full)
    return needed if needed > spec.policy.max_micros_h else 0


def _may_be(spec: FleetSpec, offer: Offer) -> bool:
    """Return whether the offer meets a need of this fleet, price limit included."""
    return any(meets(n, offer) for n in (*spec.any_of, *on_demand_needs(spec.any_of)))


def _estimate(spec: FleetSpec, hosts: int, provider: Provider, machine: Launch | None,
              history: MarketHistory) -> Estimate | None:
    work_s = spec.policy.work_s
    if not work_s or not hosts:
        return None
    spot = [o for o in _offers(provider, [n for n in spec.any_of if n.use_spot]) if _may_be(spec, o)]
    full = [o for o in _offers(provider, on_demand_needs(spec.any_of)) if o.price_micros_h]  # 0: unknown
    if not full:
        return None
    own = machine.offer.price_micros_h if machine else 0
    cheapest = min(spot or full, key=lambda o: o.price_micros_h)
    boot = boot_time(history, cheapest)
    waste = 1 + (boot.seconds + STALL_S * hosts) / PoolLifetime().expected_s()
    each = min(o.price_micros_h for o in full)
    base = hosts if not spot or spec.policy.spot_policy == "on-demand" else min(hosts, spec.policy.on_demand_base)
    cheap = own + base * each + (hosts - base) * min((o.price_micros_h for o in spot), default=0)
    hours = work_s / 3600
    return Estimate(work_s, round(cheap * hours * (waste if base < hosts else 1)), round((own + hosts * each) * hours),
                    base < hosts and spec.policy.spot_policy != "spot", base, hosts, boot)


def _comparable(spec: FleetSpec) -> FleetSpec:
    """Return `spec` without the settings that hold only for this machine: access to SSH machines and to an account."""
    return plugin_of(spec.provider).portable(spec)


def _offers(provider: Provider, needs: Sequence[Need]) -> list[Offer]:
    found: dict[str, Offer] = {}
    for need in needs:  # without its limit, so that the plan can show by how much the price exceeds it
        found.update((o.pool, o) for o in provider.offers(replace(need, max_micros_h=0)))
    return list(found.values())


def _unknown(provider: Provider, needs: Sequence[Need]) -> str:
    """Describe the unknown words of the needs, or why there is no offer; "" if all are known and nothing more is."""
    if isinstance(provider, OfferValidation):
        return provider.unknown(needs) or "no offer fits"
    sold = [offer for use_spot in (True, False) for offer in provider.offers(Need(use_spot=use_spot))]
    found = []
    for need in needs:
        for key in ("instance_type", "accelerator", "region", "zone"):
            word, known = getattr(need, key), sorted({getattr(offer, key) for offer in sold} - {""})
            if word and word not in known:
                found.append(f"{KEYS.get(key, key)} '{word}' is unknown; there is {', '.join(known) or 'none'}"
                             f"{did_you_mean(word, known)}")
    return "; ".join(dict.fromkeys(found))
